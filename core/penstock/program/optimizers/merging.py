"""`GradientMergeOptimizer`: updates after every k-th run, by the gradients of k runs together.

A run adds its exchanged gradients to sums beside the parameters. The update is computed in every run, of the sums, and
is put back where it is not yet due: parameters and state are then those before, to the bit, and clipping and decay see
the sums alone. This is an update's time and one copy of parameters and state in each run, where a conditional block
would be an operator that no replica can share. Everything has the role OPTIMIZE and the parameter's pair, so that it
is where the parameter is updated: on each replica, or on its owner.
Source: GradientMergeOptimizer of Paddle 2.6 (incubate.optimizer), which refuses sparse gradients, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.operator_types import BlockOperator
from penstock.program.optimizers.averages import LookaheadOptimizer
from penstock.program.optimizers.base import Minimizer, Optimizer, Pair, State, attribute_of_inner
from penstock.program.optimizers.compressed import DGCMomentumOptimizer
from penstock.program.optimizers.derived import is_derived
from penstock.program.program import Program
from penstock.program.record.context import role
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.parameters import constant_state


class Merged:
    """The sums of one recording: gradients of `k_steps` runs, `num_runs` of which are in them."""

    def __init__(self, k_steps: int, *, averages: bool) -> None:
        self._k_steps, self._averages = k_steps, averages
        self._sums: dict[str, torch.Tensor] = {}

    def prepare(self, prefix: str, pending: Sequence[PendingGradient]) -> None:
        """Create the state. Raises ProgramError for sparse gradients."""
        sparse = [one.param.name for one in pending if one.rows is not None]
        if sparse:
            raise ProgramError(
                f"{user_line()}: GradientMergeOptimizer sums dense gradients, and those of {sparse} are sparse: look "
                "them up with is_sparse=False, or leave them to an optimizer of their own (parameter_list=)",
                variable=sparse[0],
            )
        self._num_runs = constant_state(f"{prefix}.merged_runs", 0, "int64").fake
        for one in pending:
            sizes = [int(d) for d in one.param.fake.shape]
            name = f"{prefix}.merged.{one.param.name}"
            self._sums[one.param.name] = constant_state(name, 0.0, one.param.desc.dtype, sizes).fake

    def count(self) -> torch.Tensor:
        """Record that there is another run; return 1.0 if its update is due, else 0.0."""
        with role(Role.OPTIMIZE):
            self._num_runs.copy_(torch.remainder(self._num_runs, self._k_steps) + 1)
            return self._is_due().to(torch.float32)

    def add(self, pending: Sequence[PendingGradient]) -> None:
        """Record the sums, which take the place of the gradients."""
        for one in pending:
            with one.role():
                total = self._sums[one.param.name]
                total.add_(one.value)
                one.value = total / self._k_steps if self._averages else torch.clone(total)

    def around(self, one: PendingGradient, state: State, update: Callable[[State], None]) -> None:
        """Record an update of `one.param` and `state`, and what undoes it in runs where it is not due."""
        step = {"step": state["step"].clamp_min(1.0)} if "step" in state else {}  # 0 before the first update
        changed = [one.param.fake, *(value for name, value in state.items() if name != "step")]
        before = [torch.clone(value) for value in changed]
        update({**state, **step})
        due = self._is_due()
        for value, old in zip(changed, before, strict=True):
            value.copy_(torch.where(due, value, old))
        total = self._sums[one.param.name]
        total.copy_(torch.where(due, torch.zeros_like(total), total))

    def _is_due(self) -> torch.Tensor:
        return torch.eq(self._num_runs, self._k_steps)


class GradientMergeOptimizer(Minimizer):
    """Updates by `inner_optimizer` after every `k_steps` runs, with the sum of their gradients, or with `avg` the mean.

    With `avg`, k runs train as one with the batches of all would, where the loss is a mean over as many rows in each.
    Schedules count runs. Clipping and decay are of the merged gradient. Everything but the methods here is the inner
    optimizer's. Raises ProgramError for `k_steps` below 1, and for an optimizer that is none or cannot be merged.
    """

    def __init__(self, inner_optimizer: Any, k_steps: int = 1, avg: bool = True) -> None:
        self._optimizer = inner_optimizer
        self._target = _innermost(inner_optimizer)
        self._set_k_steps(k_steps)
        self._set_avg(avg)

    def _set_k_steps(self, k_steps: int) -> None:
        """Set after how many runs there is an update (Paddle's name)."""
        given: Any = k_steps
        number = 0 if isinstance(given, (bool, np.bool_)) or not hasattr(given, "__index__") else operator.index(given)
        if number < 1:
            raise ProgramError(
                f"{user_line()}: GradientMergeOptimizer: k_steps is {given!r}; expected a positive number of runs"
            )
        self._k_steps = number

    def _set_avg(self, avg: bool) -> None:
        """Set whether the gradients of the runs are averaged, or summed (Paddle's name)."""
        self._averages = bool(avg)

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> list[Pair]:
        """Record the backward pass alone."""
        pairs: list[Pair] = self._optimizer.backward(loss, startup_program, parameter_list, no_grad_set)
        return pairs

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record the sums, and the updates by them; return their operators. Raises ProgramError."""
        self._target._merged = Merged(self._k_steps, averages=self._averages) if self._k_steps > 1 else None
        try:
            made: list[BlockOperator] = self._optimizer.apply_gradients(params_grads)
        finally:
            self._target._merged = None
        return made

    def __getattr__(self, name: str) -> Any:
        return attribute_of_inner(self, name)


def _innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that records updates. Raises ProgramError for none, and for one that cannot be merged."""
    found = optimizer
    while not isinstance(found, Optimizer):
        if isinstance(found, LookaheadOptimizer):
            raise ProgramError(
                f"{user_line()}: GradientMergeOptimizer cannot merge for LookaheadOptimizer, which follows the updates "
                "of another one; merge inside it: LookaheadOptimizer(GradientMergeOptimizer(inner, k_steps), alpha, k)"
            )
        found = getattr(found, "__dict__", {}).get("_optimizer")
        if found is None:
            raise ProgramError(
                f"{user_line()}: GradientMergeOptimizer is given {optimizer!r}; expected one of fluid.optimizer"
            )
    if isinstance(found, DGCMomentumOptimizer) or is_derived(found):
        raise ProgramError(
            f"{user_line()}: GradientMergeOptimizer cannot merge for {type(found).__name__}, which has state of "
            "its own beside the gradients; use another optimizer of fluid.optimizer"
        )
    return found
