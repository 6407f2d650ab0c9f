"""`gru_unit`, `lstm_unit`, and layers that make other rows of sequences: values and gradients in torch float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

L = fluid.layers
ROWS, LENGTHS = np.random.default_rng(3).normal(size=(6, 2)), [3, 1, 2]


class Built:
    """A program with its parameters as leaves of torch."""

    def __init__(self, build: Callable[[], list[Any]]) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            self.fetches = build()
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)
        names = [v.name for v in self.main.parameters()]
        self.parameters = [torch.tensor(np.array(self.scope.find_var(n)), requires_grad=True) for n in names]

    def run(self, **feed: Any) -> list[Any]:
        return list(self.exe.run(self.main, feed, self.fetches, scope=self.scope, return_numpy=False))


def close(found: Any, wanted: torch.Tensor | None) -> None:
    assert wanted is not None
    np.testing.assert_allclose(np.array(found), wanted.detach().numpy(), rtol=1e-9, atol=1e-12)


def inputs(*widths: int) -> list[Any]:
    found = [L.data(f"x{k}", [width], dtype="float64") for k, width in enumerate(widths)]
    for one in found:
        one.stop_gradient = False
    return found


def backward(loss: Any, names: list[str]) -> list[str]:
    fluid.append_backward(loss)
    parameters = [p.name for p in fluid.default_main_program().parameters()]
    return [f"{name}@GRAD" for name in (*names, *parameters)]


def arrays(*widths: int) -> tuple[dict[str, np.ndarray], list[torch.Tensor]]:
    given = {f"x{k}": np.random.default_rng(k).normal(size=(3, width)) for k, width in enumerate(widths)}
    return given, [torch.tensor(one, requires_grad=True) for one in given.values()]


@pytest.mark.parametrize("origin_mode", [False, True])
def test_a_gru_unit_is_fluids_formula(origin_mode: bool) -> None:
    def build() -> list[Any]:
        x, h = inputs(6, 2)
        found = L.gru_unit(x, h, 6, origin_mode=origin_mode, bias_attr=fluid.ParamAttr(initializer=normal()))
        return [*found, *backward(L.reduce_sum(found[0] * found[0]) + L.reduce_sum(found[1]), ["x0", "x1"])]

    built = Built(build)
    feed, (x, h) = arrays(6, 2)
    weight, bias = built.parameters
    values = weight.flatten()
    gates = torch.sigmoid((x + bias)[:, :4] + h @ values[:8].view(2, 4))
    u, r = gates.chunk(2, 1)
    c = torch.tanh((x + bias)[:, 4:] + (r * h) @ values[8:].view(2, 2))
    new = u * h + (1 - u) * c if origin_mode else (1 - u) * h + u * c
    ((new * new).sum() + (r * h).sum()).backward()  # type: ignore[no-untyped-call]  # torch
    wanted = [new, r * h, torch.cat([gates, c], 1), x.grad, h.grad, weight.grad, bias.grad]
    for got, one in zip(built.run(**feed), wanted, strict=True):
        close(got, one)


def normal() -> Any:
    return fluid.initializer.Normal(0.0, 1.0, seed=3)


def test_an_lstm_unit_is_fluids_formula() -> None:
    def build() -> list[Any]:
        x, h, c = inputs(5, 2, 2)
        new, cell = L.lstm_unit(x, h, c, forget_bias=0.5)
        return [new, cell, *backward(L.reduce_sum(new * new) + L.reduce_sum(cell), ["x0", "x1", "x2"])]

    built = Built(build)
    feed, (x, h, c) = arrays(5, 2, 2)
    weight, bias = built.parameters
    i, f, o, g = (torch.cat([x, h], 1) @ weight + bias).chunk(4, 1)
    cell = torch.sigmoid(f + 0.5) * c + torch.sigmoid(i) * torch.tanh(g)
    new = torch.sigmoid(o) * torch.tanh(cell)
    ((new * new).sum() + cell.sum()).backward()  # type: ignore[no-untyped-call]  # torch
    for got, one in zip(built.run(**feed), [new, cell, *(v.grad for v in (x, h, c, weight, bias))], strict=True):
        close(got, one)


def test_a_gru_unit_with_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"gru_unit\(size=6\) needs a state \[n, 2\]"):
        Built(lambda: list(L.gru_unit(*inputs(6, 3), 6)))


# ---------------------------------------------------------------- other rows


def ragged(rows: np.ndarray, *levels: list[int]) -> Any:
    return fluid.create_lod_tensor(rows, list(levels))


def x_input() -> Any:
    return L.data("x", [2], dtype="float64", lod_level=1, stop_gradient=False)


def check(layer: Callable[[Any], Any], loop: Callable[[torch.Tensor], list[torch.Tensor]], **feed: Any) -> None:
    """Compare the rows, the lengths and the gradient of the squares of their sums with those of parts of torch."""

    def build() -> list[Any]:
        made = layer(x_input())
        sums = L.sequence_pool(made * made, "sum")
        return [made, *backward(L.reduce_sum(sums * sums), ["x"])]

    x = torch.tensor(ROWS, requires_grad=True)
    parts = loop(x)
    sum((part * part).sum(0).pow(2).sum() for part in parts).backward()  # type: ignore[union-attr]
    made, grad = Built(build).run(x=ragged(ROWS, LENGTHS), **feed)
    close(made, torch.cat(parts))
    assert made.recursive_sequence_lengths() == [[len(part) for part in parts]]
    close(grad, x.grad)


def test_slices_of_sequences() -> None:
    offsets, counts = np.array([[1], [0], [0]]), np.array([[2], [0], [1]])

    def layer(x: Any) -> Any:
        return L.sequence_slice(x, fluid.data("o", [None, 1], "int64"), fluid.data("n", [None, 1], "int64"))

    check(layer, lambda x: [x[1:3], x[:0], x[4:5]], o=offsets, n=counts)
    with pytest.raises(OperatorError, match="2 rows from 3 on are asked for of the sequence 1, which ends at 4"):
        check(layer, lambda x: [x], o=offsets, n=np.array([[2], [2], [1]]))


def test_sequences_are_repeated_for_each_one_of_another_variable() -> None:
    y = ragged(np.zeros((3, 1)), [2, 0, 1])
    check(
        lambda x: L.sequence_expand(x, L.data("y", [1], dtype="float64", lod_level=1)),
        lambda x: [x[:3], x[:3], x[4:]], y=y,
    )  # fmt: skip
    two = ragged(np.zeros((4, 1)), [2, 0, 1], [1, 2, 1])
    check(
        lambda x: L.sequence_expand(x, L.data("y", [1], dtype="float64", lod_level=2), ref_level=0),
        lambda x: [x[:3], x[:3], x[4:]], y=two,
    )  # fmt: skip


def test_rows_are_repeated_by_an_outer_level() -> None:
    def build() -> list[Any]:
        x, y = fluid.data("x", [None, 2], "float64"), L.data("y", [1], dtype="float64", lod_level=2)
        return [L.sequence_expand(x, y, ref_level=0), L.sequence_expand(x, y, ref_level=0) * L.sequence_pool(y, "sum")]

    x, y = ROWS[:2], np.arange(4.0)[:, None]
    found, product = Built(build).run(x=x, y=ragged(y, [1, 2], [1, 1, 2]))
    wanted = x[[0, 1, 1]]
    np.testing.assert_array_equal(np.array(found), wanted)
    np.testing.assert_array_equal(np.array(product), wanted * np.array([[0.0], [1.0], [5.0]]))


def test_updates_are_added_where_a_sequence_says() -> None:
    def build() -> list[Any]:
        x = fluid.data("x", [None, 4], "float64")
        index, update = L.data("i", [1], dtype="int64", lod_level=1), L.data("u", [1], dtype="float64", lod_level=1)
        update.stop_gradient = False
        made = L.sequence_scatter(x, index, update)
        return [made, *backward(L.reduce_sum(made * made), ["u"])]

    x = np.random.default_rng(5).normal(size=(2, 4))
    index, update = [[0], [2], [0], [3]], np.arange(1.0, 5.0)[:, None]
    made, grad = Built(build).run(x=x, i=ragged(np.array(index), [3, 1]), u=ragged(update, [3, 1]))
    wanted = x.copy()
    for row, (column, value) in zip([0, 0, 0, 1], zip(index, update, strict=True), strict=True):
        wanted[row, column[0]] += value[0]
    np.testing.assert_allclose(np.array(made), wanted)
    np.testing.assert_allclose(np.array(grad)[:, 0], 2 * wanted[[0, 0, 0, 1], [0, 2, 0, 3]])
