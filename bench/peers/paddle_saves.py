"""Saves of paddlepaddle 2.6.2 in Fluid's formats: `python -m bench.peers.paddle_saves write|check FOLDER`.

`write` trains a small network for three steps with Adam, and saves it as Fluid does: a file for each variable
(`separate/`), one for all (`combined/all`), pickles (`pickled/m.pdparams`), a model with its parameters (`network/`),
a model of many operators (`operators/`) and models with control flow (`blocks/`), with the arrays that were fed and
fetched (`expected.npz`). `check` loads `back/separate`, `back/combined/all` and `back/pickled/m`, which Penstock has
written, and prints the network's result as JSON. Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import base, static
from paddle.static import io, nn

from bench.peers.fluid_models import FEEDS, LEVELS, OPERATORS, Case
from bench.peers.paddle_blocks import written as blocks_written

STEPS = 3


def main() -> None:
    """Write or check a folder."""
    paddle.enable_static()
    paddle.seed(7)
    folder = Path(sys.argv[2])
    if sys.argv[1] == "write":
        expected = _write_network(folder) | _write_operators(folder / "operators") | _write_blocks(folder / "blocks")
        np.savez(folder / "expected.npz", **expected)  # type: ignore[arg-type]  # the stubs take them for allow_pickle
        return
    json.dump({way: _read_back(folder / "back", way) for way in ("separate", "combined", "pickled")}, sys.stdout)


def _network() -> tuple[Any, Any, Any, Any]:
    main, startup = static.Program(), static.Program()
    with base.unique_name.guard(), static.program_guard(main, startup):
        ids, dense, label = (static.data(name, [-1, *FEEDS[name].shape[1:]], str(FEEDS[name].dtype), lod_level=level)
                             for name, level in (("ids", 1), ("dense", 0), ("label", 0)))  # fmt: skip
        table = static.create_parameter([6, 3], "float32", name="tables/words")
        rows = _appended("lookup_table", {"W": table, "Ids": ids}, {}, ["Out"])["Out"][0]
        pooled = _appended("sequence_pool", {"X": rows}, {"pooltype": "SUM"}, ["Out", "MaxIndex"])["Out"][0]
        pooled.desc.set_shape([-1, 3])
        hidden = nn.fc(paddle.concat([pooled, dense], 1), 4, activation="relu")
        predicted = nn.fc(nn.batch_norm(hidden), 3, activation="softmax")
        loss = paddle.mean(paddle.nn.functional.cross_entropy(predicted, label, use_softmax=False))
        test = main.clone(for_test=True)
        paddle.optimizer.Adam(0.01).minimize(loss)
    return main, startup, test, (predicted, loss)


def _fed() -> dict[str, Any]:
    return {
        name: base.create_lod_tensor(array, LEVELS[name], paddle.CPUPlace()) if name in LEVELS else array
        for name, array in FEEDS.items()
    }


def _saved(var: Any) -> bool:
    return bool(var.persistable) and var.name not in ("feed", "fetch")


def _write_network(folder: Path) -> dict[str, np.ndarray]:
    main, startup, test, (predicted, loss) = _network()
    executor, fed = static.Executor(paddle.CPUPlace()), _fed()
    fed = {name: fed[name] for name in ("ids", "dense", "label")}
    executor.run(startup)
    for _ in range(STEPS):
        executor.run(main, feed=fed, fetch_list=[loss])
    result = executor.run(test, feed=fed, fetch_list=[predicted.name])[0]
    io.save_vars(executor, str(folder / "separate"), main, predicate=_saved)
    io.save_vars(executor, str(folder / "combined"), main, predicate=_saved, filename="all")
    static.save(main, str(folder / "pickled" / "m"))
    (folder / "pickled" / "m.pdmodel").unlink()
    _write_model(folder / "network", executor, test, ["ids", "dense"], [predicted.name])
    return {"network": result}


def _write_model(folder: Path, executor: Any, program: Any, feeds: list[str], fetches: list[str]) -> None:
    block = program.global_block()
    model = program._prune_with_input(feeded_var_names=feeds, targets=[block.var(name) for name in fetches])
    model = model._inference_optimize(prune_read_op=True)
    io.prepend_feed_ops(model, feeds)
    io.append_fetch_ops(model, fetches)
    folder.mkdir(parents=True)
    (folder / "__model__").write_bytes(model.desc.serialize_to_string())
    io.save_vars(executor, str(folder), model, predicate=_saved, filename="__params__")


def _write_operators(folder: Path) -> dict[str, np.ndarray]:
    main, startup = static.Program(), static.Program()
    with base.unique_name.guard(), static.program_guard(main, startup):
        fed = {
            name: static.data(name, [-1, *array.shape[1:]], str(array.dtype), len(LEVELS.get(name, ())))
            for name, array in FEEDS.items()
            if any(name in given for case in OPERATORS.values() for given in case.inputs.values())
        }
        made = {name: _case(case, fed) for name, case in OPERATORS.items()}
    executor = static.Executor(paddle.CPUPlace())
    executor.run(startup)
    names = [var.name for var in made.values()]
    feeds = {name: value for name, value in _fed().items() if name in fed}
    results = executor.run(main, feed=feeds, fetch_list=names, return_numpy=False)
    _write_model(folder, executor, main, list(fed), names)
    return {f"operators/{name}": np.array(value) for name, value in zip(made, results, strict=True)}


def _write_blocks(folder: Path) -> dict[str, np.ndarray]:
    """Write the models of `paddle_blocks`; return what they give."""
    found = {}
    for name, program, startup, feeds, fetch in blocks_written():
        executor = static.Executor(paddle.CPUPlace())
        executor.run(startup)
        fed = {feed: value for feed, value in _fed().items() if feed in feeds}
        found[f"blocks/{name}"] = np.array(executor.run(program, feed=fed, fetch_list=[fetch], return_numpy=False)[0])
        _write_model(folder / name, executor, program, feeds, [fetch.name])
    return found


def _case(case: Case, fed: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {slot: [fed[name] for name in names] for slot, names in case.inputs.items()}
    for key, shape in case.parameters.items():
        slot = key.partition(".")[0]
        first = (
            paddle.nn.initializer.Uniform(0.5, 1.5) if slot == "Variance" else paddle.nn.initializer.Normal(0.0, 0.5)
        )
        made = static.create_parameter(list(shape), "float32", default_initializer=first)
        given[slot] = [*given.get(slot, ()), made]
    kept = {
        slot: given[slot.removesuffix("Out")] for slot in case.outputs if slot.removesuffix("Out") in case.parameters
    }
    return _appended(case.type, given, dict(case.attributes), case.outputs, kept)[case.outputs[0]][0]


def _appended(
    type_: str,
    inputs: Mapping[str, Any],
    attrs: dict[str, Any],
    outputs: Sequence[str],
    kept: Mapping[str, Any] | None = None,
) -> Any:
    """Append an operator; return its outputs. `kept`: those that are variables already."""
    block, named = static.default_main_program().global_block(), base.unique_name.generate
    made: dict[str, Any] = {}
    for slot in outputs:
        made.setdefault(slot.partition(".")[0], []).append(
            block.create_var(name=named(f"{type_}.tmp"), dtype="float32")
        )
    made |= kept or {}
    block.append_op(type=type_, inputs=dict(inputs), outputs=made, attrs=attrs)
    return made


def _read_back(folder: Path, way: str) -> list[float]:
    main, startup, test, (predicted, _) = _network()
    executor, fed = static.Executor(paddle.CPUPlace()), _fed()
    with static.scope_guard(static.Scope()):
        executor.run(startup)
        if way == "pickled":
            static.load(main, str(folder / way / "m"), executor)
        else:
            filename = "all" if way == "combined" else None
            io.load_vars(executor, str(folder / way), main, predicate=_saved, filename=filename)
        fed = {name: fed[name] for name in ("ids", "dense", "label")}
        result = executor.run(test, feed=fed, fetch_list=[predicted.name])[0]
        power = np.array(static.global_scope().find_var("fc_0.w_0_beta1_pow_acc_0").get_tensor())
    return [*map(float, result.reshape(-1)), float(power[0])]


if __name__ == "__main__":
    main()
