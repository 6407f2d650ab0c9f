"""Weight decay as a term of the gradient. Source: python/paddle/fluid/regularizer.py (Fluid 1.8).

A parameter's own regulariser (`ParamAttr.regularizer`) replaces the optimizer's. Of a sparse table only the rows that
a batch used decay. It comes after clipping, and after the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from penstock.program.record.context import name_scope
from penstock.program.record.variable import Variable
from penstock.program.training.backward import Gradient
from penstock.program.training.changed_gradients import Pair, changed
from penstock.program.training.gradients import PendingGradient


class Regularizer(Protocol):
    """Gives the term that is added to a gradient."""

    def term(self, param: torch.Tensor) -> torch.Tensor: ...


class L2Decay:
    """g + coeff * p."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self.coeff = float(regularization_coeff)

    def term(self, param: torch.Tensor) -> torch.Tensor:
        """Return coeff * p."""
        return param * self.coeff

    def __str__(self) -> str:
        return f"L2Decay, regularization_coeff={self.coeff:f}"


class L1Decay:
    """g + coeff * sign(p)."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        self.coeff = float(regularization_coeff)

    def term(self, param: torch.Tensor) -> torch.Tensor:
        """Return coeff * sign(p)."""
        return torch.sign(param) * self.coeff

    def __str__(self) -> str:
        return f"L1Decay, regularization_coeff={self.coeff:f}"


def regularizer_of(pending: PendingGradient, default: Regularizer | None) -> Regularizer | None:
    """Return the parameter's own regulariser, else the optimizer's."""
    own: Regularizer | None = pending.attribute.regularizer
    return own if own is not None else default


def regularize(pending: Sequence[PendingGradient], default: Regularizer | None) -> None:
    """Record the decay of each parameter that has one."""
    with name_scope("regularization"):
        for one in pending:
            regularizer = regularizer_of(one, default)
            if regularizer is not None:
                with one.role():
                    one.value = one.value + regularizer.term(one.param_rows())


def append_regularization_ops(
    parameters_and_grads: Iterable[tuple[Variable, Gradient | None]], regularization: Regularizer | None = None
) -> list[Pair]:
    """Record the decay of each parameter that has one; return the pairs with the gradients and decays added.

    `apply_gradients` does so itself, with the parameters' own regularisers and the optimizer's: for those that are
    given here, give it none.
    """

    def prepare(pending: Sequence[PendingGradient], _: str) -> Callable[[], None]:
        for one in pending:
            if regularizer_of(one, regularization) is not None:
                one.reserve()
        return lambda: regularize(pending, regularization)

    return changed(parameters_and_grads, "regularization", prepare)


L1DecayRegularizer, L2DecayRegularizer = L1Decay, L2Decay
