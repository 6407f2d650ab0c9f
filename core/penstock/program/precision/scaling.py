"""Loss scaling: the factor that keeps small gradients of half precision from vanishing, and how it follows them.

Source: fp16_utils.update_loss_scaling (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import SpecError
from penstock.program.ir import Role
from penstock.program.record.context import name_scope, role
from penstock.program.record.variable import Variable
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.parameters import constant_state


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """When the factor changes: times `incr_ratio` after `incr_every_n_steps` runs with finite gradients, times
    `decr_ratio`, but not below 1, after `decr_every_n_nan_or_inf` with others."""

    first: float
    is_dynamic: bool
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    incr_ratio: float
    decr_ratio: float

    def check(self) -> None:
        """Raise SpecError for numbers that no factor can follow."""
        if not self.first > 0.0:
            raise SpecError(f"decorate: init_loss_scaling is {self.first}; expected a positive number")
        if self.is_dynamic and not (self.incr_ratio > 1.0 > self.decr_ratio > 0.0):
            raise SpecError(
                f"decorate: incr_ratio is {self.incr_ratio} and decr_ratio {self.decr_ratio}; expected one above 1 and "
                "one between 0 and 1"
            )
        if self.is_dynamic and not (self.incr_every_n_steps > 0 and self.decr_every_n_nan_or_inf > 0):
            raise SpecError(
                f"decorate: incr_every_n_steps is {self.incr_every_n_steps} and decr_every_n_nan_or_inf "
                f"{self.decr_every_n_nan_or_inf}; expected positive numbers of runs"
            )


class LossScaling:
    """The factor of one Program, float32 [1], and the runs since it changed, int32 [1]."""

    def __init__(self, rule: ScalingRule, factor: Variable, prefix: str) -> None:
        self.rule, self.factor, self._prefix = rule, factor, prefix

    def prepare(self, pending: Sequence[PendingGradient]) -> Callable[[], None]:
        """Create the state that scaling needs; return what records it.

        Gradients are divided by the factor. If one of them all is not finite, all are zero, and the factor follows.
        """
        for one in pending:
            one.reserve()
        if not self.rule.is_dynamic:
            return lambda: self._divide(pending)
        total = constant_state(f"{self._prefix}.sum_of_gradients", 0.0).fake
        good, bad = (
            constant_state(f"{self._prefix}.num_{kind}_steps", 0, "int32", [1]).fake for kind in ("good", "bad")
        )

        def record() -> None:
            with name_scope("loss_scaling"):
                self._divide(pending)
                total.zero_()
                for one in pending:
                    with one.role():
                        total.add_(one.value.sum())
                for one in pending:
                    with one.role():
                        one.change(_zero_unless(total))
                with role(Role.OPTIMIZE):
                    self._follow(torch.isfinite(total), good, bad)

        return record

    def _divide(self, pending: Sequence[PendingGradient]) -> None:
        factor = self.factor.fake
        for one in pending:
            with one.role():
                one.change(lambda gradient: gradient / factor.to(gradient.dtype))

    def _follow(self, finite: torch.Tensor, good: torch.Tensor, bad: torch.Tensor) -> None:
        """Record what becomes of the factor and of the numbers of runs."""
        rule, factor, none = self.rule, self.factor.fake, torch.zeros_like(good)
        grows = finite & (good + 1 > rule.incr_every_n_steps)
        shrinks = ~finite & (bad + 1 > rule.decr_every_n_nan_or_inf)
        larger, smaller = factor * rule.incr_ratio, (factor * rule.decr_ratio).clamp_min(1.0)
        larger = torch.where(torch.isfinite(larger), larger, factor)
        factor.copy_(torch.where(grows, larger, torch.where(shrinks, smaller, factor)))
        more = torch.where(grows, none, good + 1), torch.where(shrinks, none, bad + 1)
        good.copy_(torch.where(finite, more[0], none))
        bad.copy_(torch.where(finite, none, more[1]))


def _zero_unless(total: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: torch.where(torch.isfinite(total), gradient, torch.zeros_like(gradient))


__all__ = ["LossScaling", "ScalingRule"]
