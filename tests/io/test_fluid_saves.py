"""Files of Fluid load as PaddlePaddle 2.6.2 wrote them, and come back from a conversion as the same bytes."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers.fluid_models import FEEDS, LEVELS
from bench.peers.fluid_saves import SAVES
from typer.testing import CliRunner

import penstock as fluid
from penstock.cli import app
from penstock.errors import UserError
from penstock.io.converting import Options, convert
from penstock.io.fluid.folders import read_combined, read_separate, write_separate
from penstock.io.fluid.names import updates_of
from penstock.io.fluid.tensors import FluidTensor
from penstock.io.saves.manifest import Damaged
from penstock.scope import Scope

STEPS = 3
WAYS: dict[str, Callable[[Path, Any], None]] = {
    "separate": lambda folder, main: fluid.io.load_persistables(None, folder / "separate", main),
    "combined": lambda folder, main: fluid.io.load_persistables(None, folder / "combined", main, "all"),
    "pickled": lambda folder, main: fluid.load(main, folder / "pickled" / "m"),
    "converted": lambda folder, main: fluid.io.load_persistables(None, converted(folder), main),
}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    with zipfile.ZipFile(SAVES) as archive:
        archive.extractall(folder)
    return folder


def converted(folder: Path) -> Path:
    target = folder / "converted"
    convert(folder / "separate", target, Options())
    return target


def fed(*names: str) -> dict[str, Any]:
    return {
        name: fluid.create_lod_tensor(FEEDS[name], LEVELS[name]) if name in LEVELS else FEEDS[name] for name in names
    }


def expected(folder: Path, name: str) -> np.ndarray:
    with np.load(folder / "expected.npz") as arrays:
        found: np.ndarray = arrays[name]
    return found


def network() -> tuple[Any, Any, Any]:
    """The network of bench/peers/paddle_saves.py, by Penstock's layers: main and test program, what it predicts."""
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        dense, label = fluid.layers.data("dense", [4]), fluid.layers.data("label", [1], dtype="int64")
        pooled = fluid.layers.sequence_pool(fluid.layers.embedding(ids, [6, 3], param_attr="tables/words"), "sum")
        hidden = fluid.layers.fc(fluid.layers.concat([pooled, dense], 1), 4, act="relu")
        predicted = fluid.layers.fc(fluid.layers.batch_norm(hidden), 3, act="softmax")
        test = main.clone(for_test=True)
        fluid.optimizer.AdamOptimizer(0.01).minimize(fluid.layers.mean(fluid.layers.cross_entropy(predicted, label)))
    return main, test, predicted


@pytest.mark.parametrize("way", WAYS)
def test_persistables_load_with_optimizer_state(way: str, saves: Path) -> None:
    main, test, predicted = network()
    with fluid.scope_guard(Scope()):
        WAYS[way](saves, main)
        found = fluid.Executor().run(test, fed("ids", "dense", "label"), [predicted])[0]
        scope = fluid.global_scope()
        moment = np.asarray(scope.var("adam_0.moment2.tables/words"))
        kept = [np.asarray(scope.var(f"adam_0.{name}")) for name in ("step", "learning_rate")]
    np.testing.assert_allclose(found, expected(saves, "network"), atol=1e-6)
    stored = read_separate(saves / "separate", ["tables/words_moment2_0"])["tables/words_moment2_0"]
    assert moment.tobytes() == stored.values.numpy().tobytes()
    assert [float(value) for value in kept] == [STEPS, pytest.approx(0.01)]


def test_a_conversion_back_gives_the_same_bytes(saves: Path, tmp_path: Path) -> None:
    names = ["fc_0.w_0", "tables/words", "batch_norm_0.w_1", "batch_norm_0.w_2", "fc_1.b_0_moment1_0"]
    convert(converted(saves), tmp_path / "separate", Options())
    for name in names:
        assert (tmp_path / "separate" / name).read_bytes() == (saves / "separate" / name).read_bytes()
    convert(converted(saves), tmp_path, Options(filename="all"))
    everything = sorted(
        p.relative_to(saves / "separate").as_posix() for p in (saves / "separate").rglob("*") if p.is_file()
    )
    for name, saved in read_combined(tmp_path / "all", everything).items():
        wanted = read_separate(saves / "separate", [name])[name].values
        np.testing.assert_allclose(saved.values.reshape(-1), wanted.reshape(-1), rtol=1e-6)


BLOCKS = ("while", "while and cond", "cond", "case", "recurrent", "backwards", "arrays", "dynamic rnn", "beam search")


