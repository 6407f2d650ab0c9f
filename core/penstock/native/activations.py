"""Activations inside recurrent operators: in place or into another tensor, and their derivatives by their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Activation(NamedTuple):
    """`over`: in place; `into(x, out)`: into `out`; `back(gradient, y)`: the gradient of x, of y = f(x)."""

    over: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


def _kept(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = {
    "sigmoid": Activation(torch.sigmoid_, lambda x, out: torch.sigmoid(x, out=out), aten.sigmoid_backward),
    "tanh": Activation(torch.tanh_, lambda x, out: torch.tanh(x, out=out), aten.tanh_backward),
    "relu": Activation(
        torch.relu_, lambda x, out: torch.clamp(x, min=0, out=out), lambda g, y: aten.threshold_backward(g, y, 0)
    ),
    "identity": Activation(_kept, lambda x, out: out.copy_(x), lambda g, y: g),
}


class Cell(NamedTuple):
    """The recurrent part of an LSTM: `w_hh` [4 h, h], peepholes [3, h] if there are any, and its activations."""

    w_hh: Tensor
    peephole: Tensor | None = None
    gate: Activation = ACTIVATIONS["sigmoid"]
    state: Activation = ACTIVATIONS["tanh"]
    candidate: Activation = ACTIVATIONS["tanh"]


def cell_of(w_hh: Tensor, peephole: Tensor | None, names: tuple[Any, ...]) -> Cell:
    """Return the cell with the activations of gates, state and candidate; defaults for those that are left out."""
    return Cell(w_hh, peephole, *(ACTIVATIONS[name] for name in names))
