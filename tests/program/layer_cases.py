"""A layer against the same formula in plain torch, float64: its values, its gradients, and another batch.

A case is recorded once and run on batches of two sizes. Gradients are those of a sum of squares for every input of
floating numbers and every trained parameter. Same kernels or the same sums in another order: 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import penstock as fluid
from penstock.scope import Scope

ROWS = (4, 7)


@dataclass(frozen=True, slots=True)
class Ints:
    """Whole numbers below `high`, of `shape` behind the batch."""

    high: int
    shape: tuple[int, ...] = (1,)
    dtype: str = "int64"


Operand = tuple[int, ...] | Ints
Case = tuple[tuple[Operand, ...], Callable[..., Any], Callable[..., torch.Tensor]]


def values(operand: Operand, rows: int, seed: int) -> torch.Tensor:
    """Return what is fed for an operand."""
    draw = np.random.default_rng([seed, rows])
    if isinstance(operand, Ints):
        return torch.from_numpy(draw.integers(operand.high, size=(rows, *operand.shape)).astype(operand.dtype))
    return torch.from_numpy(draw.normal(size=(rows, *operand)))


def declared(operands: tuple[Operand, ...]) -> list[Any]:
    """Return an input for each operand, one of floating numbers times a parameter that starts at 1."""
    made = []
    for i, operand in enumerate(operands):
        if isinstance(operand, Ints):
            made.append(fluid.data(f"x{i}", [None, *operand.shape], operand.dtype))
            continue
        one = fluid.initializer.Constant(1.0)
        factor = fluid.layers.create_parameter(list(operand), "float64", f"factor{i}", default_initializer=one)
        made.append(fluid.data(f"x{i}", [None, *operand], "float64") * factor)
    return made


def compare(case: Case, rows: tuple[int, ...] = ROWS, tolerance: float = 1e-10) -> None:
    """Compare a layer with its reference, which gets the parameters by the ends of their names (w_0, b_0)."""
    operands, layer, reference = case
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 3
    with fluid.program_guard(main, startup):
        out = layer(*declared(operands))
        wants = out.dtype.is_floating_point and out.fake.requires_grad
        pairs = fluid.append_backward((out * out).sum()) if wants else []
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    for number in rows:
        state = {name: t.clone() for name in scope.names() if (t := scope.find(name)) is not None}
        fed = {f"x{i}": values(operand, number, i) for i, operand in enumerate(operands)}
        got, *found = exe.run(main, fed, [out, *(grad for _, grad in pairs)], scope=scope)
        own = {name: t.requires_grad_(t.is_floating_point()) for name, t in state.items()}
        leaves = [x * own[f"factor{i}"] if x.is_floating_point() else x for i, x in enumerate(fed.values())]
        parameters = {name.rsplit(".", 1)[-1]: t for name, t in own.items() if not name.startswith("factor")}
        wanted = reference(*leaves, **parameters)
        assert str(wanted.dtype) == f"torch.{got.dtype}"
        assert list(got.shape) == (list(wanted.shape) or [1])
        close(torch.from_numpy(got), wanted.detach().reshape(got.shape), tolerance, "value")
        if wants:
            (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
        for (parameter, _), grad in zip(pairs, found, strict=True):
            gradient = own[parameter.name].grad
            assert gradient is not None, parameter.name
            close(torch.from_numpy(grad).reshape(gradient.shape), gradient, tolerance, parameter.name)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    """Compare, and say what differs."""
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
