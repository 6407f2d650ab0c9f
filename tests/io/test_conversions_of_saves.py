"""Conversions to and from Fluid's files: whose learning rate is whose, what a format cannot hold, and whole files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import UserError
from penstock.io.converting import Options, convert
from penstock.io.fluid.folders import read_combined, write_separate
from penstock.io.fluid.names import from_fluid
from penstock.io.fluid.schema import message
from penstock.io.fluid.tensors import FluidTensor
from penstock.scope import Scope

Optimizer = Callable[[float], Any]


def trained(*optimizers: Any) -> Any:
    """A program with one layer for each optimizer."""
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [4])
        for optimizer in optimizers:
            optimizer.minimize(fluid.layers.mean(fluid.layers.fc(x, 3)))
    fluid.Executor().run(startup)
    return main


def rates(main: Any, scope: Scope) -> list[Any]:
    names = [v.name for v in main.list_vars() if v.name.endswith(".learning_rate")]
    return [pytest.approx(float(np.asarray(scope.var(name)))) for name in names]


@pytest.fixture
def two_rates(tmp_path: Path) -> tuple[Any, Path]:
    """A program of two optimizers, and what Fluid would have saved of it."""
    with fluid.scope_guard(Scope()):
        main = trained(fluid.optimizer.MomentumOptimizer(0.5, 0.9), fluid.optimizer.MomentumOptimizer(0.01, 0.9))
        fluid.io.save_persistables(None, tmp_path / "ours", main)
    convert(tmp_path / "ours", tmp_path / "theirs", Options())
    convert(tmp_path / "ours", tmp_path / "theirs", Options(filename="all"))
    (tmp_path / "one").mkdir()
    (tmp_path / "theirs" / "all").rename(tmp_path / "one" / "all")
    return main, tmp_path


def test_each_optimizer_gets_its_learning_rate(two_rates: tuple[Any, Path]) -> None:
    main, folder = two_rates
    for place, filename in (("theirs", None), ("one", "all")):
        scope = Scope()
        fluid.io.load_persistables(None, folder / place, main, filename, scope=scope)
        assert rates(main, scope) == [0.5, 0.01]


def test_another_number_of_learning_rates_is_refused(two_rates: tuple[Any, Path]) -> None:
    _, folder = two_rates
    with fluid.scope_guard(Scope()):
        main = trained(fluid.optimizer.MomentumOptimizer(0.5, 0.9))
        with pytest.raises(UserError, match=r"has 2 learning rates, .* but the program has 1"):
            fluid.io.load_persistables(None, folder / "theirs", main)


def test_state_of_several_optimizers_is_not_converted_by_names(two_rates: tuple[Any, Path]) -> None:
    _, folder = two_rates
    with pytest.raises(UserError, match=r"it is of several optimizers.*load_persistables"):
        convert(folder / "theirs", folder / "back", Options())
    plain = from_fluid(["w", "learning_rate_10", "learning_rate_2"])
    assert plain == {"w": "w", "learning_rate_2": "sgd_0.learning_rate", "learning_rate_10": "sgd_1.learning_rate"}


def test_a_file_for_all_without_its_name_is_pointed_out(two_rates: tuple[Any, Path]) -> None:
    main, folder = two_rates
    with pytest.raises(UserError, match=r"its files are 'all'\. If one of them holds all .* filename='all'"):
        fluid.io.load_persistables(None, folder / "one", main)


def test_adamax_has_one_power(tmp_path: Path) -> None:
    with fluid.scope_guard(Scope()):
        main = trained(fluid.optimizer.AdamaxOptimizer(0.1))
        fluid.io.save_persistables(None, tmp_path / "ours", main)
    report = convert(tmp_path / "ours", tmp_path / "theirs", Options())
    assert sorted(name for name in report.variables if "pow" in name) == [
        "fc_0.b_0_beta1_pow_acc_0", "fc_0.w_0_beta1_pow_acc_0",
    ]  # fmt: skip
    fluid.io.load_persistables(None, tmp_path / "theirs", main, scope=Scope())


@pytest.mark.parametrize("power", [[float("inf")], [float("nan")], [-1.0], [], [0.9, 0.9]])
def test_a_power_that_is_none_is_refused(power: list[float], tmp_path: Path) -> None:
    with fluid.scope_guard(Scope()):
        main = trained(fluid.optimizer.AdamOptimizer(0.1))
        fluid.io.save_persistables(None, tmp_path / "ours", main)
    convert(tmp_path / "ours", tmp_path / "theirs", Options())
    names = [f"fc_0.{one}_0_beta1_pow_acc_0" for one in "wb"]
    write_separate(tmp_path / "theirs", {name: FluidTensor(torch.tensor(power)) for name in names})
    with pytest.raises(UserError, match=r"'fc_0\.w_0_beta1_pow_acc_0' is \[.*expected one number from 0 to 1"):
        fluid.io.load_persistables(None, tmp_path / "theirs", main, scope=Scope())
    with pytest.raises(UserError, match="expected one number from 0 to 1"):
        convert(tmp_path / "theirs", tmp_path / "back", Options())


# -- formats ---------------------------------------------------------------------------------------------------------

ROWS = FluidTensor(torch.ones(2, 4), rows=np.array([1, 5]), height=10)
LEVELS = FluidTensor(torch.ones(3, 4), [np.array([0, 1, 3])])


@pytest.mark.parametrize(
    ("tensor", "target", "filename", "kind"),
    [
        (ROWS, "m.pdparams", None, "selected rows"),
        (ROWS, "folder", "all", "selected rows"),
        (LEVELS, "m.pdparams", None, "a LoD"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    tensor: FluidTensor, target: str, filename: str | None, kind: str, tmp_path: Path
) -> None:
    write_separate(tmp_path / "theirs", {"table": tensor, "w": FluidTensor(torch.ones(2))})
    convert(tmp_path / "theirs", tmp_path / "ours", Options())
    with pytest.raises(UserError, match=rf"\['table'\] have {kind}, which Fluid keeps only in a file for each"):
        convert(tmp_path / "ours", tmp_path / target, Options(filename=filename))
    assert not (tmp_path / target).exists()


def test_a_file_for_all_keeps_a_lod(tmp_path: Path) -> None:
    write_separate(tmp_path / "theirs", {"x": LEVELS})
    convert(tmp_path / "theirs", tmp_path / "ours", Options())
    convert(tmp_path / "ours", tmp_path, Options(filename="all"))
    assert read_combined(tmp_path / "all", ["x"])["x"].lod[0].tolist() == [0, 1, 3]


def test_files_of_another_kind_are_left_out_and_listed(tmp_path: Path) -> None:
    write_separate(tmp_path / "theirs", {"w": FluidTensor(torch.ones(2))})
    (tmp_path / "theirs" / "README.txt").write_text("Trained in spring.")
    done = convert(tmp_path / "theirs", tmp_path / "ours", Options())
    assert (done.names, done.left_out) == ({"w": "w"}, ["README.txt"])
    (tmp_path / "theirs" / "w").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        convert(tmp_path / "theirs", tmp_path / "ours", Options())
    (tmp_path / "theirs" / "w").unlink()
    with pytest.raises(UserError, match="holds no variables"):
        convert(tmp_path / "theirs", tmp_path / "ours", Options())


def test_settings_in_json_are_no_save_of_ours(tmp_path: Path) -> None:
    write_separate(tmp_path / "theirs", {"w": FluidTensor(torch.ones(2))})
    for name, content in (("ernie_config", '{"hidden": 3}'), ("damaged", "{"), ("list", "[1]")):
        (tmp_path / "theirs" / f"{name}.json").write_text(content)
    report = convert(tmp_path / "theirs", tmp_path / "ours", Options())
    assert (report.direction, report.names) == ("from-fluid", {"w": "w"})
    (tmp_path / "ours" / "settings.json").write_text(json.dumps({"format": "another"}))
    assert convert(tmp_path / "ours", tmp_path / "back", Options()).direction == "to-fluid"


def saved_pickle(folder: Path, prefix: str, *optimizers: Any) -> Path:
    with fluid.scope_guard(Scope()):
        fluid.io.save_persistables(None, folder / prefix, trained(*optimizers))
    return folder / prefix


def test_state_of_an_earlier_conversion_does_not_stay(tmp_path: Path) -> None:
    with_state = saved_pickle(tmp_path, "adam", fluid.optimizer.AdamOptimizer(0.1))
    without = saved_pickle(tmp_path, "plain")
    convert(with_state, tmp_path / "m.pdparams", Options())
    assert (tmp_path / "m.pdopt").is_file()
    write_separate(tmp_path / "w", {"w": FluidTensor(torch.ones(2))})
    convert(tmp_path / "w", without, Options())
    convert(without, tmp_path / "m.pdparams", Options())
    assert not (tmp_path / "m.pdopt").exists()


def test_a_conversion_that_fails_leaves_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved_pickle(tmp_path, "adam", fluid.optimizer.AdamOptimizer(0.1))
    for end in ("pdparams", "pdopt"):
        (tmp_path / f"m.{end}").write_bytes(b"before")
    written: list[Path] = []

    def full(path: Path, content: bytes) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        with path.open("wb") as file:
            return file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "m.pdparams", Options())
    assert [(tmp_path / f"m.{end}").read_bytes() for end in ("pdparams", "pdopt")] == [b"before"] * 2
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


# -- values that are no tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.longdouble), np.array([None]), np.array(["a"]), [[1.0], [1.0, 2.0]]], ids=str
)
def test_a_state_that_is_no_tensor_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'w' is a .* that no tensor can be"):
        fluid.io.set_program_state(fluid.Program(), {"w": value})
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps({"w": value}, protocol=2))
    with pytest.raises(UserError, match=r"m\.pdparams"):
        fluid.io.load_program_state(tmp_path / "m")


@pytest.mark.parametrize("place", ["variable", "input"])
def test_a_name_that_is_no_text_is_refused(place: str, tmp_path: Path) -> None:
    program = message("ProgramDesc")()
    block = program.blocks.add(idx=0, parent_idx=-1)
    if place == "variable":
        block.vars.add(name="QQQ").type.type = 7
    else:
        block.ops.add(type="relu").inputs.add(parameter="X", arguments=["QQQ"])
    (tmp_path / "__model__").write_bytes(program.SerializeToString().replace(b"QQQ", b"\xff\xfe\xfd"))
    with pytest.raises(UserError, match=r"has the name .*, which is no UTF-8"):
        fluid.io.load_inference_model(tmp_path, None)


def test_lines_of_the_script_may_be_in_any_encoding(tmp_path: Path) -> None:
    program = message("ProgramDesc")()
    block = program.blocks.add(idx=0, parent_idx=-1)
    described = block.vars.add(name="x")
    described.type.type = 7
    described.type.lod_tensor.tensor.data_type = 5
    described.type.lod_tensor.tensor.dims.extend([-1, 2])
    for kind, slot, name in (("feed", "outputs", "x"), ("relu", "both", "y"), ("fetch", "inputs", "y")):
        op = block.ops.add(type=kind)
        if slot == "both":
            op.inputs.add(parameter="X", arguments=["x"])
            op.outputs.add(parameter="Out", arguments=[name])
            op.attrs.add(name="op_callstack", type=5).strings.append("QQQ.py")
        else:
            getattr(op, slot).add(parameter="Out" if slot == "outputs" else "X", arguments=[name])
    (tmp_path / "__model__").write_bytes(program.SerializeToString().replace(b"QQQ", b"\xff\xfe\xfd"))
    _, feeds, fetches = fluid.io.load_inference_model(tmp_path, None)
    assert (feeds, [variable.name for variable in fetches]) == (["x"], ["y"])
