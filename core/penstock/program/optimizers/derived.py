"""Optimizers that a script derives from Fluid's `Optimizer`: Fluid's hooks, called as Fluid calls them.

`_create_accumulators(block, parameters)` makes the state, `_append_optimize_op(block, (parameter, gradient))` the
update of one parameter, `_finish_update(block, pairs)` what comes after all of them. What they record has the role of
an update, so that in Reduce mode the owner of the parameter runs it. The gradient is the exchanged one, clipped and
regularised. Source: python/paddle/fluid/optimizer.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.program.program import Block
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.parameters import attribute_of, constant_state


class Hooks:
    """Fluid's hooks; see the module. `type`: the name that the script's updates go by."""

    type: str
    _learning_rate: Any
    _rate_variable: Variable | None = None

    def _begin(self, prefix: str, pending: Sequence[PendingGradient]) -> None:
        """Have the state made."""
        self._prefix = prefix
        self._accumulators: dict[tuple[str, str], Variable] = {}
        for one in pending:
            if one.rows is not None:
                raise ProgramError(
                    f"{user_line()}: {type(self).__name__}._append_optimize_op would get the sparse gradient of "
                    f"{one.param.name!r}. Use is_sparse=False there, or an optimizer of fluid.optimizer",
                    variable=one.param.name,
                )
        if pending:
            self._create_accumulators(_block(pending), [one.param for one in pending])

    def _append_all(self, pending: Sequence[PendingGradient]) -> None:
        """Have the updates recorded."""
        recording = recording_of(pending[0].param.program)
        pairs = [(one.param, recording.handle(one.value)) for one in pending]
        for one, pair in zip(pending, pairs, strict=True):
            with one.role():
                self._append_optimize_op(_block(pending), pair)
        self._finish_update(_block(pending), pairs)

    def _create_accumulators(self, block: Block, parameters: Sequence[Variable]) -> None:
        """Make the state of each parameter, by `_add_accumulator`."""

    def _append_optimize_op(self, block: Block, param_and_grad: tuple[Variable, Variable]) -> Any:
        """Record the update of one parameter."""
        raise NotImplementedError

    def _finish_update(self, block: Block, parameters_and_grads: Sequence[tuple[Variable, Variable]]) -> None:
        """Record what comes after all updates."""

    def _add_accumulator(
        self, name: str, param: Variable, dtype: Any = None, fill_value: float = 0.0, shape: Sequence[int] | None = None
    ) -> Variable:
        """Make a persistable variable beside a parameter, of its sizes and dtype unless others are given."""
        if (name, param.name) in self._accumulators:
            raise ProgramError(f"{user_line()}: accumulator {name!r} of {param.name!r} exists already")
        kind = param.desc.dtype if dtype is None else str(dtype_named(dtype)).removeprefix("torch.")
        sizes = [int(size) for size in (param.shape if shape is None else shape)]
        made = constant_state(f"{self._prefix}.{name}.{param.name}", float(fill_value), kind, sizes)
        self._accumulators[name, param.name] = made
        return made

    def _get_accumulator(self, name: str, param: Variable) -> Variable:
        """Return what `_add_accumulator` has made."""
        found = self._accumulators.get((name, param.name))
        if found is None:
            raise ProgramError(f"{user_line()}: there is no accumulator {name!r} of {param.name!r}; add it first")
        return found

    def _global_learning_rate(self, program: Any = None) -> Variable | None:
        """Return the learning rate, one number: a schedule, or what `minimize` has made of a number; None before."""
        return self._learning_rate if isinstance(self._learning_rate, Variable) else self._rate_variable

    def _create_param_lr(self, param_and_grad: tuple[Variable, Variable]) -> Any:
        """Return the learning rate of one parameter."""
        rate: Any = self._rate_variable
        factor = attribute_of(param_and_grad[0]).learning_rate
        return rate if factor == 1.0 else rate * factor


def _block(pending: Sequence[PendingGradient]) -> Block:
    return pending[0].param.program.global_block()


def is_derived(optimizer: Hooks) -> bool:
    """Whether a script has defined the update."""
    return type(optimizer)._append_optimize_op is not Hooks._append_optimize_op
