"""Positions that are true and values that are different: found, used and differentiated when a program runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers


class _Built:
    def __init__(self) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), Scope()
        with fluid.program_guard(self.main, startup):
            x, ids = fluid.data("x", [None, 3], "float64"), fluid.data("ids", [None], "int64")
            x.stop_gradient = False
            self.places = L.where(x > 0)
            self.columns = L.nonzero(L.cast(x > 0, "int64"), as_tuple=True)[1]
            self.found = L.gather_nd(x, self.places)
            self.values, self.order, self.counts = L.unique_with_counts(ids, "int64")
            self.plain = L.unique(ids)
            rows = fluid.embedding(self.values, [10, 2], param_attr="table", dtype="float64")
            self.loss = L.reduce_sum(self.found**3) + L.reduce_sum(L.gather(rows, self.order) ** 2)
            fluid.append_backward(self.loss)
        assert fluid.Program.parse(str(self.main)) == self.main
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)

    def run(self, fetches: list[Any], x: np.ndarray, ids: list[int], program: Any = None) -> list[np.ndarray]:
        feed = {"x": x, "ids": np.array(ids)}
        return [np.array(v) for v in self.exe.run(program or self.main, feed, fetches, scope=self.scope)]


@pytest.fixture(scope="module")
def built() -> _Built:
    return _Built()


@pytest.mark.parametrize("rows", [4, 7])
def test_positions_that_are_true_are_gathered(built: _Built, rows: int) -> None:
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    places, columns, found, grad = built.run([built.places, built.columns, built.found, "x@GRAD"], x, [1] * rows)
    np.testing.assert_array_equal(places, np.argwhere(x > 0))
    np.testing.assert_array_equal(columns[:, 0], np.nonzero(x > 0)[1])
    np.testing.assert_array_equal(found, x[x > 0])
    np.testing.assert_allclose(grad, np.where(x > 0, 3 * x * x, 0.0), rtol=1e-12)


def test_nothing_may_be_true(built: _Built) -> None:
    places, found, grad = built.run([built.places, built.found, "x@GRAD"], -np.ones((2, 3)), [1, 1])
    assert (places.shape, found.shape) == ((0, 2), (0,))
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))


def test_values_are_in_the_order_in_which_they_come_first(built: _Built) -> None:
    ids = [7, 3, 7, 1, 3, 7]
    fetches = [built.values, built.order, built.counts, *built.plain, "table@GRAD"]
    values, order, counts, again, order_32, grad = built.run(fetches, np.ones((6, 3)), ids)
    assert (values.tolist(), order.tolist(), counts.tolist()) == ([7, 3, 1], [0, 1, 0, 2, 1, 0], [3, 2, 1])
    assert (again.tolist(), order_32.tolist(), order_32.dtype.name) == (values.tolist(), order.tolist(), "int32")
    table = built.scope.var("table").tensor.numpy()
    expected = np.zeros_like(table)
    expected[values] = 2 * counts[:, None] * table[values]
    np.testing.assert_allclose(grad, expected, rtol=1e-12)


def test_each_replica_finds_its_own(built: _Built) -> None:
    x = np.array([[1.0, -1, 2], [-1, -1, -1], [3, -1, -1], [-1, 4, -1]])
    shared = fluid.CompiledProgram(built.main).with_data_parallel(built.loss.name, places=[fluid.CPUPlace()] * 2)
    places, found, values = built.run([built.places, built.found, built.values], x, [5, 5, 5, 6], shared)
    assert places.tolist() == [[0, 0], [0, 2], [0, 0], [1, 1]], "of each replica's own rows"
    assert (found.tolist(), values.tolist()) == ([1.0, 2.0, 3.0, 4.0], [5, 5, 6])


def test_other_operands_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 3])
        with pytest.raises(ProgramError, match="where needs a condition of bool"):
            L.where(x)
        with pytest.raises(ProgramError, match="unique needs x of one dimension"):
            L.unique(x)
        with pytest.raises(ProgramError, match="and 'float32'"):
            L.unique(fluid.data("y", [None]), "float32")