@pytest.mark.parametrize("model", ["network", "operators", *(f"blocks/{name}" for name in BLOCKS)])
def test_a_model_gives_the_numbers_of_paddle(model: str, saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = "__params__" if (saves / model / "__params__").exists() else None
    with fluid.scope_guard(Scope()), np.load(saves / "expected.npz") as arrays:
        program, feeds, fetches = fluid.io.load_inference_model(
            saves / model, fluid.Executor(), params_filename=parameters
        )
        results = fluid.Executor().run(program, fed(*feeds), fetches, return_numpy=False)
        names = [name for name in arrays.files if name == model or name.startswith(f"{model}/")]
        assert len(names) == len(results) >= 1
        for name, result in zip(names, results, strict=True):
            np.testing.assert_allclose(np.asarray(result), arrays[name], atol=1e-6, err_msg=name)
            assert np.asarray(result).dtype == arrays[name].dtype, name
    assert not caplog.records


def test_a_model_with_unknown_operators_names_them(tmp_path: Path) -> None:
    from penstock.io.fluid.schema import message

    program = message("ProgramDesc")()
    block = program.blocks.add(idx=0, parent_idx=-1)
    for kind in ("relu", "nonesuch", "sgd", "while"):
        block.ops.add(type=kind)
    (tmp_path / "__model__").write_bytes(program.SerializeToString())
    with pytest.raises(UserError, match=r"operators that are not in Penstock: nonesuch, sgd\."):
        fluid.io.load_inference_model(tmp_path, None)


def header(levels: list[list[int]], dtype: int, dims: list[int]) -> bytes:
    """What stands before the values, spelled out."""
    described = bytes([0x08, dtype]) + b"".join(bytes([0x10, size]) for size in dims)
    lod = b"".join(struct.pack(f"<Q{len(level)}Q", 8 * len(level), *level) for level in levels)
    return struct.pack("<IQ", 0, len(levels)) + lod + struct.pack("<Ii", 0, len(described)) + described


@pytest.mark.parametrize(
    ("kind", "number"), [("float32", 5), ("float64", 6), ("int64", 3), ("int32", 2), ("uint8", 20)]
)
def test_tensors_have_their_dtype_and_lod(kind: str, number: int, tmp_path: Path) -> None:
    values = np.arange(6).astype(kind).reshape(3, 2)
    content = header([[0, 1, 3]], number, [3, 2]) + values.tobytes()
    (tmp_path / "x").write_bytes(content)
    found = read_separate(tmp_path, ["x"])["x"]
    assert found.values.numpy().tobytes() == values.tobytes()
    assert str(found.values.dtype) == f"torch.{kind}"
    assert [level.tolist() for level in found.lod] == [[0, 1, 3]]
    convert(tmp_path, tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path / "back", Options())
    assert (tmp_path / "back" / "x").read_bytes() == content


def test_selected_rows_become_rows_of_the_table(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    write_separate(tmp_path, {"table": FluidTensor(values, rows=np.array([3, 1]), height=4)})
    content = (tmp_path / "table").read_bytes()
    assert content[:36] == struct.pack("<IQqqq", 0, 2, 3, 1, 4)
    main, scope = fluid.Program(), Scope()
    with fluid.program_guard(main, fluid.Program()):
        fluid.layers.create_parameter([4, 2], "float32", "table")
    fluid.io.load_params(None, tmp_path, main, scope=scope)
    found = np.asarray(scope.var("table"))
    assert found.tolist() == [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    convert(tmp_path, tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path / "back", Options())
    assert (tmp_path / "back" / "table").read_bytes() == content


WHOLE = header([[0, 1]], 5, [1, 2]) + struct.pack("<2f", 1.0, 2.0)
HOSTILE = {
    "levels": struct.pack("<IQ", 0, 1 << 60),
    "level": struct.pack("<IQQ", 0, 1, 1 << 40),
    "rows": struct.pack("<IQq", 0, 1 << 40, 1),
    "description": struct.pack("<IQIi", 0, 0, 0, 1 << 30),
    "negative description": struct.pack("<IQIi", 0, 0, 0, -1),
    "sizes": struct.pack("<IQIi", 0, 0, 0, 9) + b"\x08\x05\x10\x80\x80\x80\x80\x80\x40" + b"\0" * 8,
    "many sizes": header([], 5, [0] * 40),
    "dtype": header([], 99, [1]) + b"\0" * 8,
    "version": struct.pack("<IQ", 1, 0) + WHOLE[12:],
    "offsets": header([[0, 7]], 5, [1, 2]) + b"\0" * 8,
    "behind": WHOLE + b"\0",
    **{f"cut at {end}": WHOLE[:end] for end in range(len(WHOLE))},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(HOSTILE[case])
    with pytest.raises((Damaged, UserError), match=r"x (is no tensor of Fluid|holds no TensorDesc)"):
        read_separate(tmp_path, ["x"])


def test_a_name_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(WHOLE)
    for name in ("../x", "/x", ""):
        with pytest.raises(UserError, match="its name leads elsewhere"):
            read_separate(tmp_path / "below", [name])
        with pytest.raises(UserError, match="its name leads elsewhere"):
            write_separate(tmp_path / "below", {name: FluidTensor(torch.zeros(1))})


class Calls:
    def __reduce__(self) -> Any:
        return os.putenv, ("PENSTOCK_UNPICKLED", "1")


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"w": Calls()}, protocol=2),
        pickle.dumps({"w": np.array([{}], dtype=object)}, protocol=2),
        pickle.dumps({"w": [1.0]}, protocol=2),
        pickle.dumps([1.0], protocol=2),
        b"\x80\x02}r\xff\xff\xff\x7f(h\x00K\x01u.",  # a memo index of nothing
        b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"K\x01s.",  # 2 ** 60 parts of a key
        b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",  # a key of 300 000 levels
        pickle.dumps({"w": np.zeros(3, np.longdouble)}, protocol=2),
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x3f.",  # bytes beyond the file
        pickle.dumps({"w": np.zeros(3)}, protocol=2)[:-4],
    ],
    ids=lambda content: f"{len(content)}_bytes",
)
def test_a_pickle_of_anything_but_arrays_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(os, "putenv", lambda *args: ran.append(args))
    (tmp_path / "m.pdparams").write_bytes(content)
    with pytest.raises(UserError, match=r"m\.pdparams (is no file of fluid\.save|holds)"):
        fluid.load(fluid.Program(), tmp_path / "m")
    assert not ran


