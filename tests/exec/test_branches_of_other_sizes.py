"""What branches return in other sizes, dtypes or numbers of dimensions: fetched, computed with, trained through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

L = fluid.layers
ROWS = np.arange(6.0).reshape(2, 3)


class Model:
    """A weight [3], repeated where the input's sum is below 10; the loss weighs its elements by their positions."""

    def __init__(self) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            x = L.data("x", [3], dtype="float64")
            weight = L.create_parameter([3], "float64", name="weight", default_initializer=constant(0.5))
            is_small = L.less_than(L.reduce_sum(x).reshape([1]), L.fill_constant([1], "float64", 10.0))
            self.chosen = L.cond(is_small, lambda: L.concat([weight, weight * weight]), lambda: weight * 3.0)
            self.twice = self.chosen * 2.0
            self.loss = L.reduce_sum(self.chosen * self.chosen)
            fluid.optimizer.SGD(0.1).minimize(self.loss)
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def run(self, shift: float, program: Any = None) -> list[np.ndarray]:
        fetches = [self.chosen, self.twice, self.loss]
        return list(self.exe.run(program or self.main, {"x": ROWS + shift}, fetches, scope=self.scope))


def constant(value: float) -> Any:
    return fluid.initializer.Constant(value)


def test_sizes_and_gradients_follow_from_the_branch() -> None:
    model = Model()
    weight = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    for shift in (10.0, -10.0, 10.0):
        wanted = torch.cat([weight, weight * weight]) if shift < 0 else weight * 3.0
        loss = (wanted * wanted).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        chosen, twice, found = model.run(shift)
        torch.testing.assert_close(torch.tensor(chosen), wanted.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.tensor(twice), 2.0 * wanted.detach(), rtol=1e-12, atol=0)
        assert float(found[0]) == pytest.approx(loss.item(), rel=1e-12)
        weight = (weight - 0.1 * gradient).detach().requires_grad_(True)
    np.testing.assert_allclose(np.array(model.scope.find_var("weight")), weight.detach().numpy(), rtol=1e-12)


def test_the_text_a_clone_and_a_saved_model_give_the_same(tmp_path: Path) -> None:
    model = Model()
    assert fluid.Program.parse(str(model.main)) == model.main
    test = model.main.clone(for_test=True)
    wanted = [model.run(shift, test) for shift in (10.0, -10.0)]
    fluid.io.save_inference_model(tmp_path, ["x"], [model.chosen, model.loss], model.exe, model.main, scope=model.scope)
    program, _, targets = fluid.io.load_inference_model(tmp_path, model.exe, scope=model.scope)
    for shift, (chosen, _, loss) in zip((10.0, -10.0), wanted, strict=True):
        found = model.exe.run(program, {"x": ROWS + shift}, targets, scope=model.scope)
        np.testing.assert_array_equal(found[0], chosen)
        np.testing.assert_array_equal(found[1], loss)


def test_other_dtypes_and_dimensions_can_be_fetched_alone() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        index = L.data("index", [1], dtype="int64", append_batch_size=False)
        makers = [
            lambda: L.fill_constant([1, 2], "float32", 1.5),
            lambda: L.fill_constant([2, 2], "int32", 2),
            lambda: L.fill_constant([3], "bool", True),
        ]
        chosen = L.switch_case(index, makers)
        same = L.switch_case(index, [lambda: index + 1, lambda: index + 2])
        with pytest.raises(ProgramError, match="may have several dtypes or numbers of dimensions"):
            chosen * 2
    exe = fluid.Executor(fluid.CPUPlace())
    wanted = [np.full((1, 2), 1.5, "float32"), np.full((2, 2), 2, "int32"), np.full(3, True)]
    for number, value in enumerate(wanted):
        found, other = exe.run(main, {"index": np.array([number])}, [chosen, same])
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
        assert other == [number + 1 if number == 0 else number + 2]


def test_sequences_of_different_rows_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        rows = L.embedding(L.data("ids", [1], dtype="int64", lod_level=1), [6, 2])
        choice = L.data("choice", [1], dtype="bool", append_batch_size=False)
        with pytest.raises(ProgramError, match="branches of cond return sequences of different rows"):
            L.cond(choice, lambda: L.sequence_concat([rows, rows]), lambda: rows)


def test_branches_within_branches() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [2], dtype="float64")
        limits = [L.fill_constant([1], "float64", value) for value in (0.0, 10.0)]
        total = L.reduce_sum(x).reshape([1])
        chosen = L.case(
            [(L.less_than(total, limits[0]), lambda: x), (L.less_than(total, limits[1]), lambda: L.concat([x, x]))],
            default=lambda: x[:1],
        )
        size = L.reduce_sum(L.ones_like(chosen))
    exe = fluid.Executor(fluid.CPUPlace())
    for value, rows in ((-1.0, 2), (1.0, 4), (5.0, 1)):
        found, counted = exe.run(main, {"x": np.full((2, 2), value)}, [chosen, size])
        assert found.shape == (rows, 2) and (found == value).all() and counted == rows * 2


def test_gradients_of_a_value_of_unknown_sizes_add_up() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [3], dtype="float64", stop_gradient=False)
        is_small = L.less_than(L.reduce_sum(x).reshape([1]), L.fill_constant([1], "float64", 1e9))
        chosen = L.cond(is_small, lambda: x * 2.0, lambda: L.concat([x, x], 0))
        squared = chosen * chosen
        loss = L.reduce_sum(squared * chosen) + L.reduce_sum(L.cond(is_small, lambda: chosen * 5.0, lambda: chosen))
        fluid.append_backward(loss)
    (gradient,) = fluid.Executor().run(main, {"x": ROWS}, ["x@GRAD"])
    np.testing.assert_allclose(gradient, 24.0 * ROWS * ROWS + 10.0, rtol=1e-12)
