"""`fluid.contrib.mixed_precision.decorate`: an optimizer that trains in mixed precision.

Products and convolutions compute in half precision, forward and backward (`halves`); parameters, gradients and updates
are float32. Source: fluid.contrib.mixed_precision (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.program.operator_types import BlockOperator
from penstock.program.optimizers.base import Minimizer, Optimizer, Pair, attribute_of_inner
from penstock.program.optimizers.compressed import DGCMomentumOptimizer
from penstock.program.precision.halves import in_half
from penstock.program.precision.lists import AutoMixedPrecisionLists
from penstock.program.precision.scaling import LossScaling, ScalingRule
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, program_guard
from penstock.program.record.variable import Variable
from penstock.program.training.backward import check_loss
from penstock.program.training.parameters import constant_state

_HALVES = ("bfloat16", "float16")


class OptimizerWithMixedPrecision(Minimizer):
    """What `decorate` returns. Everything but the methods here is the optimizer's own.

    The backward pass rewrites the Program of the loss; a clone that was made before computes in float32.
    """

    def __init__(self, optimizer: Any, lists: AutoMixedPrecisionLists, rule: ScalingRule, dtype: str) -> None:
        self._optimizer, self._lists, self._rule, self._dtype = optimizer, lists, rule, dtype
        self._scaling: LossScaling | None = None
        self._scaled_loss: Any = None

    def get_loss_scaling(self) -> Variable:
        """Return the factor of the loss, float32 [1], which follows the gradients."""
        return self._own_scaling().factor

    def get_scaled_loss(self) -> Any:
        """Return the loss times its factor; None before `backward`."""
        return self._scaled_loss

    def _own_scaling(self) -> LossScaling:
        if self._scaling is None:
            prefix = default_main_program().unique("loss_scaling")
            self._scaling = LossScaling(self._rule, constant_state(prefix, self._rule.first, "float32", [1]), prefix)
        return self._scaling

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: object = None,
    ) -> list[Pair]:
        """Record the backward pass of the scaled loss, and let products compute in half precision.

        The gradients are those of the scaled loss; `apply_gradients` divides them.
        """
        check_loss(loss, f"{type(self).__name__}.minimize")
        with program_guard(loss.program, startup_program):
            scaled: Any = loss
            self._scaled_loss = scaled * self._own_scaling().factor.reshape(loss.fake.shape)
            pairs: list[Pair] = self._optimizer.backward(
                self._scaled_loss, startup_program, parameter_list, no_grad_set
            )
            in_half(loss.program, self._lists, self._dtype)
        return pairs

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record the division by the factor, clipping, regularisation and updates; return their operators."""
        target = _innermost(self._optimizer)
        target._scaling = self._own_scaling()
        try:
            made: list[BlockOperator] = self._optimizer.apply_gradients(params_grads)
        finally:
            target._scaling = None
        return made

    def __getattr__(self, name: str) -> Any:
        return attribute_of_inner(self, name)


def _innermost(optimizer: Any) -> Optimizer:
    """The optimizer that records updates, of one that may wrap another. Raises SpecError for none."""
    while not isinstance(optimizer, Optimizer):
        inner = getattr(optimizer, "__dict__", {}).get("_optimizer")
        if inner is None:
            raise SpecError(f"decorate is given {optimizer!r}; expected an optimizer of fluid.optimizer")
        optimizer = inner
    return optimizer


def decorate(
    optimizer: Any,
    amp_lists: AutoMixedPrecisionLists | None = None,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    *,
    dtype: str | None = None,
) -> OptimizerWithMixedPrecision:
    """Return an optimizer whose Program computes products and convolutions in half precision.

    `dtype`: bfloat16 or float16; None is float16 where CUDA is available and bfloat16 elsewhere. The loss is scaled by
    a factor that starts at `init_loss_scaling`. With `use_dynamic_loss_scaling` it grows by `incr_ratio` after more
    than `incr_every_n_steps` runs with finite gradients, and shrinks by `decr_ratio`, not below 1, after more than
    `decr_every_n_nan_or_inf` others, whose gradients count as zero.
    Raises SpecError for what is no optimizer, and for numbers that no factor can follow.
    """
    half = dtype or ("float16" if torch.cuda.is_available() else "bfloat16")
    if half not in _HALVES:
        raise SpecError(f"decorate: dtype is {dtype!r}; expected one of {', '.join(_HALVES)}")
    if isinstance(_innermost(optimizer), DGCMomentumOptimizer):
        raise SpecError(
            "decorate: DGCMomentumOptimizer chooses what is exchanged before gradients are unscaled, so one that is "
            "not finite would stay in its sums for ever; use MomentumOptimizer"
        )
    steps = (incr_every_n_steps, decr_every_n_nan_or_inf)
    rule = ScalingRule(float(init_loss_scaling), use_dynamic_loss_scaling, *steps, incr_ratio, decr_ratio)
    rule.check()
    return OptimizerWithMixedPrecision(optimizer, amp_lists or AutoMixedPrecisionLists(), rule, half)


__all__ = ["OptimizerWithMixedPrecision", "decorate"]
