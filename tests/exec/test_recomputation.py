"""Activations that are computed again: the bits of those that are kept, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.property.oracle import value

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.precision.decorator import decorate
from penstock.program.precision.lists import AutoMixedPrecisionLists
from penstock.program.program import Program
from penstock.scope import Scope

L: Any = fluid.layers
STEPS, ROWS, WIDTH, DEPTH = 3, 6, 5, 6


def dense_layers(x: Any) -> tuple[Any, list[Any]]:
    kept, h = [], x
    for number in range(DEPTH):
        h = L.dropout(L.fc(h, WIDTH, act="tanh"), 0.3)
        h = L.reshape(L.relu(h + 0.1), [-1, WIDTH])
        if number % 2:
            kept.append(h)
    return h, kept


def images(x: Any) -> tuple[Any, list[Any]]:
    kept, h = [], L.reshape(x, [-1, 1, 1, WIDTH])
    for _ in range(3):
        h = L.batch_norm(L.conv2d(h, 2, 3, padding=1, bias_attr=False), act="relu")
        kept.append(L.dropout(h, 0.2))
        h = kept[-1]
    return L.reshape(h, [-1, 2 * WIDTH]), kept[1:]


def with_a_branch(x: Any) -> tuple[Any, list[Any]]:
    first = L.fc(x, WIDTH, act="sigmoid")
    h = L.tanh(L.fc(first, WIDTH))
    chosen = L.cond(L.reduce_sum(x) > 0.0, lambda: L.tanh(h * 2.0), lambda: h * 3.0)
    kept = L.fc(chosen * h, WIDTH)
    return L.tanh(kept) + first, [kept]  # which crosses its segment, so it is kept


def statistics_that_others_read(x: Any) -> tuple[Any, list[Any]]:
    h = L.reshape(x, [-1, 1, 1, WIDTH])
    names = {"moving_mean_name": "m", "moving_variance_name": "v"}
    before = L.tanh(L.batch_norm(h, use_global_stats=True, **names))
    kept = L.fc(before * L.batch_norm(h, **names), WIDTH)
    return L.tanh(kept), [kept]


NETWORKS: dict[str, Callable[[Any], tuple[Any, list[Any]]]] = {
    "dense layers": dense_layers,
    "images": images,
    "a branch": with_a_branch,
    "statistics that others read": statistics_that_others_read,
}


def recomputing(inner: Any, kept: list[Any]) -> Any:
    optimizer = fluid.optimizer.RecomputeOptimizer(inner)
    optimizer._set_checkpoints(kept)
    return optimizer


def recorded(network: str, around: Callable[[Any, list[Any]], Any]) -> tuple[Program, Program, Any]:
    main, startup = Program(), Program()
    main.random_seed = startup.random_seed = 7
    with fluid.program_guard(main, startup):
        out, kept = NETWORKS[network](L.data("x", [WIDTH], dtype="float32"))
        loss = L.mean(L.square(out))
        around(fluid.optimizer.Adam(0.01), kept).minimize(loss)
    return main, startup, loss


def trained(network: str, around: Callable[[Any, list[Any]], Any], replicas: int) -> list[np.ndarray]:
    main, startup, loss = recorded(network, around)
    exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    places = [fluid.CPUPlace()] * replicas
    program = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=places) if replicas else main
    losses = []
    for step in range(STEPS):
        x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype("float32")
        losses.append(exe.run(program, {"x": x}, [loss], scope=scope)[0])
    state = sorted(v.name for v in main.variables.values() if v.persistable)
    return [*losses, *(value(scope, name).numpy() for name in state)]


def again(program: Program) -> list[Any]:
    return [op for op in program.operators if any("@AGAIN" in name for name in op.output_names())]


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("network", NETWORKS)
def test_recomputed_activations_change_no_bit(network: str, replicas: int) -> None:
    plain = trained(network, lambda inner, kept: inner, replicas)
    recomputed = trained(network, recomputing, replicas)
    assert len(plain) == len(recomputed)
    for mine, other in zip(plain, recomputed, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_backward_reads_checkpoints_and_recomputed_values() -> None:
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        out, kept = dense_layers(L.data("x", [WIDTH]))
        recomputing(fluid.optimizer.SGD(0.1), kept).minimize(L.mean(out))
    repeated = again(main)
    storage = {name: var.storage for name, var in main.variables.items()}
    state = {v.name for v in main.variables.values() if v.persistable or v.feed}
    forward = {storage[n] for op in main.operators if op.role == Role.FORWARD for n in op.output_names()} - state
    backward = [op for op in main.operators if op.role & Role.BACKWARD]
    read = {storage[n] for op in backward for n in op.input_names() if n in storage} & forward
    assert read == {storage[v.name] for v in kept}
    assert {op.type.split(".")[1] for op in repeated} >= {"dropout", "tanh", "relu", "delayed"}
    assert all(op.role == Role.BACKWARD for op in repeated)


def test_mixed_precision_is_that_of_the_forward_pass() -> None:
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        h = L.fc(L.data("x", [WIDTH]), WIDTH, act="tanh")
        kept = L.fc(L.fc(h, WIDTH, act="tanh") * 2.0, WIDTH)
        lists = AutoMixedPrecisionLists(custom_white_list={"scale"}, custom_black_varnames=[h.name])
        optimizer = decorate(recomputing(fluid.optimizer.SGD(0.1), [kept]), lists)
        optimizer.minimize(L.mean(kept * kept))
    makers = {name: op for op in main.operators for name in op.output_names()}
    seconds = [name for name in makers if name.endswith("@AGAIN") and "delayed" not in makers[name].type]
    for name in seconds:  # what computes in half precision is followed by a cast of its result
        second, first = makers[name], makers[name.removesuffix("@AGAIN")]
        assert second.type == first.type
        assert [main.variables[n].dtype for n in second.input_names()] == [
            main.variables[n].dtype for n in first.input_names()
        ]
    assert any(main.variables[n].dtype == "bfloat16" for name in seconds for n in makers[name].input_names())


def test_statistics_of_batch_norm_are_written_once() -> None:
    main, _, _ = recorded("images", recomputing)
    norms = [op for op in again(main) if "batch_norm" in op.type]
    assert norms and not any(op.writes for op in norms)


def test_recomputation_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")

    def plan(around: Callable[[Any, list[Any]], Any]) -> dict[str, int]:
        main, startup = Program(), Program()
        with fluid.program_guard(main, startup):
            h, kept = L.data("x", [64], dtype="float32"), []
            for _ in range(4):
                for _ in range(6):
                    h = L.tanh(L.fc(h, 64, bias_attr=False) * 0.5)
                kept.append(h)
            loss = L.mean(h)
            around(fluid.optimizer.SGD(0.1), kept).minimize(loss)
        scope, feed = Scope(), {"x": np.ones((1024, 64), "float32")}
        fluid.Executor().run(startup, scope=scope)
        exe = fluid.ParallelExecutor(False, loss.name, main, scope=scope)
        for _ in range(3):
            exe.run([loss.name], feed)
        found: dict[str, int] = exe.statistics()["plans"][0]
        exe.close()
        return found

    plain, recomputed = plan(lambda inner, kept: inner), plan(recomputing)
    # Of 24 activations of 256 KiB all are kept, or 4 checkpoints and the 6 of one segment. Freed as soon as possible,
    # and at offsets that hold on every schedule:
    assert plain["observed_bytes"] > 24 << 18
    assert recomputed["observed_bytes"] < 0.5 * plain["observed_bytes"]
    assert recomputed["arena_bytes"] < 0.5 * plain["arena_bytes"]


def test_append_backward_takes_checkpoints() -> None:
    with fluid.program_guard(main := Program(), Program()):
        out, kept = dense_layers(L.data("x", [WIDTH]))
        fluid.append_backward(L.mean(out), checkpoints=[kept[0], kept[1].name])
    assert again(main)


def test_a_second_recording_survives_text_and_clone() -> None:
    main, _, _ = recorded("images", recomputing)
    assert Program.parse(str(main)) == main
    assert not again(main.clone(for_test=True))


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [(None, "call _set_checkpoints"), (["nothing"], "'nothing'"), ("x", "expected a list of variables")],
)
def test_wrong_checkpoints_are_errors(checkpoints: Any, message: str) -> None:
    with fluid.program_guard(Program(), Program()):
        loss = L.mean(L.fc(L.data("x", [WIDTH]), 1))
        optimizer = fluid.optimizer.RecomputeOptimizer(fluid.optimizer.SGD(0.1))

        def minimize() -> None:
            if checkpoints is not None:
                optimizer._set_checkpoints(checkpoints)
            optimizer.minimize(loss)

        with pytest.raises(ProgramError, match=message):
            minimize()


def test_checkpoints_that_save_nothing_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with fluid.program_guard(Program(), Program()):
        x = L.data("x", [WIDTH])
        first = L.fc(x, WIDTH)
        recomputing(fluid.optimizer.SGD(0.1), [first]).minimize(L.mean(L.tanh(first)))
    assert "computes nothing again" in caplog.text
