"""`fluid.layers.load`: a Program that reads a file of Fluid when it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError, UserError
from penstock.io.fluid.folders import write_separate
from penstock.io.fluid.tensors import FluidTensor
from penstock.io.load_operator import load

VALUES = np.arange(6.0).reshape(2, 3)


def saved(folder: Path, name: str, values: np.ndarray) -> str:
    write_separate(folder, {name: FluidTensor(torch.from_numpy(values))})
    return str(folder / name)


def test_state_is_read_from_a_file_in_each_run(tmp_path: Path) -> None:
    file, layers = saved(tmp_path, "w", VALUES), fluid.layers
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        weight = layers.create_parameter([2, 3], "float64", attr=fluid.ParamAttr(name="w", trainable=False))
        load(weight, file)
        x = layers.data("x", [2], dtype="float64")
        y = layers.matmul(x, weight)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    feed = {"x": np.array([[1.0, 2.0]])}
    assert exe.run(main, feed, [y], scope=scope)[0].tolist() == (feed["x"] @ VALUES).tolist()
    saved(tmp_path, "w", VALUES + 1)
    assert exe.run(main, feed, [y], scope=scope)[0].tolist() == (feed["x"] @ (VALUES + 1)).tolist()
    assert np.array(scope.find_var("w")).tolist() == (VALUES + 1).tolist()
    (tmp_path / "w").unlink()
    with pytest.raises(UserError, match="should hold the variable 'w'"):
        exe.run(main, feed, [y], scope=scope)


def test_a_variable_without_a_shape_gets_that_of_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path, "w", VALUES.astype("float32"))
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        out = fluid.layers.create_tensor("float32", name="out")
        half = main.current_block().create_var(name="half", dtype="float16")
        load(out, file)
        load(half, file, load_as_fp16=True)
    found, rounded = fluid.Executor(fluid.CPUPlace()).run(main, fetch_list=["out", "half"])
    assert found.tolist() == rounded.tolist() == VALUES.tolist()
    assert (found.dtype, rounded.dtype) == (np.float32, np.float16)


def test_other_sizes_and_dtypes_are_errors(tmp_path: Path) -> None:
    file, layers, exe = saved(tmp_path, "w", VALUES), fluid.layers, fluid.Executor(fluid.CPUPlace())
    for shape, dtype in (([3, 2], "float64"), ([2, 3], "float32")):
        main = fluid.Program()
        with fluid.program_guard(main, fluid.Program()):
            out = layers.fill_constant(shape, dtype, 0.0)
            load(out, file)
        with pytest.raises(OperatorError, match=r"has float64\[2, 3\]; expected"):
            exe.run(main, fetch_list=[out])
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(ProgramError, match="only a feed says"):
        load(layers.data("x", [3]), file)
