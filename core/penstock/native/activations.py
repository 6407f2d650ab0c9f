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

_DEFAULTS = ("sigmoid", "tanh", "tanh")  # of a cell's gates, state and candidate


class Cell(NamedTuple):
    """The recurrent part of an LSTM: `w_hh` [4 h, h], peepholes [3, h] if there are any, and its activations.

    `places`: where the gates i, f, candidate and o stand among those of `w_hh`; f follows i.
    """

    w_hh: Tensor
    peephole: Tensor | None = None
    gate: Activation = ACTIVATIONS[_DEFAULTS[0]]
    state: Activation = ACTIVATIONS[_DEFAULTS[1]]
    candidate: Activation = ACTIVATIONS[_DEFAULTS[2]]
    places: tuple[int, int, int, int] = (0, 1, 2, 3)

    def split(self, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of i, f, candidate and o in the gates [..., 4 h]."""
        parts = gates.chunk(4, -1)
        i, f, candidate, o = self.places
        return parts[i], parts[f], parts[candidate], parts[o]

    def input_and_forget(self, gates: Tensor) -> Tensor:
        """A view [b, 2 h] of i and f in the gates [b, 4 h]."""
        size = self.w_hh.shape[1]
        return gates.narrow(1, self.places[0] * size, 2 * size)


def cell_of(weight: Tensor, peephole: Tensor | None, names: tuple[Any, ...]) -> Cell:
    """Return the cell of a weight as Fluid has it: [h, 4 h], gates in the order candidate, i, f, o.

    `names`: the activations of gates, state and candidate; defaults for those that are left out.
    """
    gate, state, candidate = (ACTIVATIONS[name] for name in (*names, *_DEFAULTS[len(names) :]))
    return Cell(weight.t(), peephole, gate, state, candidate, (1, 2, 0, 3))
