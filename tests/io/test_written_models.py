"""Programs written as `__model__` give what PaddlePaddle 2.6.2 makes of them, and are read back as they were."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from bench.peers.fluid_protos import PROTOS
from bench.peers.fluid_saves import SAVES
from bench.peers.fluid_written import GIVEN, NOT_WRITTEN, RESULTS, again
from bench.peers.written_models import MODELS, Stored, fed, stored
from typer.testing import CliRunner

import penstock as fluid
from penstock.cli import app
from penstock.errors import UserError
from penstock.io.converting import Options, convert
from penstock.io.fluid.schema import ATTRIBUTE_FIELDS, message
from penstock.io.fluid.writing.model import written_model
from penstock.scope import Scope

TOLERANCE = 1e-6  # of float32 results near 1: sums of some tens of products in another order


@dataclass(frozen=True)
class Written:
    """A stored model, and the folder that Fluid reads."""

    name: str
    ours: Stored
    theirs: Path


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp(request.param)
    ours = stored(request.param, folder / "ours")
    convert(ours.folder, folder / "theirs", Options())
    return Written(request.param, ours, folder / "theirs")


def operators(folder: Path) -> Any:
    return message("ProgramDesc").FromString((folder / "__model__").read_bytes()).blocks[0].ops


def equal(found: Any, wanted: np.ndarray, name: str) -> None:
    have = np.asarray(found)
    assert (have.dtype, have.size) == (wanted.dtype, wanted.size), name
    np.testing.assert_allclose(have.reshape(-1), wanted.reshape(-1), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_paddle_gives_the_numbers_of_the_program(written: Written) -> None:
    with np.load(GIVEN) as given:  # what 2.6.2 made of the written model
        for target, found in written.ours.fetched.items():
            equal(found, given[f"{written.name}/{target}"], target)


def test_a_written_model_reads_back(written: Written) -> None:
    executor = fluid.Executor(fluid.CPUPlace())
    with fluid.scope_guard(Scope()):
        program, feeds, fetches = fluid.io.load_inference_model(written.theirs, executor)
        found = executor.run(program, {name: fed(name) for name in feeds}, fetches, return_numpy=False)
    assert feeds == list(written.ours.feeds)
    assert [var.name for var in fetches] == list(written.ours.fetched)
    for var, one in zip(fetches, found, strict=True):
        equal(one, written.ours.fetched[var.name], var.name)


def test_operators_have_the_slots_that_paddle_knows(written: Written) -> None:
    protos = json.loads(PROTOS.read_text(encoding="utf-8"))
    for op in operators(written.theirs):
        if op.type in ("feed", "fetch"):
            continue
        assert op.type in protos, op.type
        inputs, outputs, defaults = protos[op.type]
        for slots, known in ((op.inputs, inputs), (op.outputs, outputs)):
            names = {slot.parameter for slot in slots}
            assert names <= {slot.rstrip("*?") for slot in known}, op.type
            assert names >= {slot for slot in known if not slot.endswith(("*", "?"))}, op.type
        for attr in op.attrs:
            default = defaults.get(attr.name)
            value = getattr(attr, ATTRIBUTE_FIELDS[attr.type])
            if default is not None and not isinstance(default, list):
                assert type(value) is type(default), (op.type, attr.name)


@pytest.mark.parametrize("name", RESULTS)
def test_what_paddle_wrote_is_written_again(name: str, tmp_path: Path) -> None:
    with ZipFile(SAVES) as archive:
        archive.extractall(tmp_path)
    again(tmp_path / name, tmp_path / "ours", RESULTS[name])
    convert(tmp_path / "ours", tmp_path / "theirs", Options(filename="all"))
    executor = fluid.Executor(fluid.CPUPlace())
    with fluid.scope_guard(Scope()), np.load(tmp_path / "expected.npz") as expected:
        program, feeds, fetches = fluid.io.load_inference_model(tmp_path / "theirs", executor, params_filename="all")
        found = executor.run(program, {one: fed(one) for one in feeds}, fetches, return_numpy=False)
        names = [one for one in RESULTS[name] if one not in NOT_WRITTEN]
        assert len(names) == len(found)
        for one, value in zip(names, found, strict=True):
            equal(value, expected[one if one == name else f"{name}/{one}"], one)


def test_variables_are_described_for_a_server(tmp_path: Path) -> None:
    ours = stored("ctr_dnn", tmp_path / "ours")
    convert(ours.folder, tmp_path / "theirs", Options())
    program = message("ProgramDesc").FromString((tmp_path / "theirs" / "__model__").read_bytes())
    described = {var.name: var for var in program.blocks[0].vars}
    ids, dense = described["ids"], described["dense"]
    assert (program.version.version, len(program.blocks)) == (0, 1)
    assert (list(ids.type.lod_tensor.tensor.dims), ids.type.lod_tensor.tensor.data_type) == ([-1, 1], 3)
    assert (ids.type.lod_tensor.lod_level, ids.need_check_feed, ids.persistable) == (1, True, False)
    assert (list(dense.type.lod_tensor.tensor.dims), dense.type.lod_tensor.lod_level) == ([-1, 4], 0)
    parameters = {name for name, var in described.items() if var.persistable} - {"feed", "fetch"}
    assert parameters == {path.name for path in (tmp_path / "theirs").iterdir()} - {"__model__"}
    kinds = [op.type for op in program.blocks[0].ops]
    assert (kinds[:2], kinds[-1]) == (["feed", "feed"], "fetch")
    assert kinds.count("lookup_table") == kinds.count("sequence_pool") == 3
    assert "@LENGTHS" not in str(program)


def test_the_same_program_becomes_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for number in range(2):
        ours = stored("deepfm", tmp_path / f"ours{number}")
        convert(ours.folder, tmp_path / f"theirs{number}", Options())
        contents.add((tmp_path / f"theirs{number}" / "__model__").read_bytes())
    assert len(contents) == 1


def saved(folder: Path, build: Any) -> None:
    """Save an inference model of what `build` makes of x [batch, 4]."""
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(Scope()):
        target = build(fluid.layers.data("x", [4]))
        executor = fluid.Executor(fluid.CPUPlace())
        executor.run(startup)
        fluid.io.save_inference_model(folder, ["x"], [target], executor, main)


def test_calls_without_a_form_in_fluid_are_named(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        rows = fluid.layers.hash(fluid.layers.cast(x, "int64"), 7)
        return fluid.layers.fc(fluid.layers.cast(rows, "float32"), 2)

    saved(tmp_path / "ours", build)
    expected = r"'penstock\.hash_rows\.default' \(\w+, test_written_models\.py:\d+\)[\s\S]*A model may have: .*addmm"
    with pytest.raises(UserError, match=expected):
        convert(tmp_path / "ours", tmp_path / "theirs", Options())
    assert not (tmp_path / "theirs").exists()
    done = convert(tmp_path / "ours", tmp_path / "theirs", Options(parameters_only=True))
    assert sorted(done.variables) == sorted(path.name for path in (tmp_path / "theirs").iterdir())


def test_a_write_in_place_is_refused(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        hidden = fluid.layers.fc(x, 3)
        hidden.add_(1.0)
        return fluid.layers.softmax(hidden)

    saved(tmp_path / "ours", build)
    with pytest.raises(UserError, match=r"'aten\.add_\.Tensor' \(.*\): (it writes|no operator)"):
        convert(tmp_path / "ours", tmp_path / "theirs", Options())


def test_a_name_that_the_program_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="'nonesuch' is not in the program"):
        written_model(fluid.Program(), [], ["nonesuch"])


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    saved(tmp_path / "ours", lambda x: fluid.layers.fc(x, 2, act="softmax"))
    arguments = ["convert-fluid", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--filename", "all", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["direction"] == "to-fluid"
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {"__model__", "all"}
    assert [op.type for op in operators(tmp_path / "theirs")] == [
        "feed", "mul", "elementwise_add", "softmax", "fetch",
    ]  # fmt: skip
