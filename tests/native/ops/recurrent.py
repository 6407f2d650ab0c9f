"""Operands of the recurrent operators, for the checks that every operator passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.native import ops as _ops  # noqa: F401 - registers its operators

OPS: Any = torch.ops.penstock
STEPS, ROWS, WIDTH, SIZE = 3, 2, 4, 5
FLOAT64, FLOAT32 = torch.float64, torch.float32


def _operands(gates: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
    """(x and states, weights and direction) of a recurrent layer, last step first."""
    shapes = [(gates * SIZE, WIDTH), (gates * SIZE, SIZE), (gates * SIZE,), (gates * SIZE,)]
    states = [torch.randn(ROWS, SIZE, dtype=dtype) for _ in range(2 if gates == 4 else 1)]
    return [torch.randn(STEPS, ROWS, WIDTH, dtype=dtype), *states], [
        *(torch.randn(shape, dtype=dtype) for shape in shapes),
        True,
    ]


def lstm(dtype: torch.dtype) -> list[Any]:
    inputs, weights = _operands(4, dtype)
    return [*inputs, *weights, True]


def lstm_backward(dtype: torch.dtype) -> list[Any]:
    inputs, weights = _operands(4, dtype)
    out, h, c, saved = OPS.lstm(*inputs, *weights, True)
    grads = [torch.randn_like(t) for t in (out, h, c)]
    return [*grads, *inputs, *weights, out, c, saved, True]


CELL = ("sigmoid", "tanh", "relu")


def sequence() -> list[Any]:
    (_, *states), weights = _operands(4, FLOAT64)
    gates = torch.randn(STEPS, ROWS, 4 * SIZE, dtype=FLOAT64)
    return [gates, *states, weights[1].t().contiguous(), torch.randn(3, SIZE, dtype=FLOAT64), False, True]


def sequence_backward() -> list[Any]:
    _, *given, _ = arguments = sequence()
    outputs = OPS.lstm_sequence(*arguments)
    return [torch.randn_like(outputs[0]), None, *given, *outputs]


def gru() -> list[Any]:
    inputs, weights = _operands(3, FLOAT32)
    return [*inputs, *weights, True]


def gru_backward() -> list[Any]:
    *given, _ = arguments = gru()
    out, _, saved = OPS.gru(*arguments)
    return [torch.randn_like(out), None, *given, out, saved, True]


def gru_sequence() -> list[Any]:
    gates, h0 = torch.randn(STEPS, ROWS, 3 * SIZE, dtype=FLOAT64), torch.randn(ROWS, SIZE, dtype=FLOAT64)
    return [gates, h0, torch.randn(SIZE, 3 * SIZE, dtype=FLOAT64), True, False, True, "tanh", "relu"]


def gru_sequence_backward() -> list[Any]:
    _, h0, weight, reverse, origin, _, *kinds = arguments = gru_sequence()
    out, saved = OPS.gru_sequence(*arguments)
    return [torch.randn_like(out), h0, weight, reverse, origin, out, saved, *kinds]
