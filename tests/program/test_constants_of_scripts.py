"""Numbers as Fluid's scripts give them: names of dtypes, `loss[0]`, sizes and values in variables of known numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ArgumentError, FeedError, ProgramError, RecordError


@pytest.fixture(autouse=True)
def program() -> Iterator[fluid.Program]:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()), fluid.scope_guard(fluid.Scope()):
        yield main


def test_names_of_dtypes_mean_what_they_do_to_numpy() -> None:
    names = ("int", "float", "double", "int32", "bfloat16")
    found = {name: fluid.data(name, [None, 1], name).dtype for name in names}
    wanted = {"int": torch.int64, "float": torch.float64, "double": torch.float64, "int32": torch.int32}
    assert found == {**wanted, "bfloat16": torch.bfloat16}
    assert fluid.layers.fill_constant([1], "int", 3).dtype == torch.int64
    for wrong in (None, 5):
        with pytest.raises(ProgramError, match=f"{wrong} is no dtype"):
            fluid.layers.data("y", [1], dtype=wrong)


def test_feeds_of_layers_data_are_flattened_as_layers_do(program: fluid.Program) -> None:
    x, label = fluid.layers.data("x", [4]), fluid.layers.data("label", [1])
    strict = fluid.data("strict", [None, 1])
    fetches = [x * 1.0, label * 1.0, strict * 1.0]
    rows = np.arange(8, dtype="float32").reshape(2, 4, 1)
    feed = {"x": rows, "label": rows[:, 0, 0], "strict": rows[:, 0]}
    program = fluid.Program.parse(str(program))  # of a saved model
    run = partial(fluid.Executor(fluid.CPUPlace()).run, program, fetch_list=[v.name for v in fetches])
    assert [v.shape for v in run(feed)] == [(2, 4), (2, 1), (2, 1)]
    wrong = {"x": rows.reshape(1, 8), "label": rows[:, :2, 0], "strict": rows[:, 0, 0]}
    for name, value in wrong.items():
        with pytest.raises(FeedError, match=f"feed '{name}' has shape"):
            run({**feed, name: value})


def test_a_number_has_one_element() -> None:
    """Its shape is [1] in Fluid, where scripts write loss[0]."""
    loss: Any = fluid.layers.mean(fluid.data("x", [None, 2]))
    assert loss[0] is loss and loss[-1] is loss
    with pytest.raises(RecordError):
        loss[1]


def test_sizes_and_values_may_be_variables_of_known_numbers(program: fluid.Program) -> None:
    x: Any = fluid.data("x", [3, 4, 5])
    two = fluid.layers.fill_constant([1], "int32", 2)
    parts = fluid.layers.strided_slice(x, [0, 1], [-3, two], [3, 4], [1, 1])
    filled = fluid.layers.fill_constant([1, two], "float32", fluid.layers.reduce_sum(x))
    outside = fluid.layers.create_tensor("float32", name="outside")
    fluid.layers.fill_constant([2], "float32", fluid.layers.reduce_max(x), out=outside)
    with pytest.raises(RecordError, match="broadcast a dimension"):  # in a program without a batch
        x + fluid.layers.fill_constant([7, 7], "float32", 1.0)
    rows = np.arange(60, dtype="float32").reshape(3, 4, 5)
    found = fluid.Executor(fluid.CPUPlace()).run(program, {"x": rows}, [parts, filled, outside])
    np.testing.assert_array_equal(found[0], rows[:, 2:])
    assert found[1].tolist() == [[1770.0, 1770.0]] and found[2].tolist() == [59.0, 59.0]


@pytest.mark.parametrize("persistable", [False, True])
def test_a_constant_may_be_an_array_of_one_number(program: fluid.Program, persistable: bool) -> None:
    made = fluid.layers.create_global_var([2], np.array([0.1]), "float64", persistable=persistable)
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    assert exe.run(program, {}, [made])[0].tolist() == [0.1, 0.1]
    with pytest.raises(ArgumentError, match=r"value has the shape \(2,\); expected one number"):
        fluid.layers.create_global_var([2], np.array([1.0, 2.0]), "float64", persistable=persistable)