class OneShape:
    """An array whose shape is the same tuple as another's."""

    def __reduce__(self) -> Any:
        kind = np.dtype("float32")
        return np.ndarray, SHAPE, (1, SHAPE, kind, False, np.arange(6, dtype=kind).tobytes())


SHAPE = (2, 3)


def test_a_pickle_may_use_a_shape_twice(tmp_path: Path) -> None:
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps({"a": OneShape(), "b": OneShape()}, protocol=2))
    found = fluid.io.load_program_state(tmp_path / "m")
    assert [found[name].tolist() for name in "ab"] == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2


def test_a_pickle_may_hold_empty_arrays_and_one_twice(tmp_path: Path) -> None:
    tied = np.arange(6, dtype=">f4").reshape(2, 3)
    arrays: dict[str, Any] = {"empty": np.zeros((0, 3), np.float32), "a": tied, "b": tied, "one": np.float64(2.5)}
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps(arrays, protocol=2))
    found = fluid.io.load_program_state(tmp_path / "m")
    for name, array in arrays.items():
        assert (found[name].shape, found[name].tobytes()) == (array.shape, array.astype(array.dtype.type).tobytes())


def test_a_load_that_fails_changes_nothing(saves: Path) -> None:
    main, _, _ = network()
    with fluid.program_guard(main, fluid.Program()):
        fluid.layers.create_parameter([2], "float32", "another")
    scope = Scope()
    with pytest.raises(UserError, match="no variable of Fluid 'another'"):
        fluid.io.load_persistables(None, saves / "separate", main, scope=scope)
    assert scope.names() == []


@pytest.mark.parametrize("path", ["pickled/m", "separate"])
def test_a_state_is_set_by_names_of_fluid(path: str, saves: Path, caplog: pytest.LogCaptureFixture) -> None:
    main, _, _ = network()
    state, scope = fluid.io.load_program_state(saves / path), Scope()
    fluid.io.set_program_state(main, {**state, "nobody": np.zeros(1)}, scope=scope)
    assert np.asarray(scope.var("fc_0.w_0")).tobytes() == state["fc_0.w_0"].tobytes()
    assert np.asarray(scope.var("adam_0.moment1.fc_0.w_0")).tobytes() == state["fc_0.w_0_moment1_0"].tobytes()
    assert float(np.asarray(scope.var("adam_0.step"))) == STEPS
    assert caplog.messages[-1].endswith("no such variables: nobody")


def test_a_file_for_all_of_another_program_is_refused(saves: Path) -> None:
    main, _, _ = network()
    with pytest.raises(UserError, match="holds more than the 9 variables"):
        fluid.io.load_params(None, saves / "combined", main, "all")


@pytest.mark.parametrize("count", [0, 5, 700, 50_000])
def test_updates_follow_from_powers_of_betas(count: int) -> None:
    powers = [float(np.float32(beta ** (count + 1))) for beta in (0.9, 0.999)]
    found = updates_of(powers[0], powers[1], (0.9, 0.999))
    assert found == pytest.approx(count, abs=1)


def test_the_command_converts_a_file_for_all_with_its_model(saves: Path, tmp_path: Path) -> None:
    source = [str(saves / "network" / "__params__"), str(tmp_path)]
    ran = CliRunner().invoke(
        app, ["convert-fluid", *source, "--names-from", str(saves / "network" / "__model__"), "--json"]
    )
    report = json.loads(ran.stdout)
    assert report["direction"] == "from-fluid"
    assert report["variables"]["tables/words"] == "float32[6, 3]"
    assert report["names"]["batch_norm_0.w_2"] == "batch_norm_0.variance"
    refused = CliRunner().invoke(app, ["convert-fluid", *source])
    assert "pass --names-from" in str(refused.exception)
