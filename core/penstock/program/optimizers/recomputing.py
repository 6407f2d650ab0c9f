"""`RecomputeOptimizer`: an optimizer around another one, whose backward pass keeps checkpoints alone.

Source: fluid.optimizer.RecomputeOptimizer (Fluid 1.8).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.logger import warn_once
from penstock.program.ir import Role
from penstock.program.operator_types import BlockOperator
from penstock.program.optimizers.base import Minimizer, Pair, attribute_of_inner
from penstock.program.program import Program
from penstock.program.record.context import program_guard
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.recomputation import checkpoint_names, recompute

_log = logging.getLogger(__name__)


class RecomputeOptimizer(Minimizer):
    """Computes activations between checkpoints again in the backward pass, see `training/recomputation.py`.

    Gradients and updates are those of `optimizer`, to the bit. Everything but the methods here is its own.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._checkpoints: list[Any] | None = None

    def _set_checkpoints(self, checkpoints: Sequence[Any]) -> None:
        """Set the variables, or their names, that are kept. Raises ProgramError for what is no list of them."""
        if not isinstance(checkpoints, (list, tuple)) or not all(isinstance(c, (str, Variable)) for c in checkpoints):
            raise ProgramError(
                f"{user_line()}: _set_checkpoints is given {checkpoints!r}; expected a list of variables"
            )
        self._checkpoints = list(checkpoints)

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: object = None,
        checkpoints: Sequence[Any] | None = None,
    ) -> list[Pair]:
        """Record the backward pass. Raises ProgramError before `_set_checkpoints`, and for a name without a variable.

        `checkpoints`: has no effect, as in Fluid.
        """
        if self._checkpoints is None:
            raise ProgramError(
                f"{user_line()}: RecomputeOptimizer has no checkpoints: call _set_checkpoints([…]) with the variables "
                "to keep before minimize"
            )
        program = loss.program
        names, before = checkpoint_names(program, self._checkpoints), len(program.operators)
        with program_guard(program, startup_program):
            pairs: list[Pair] = self._optimizer.backward(loss, startup_program, parameter_list, no_grad_set)
        start = next((i for i, op in enumerate(program.operators) if i >= before and op.role & Role.BACKWARD), before)
        if names and pairs and not recompute(program, names, start):
            text = (
                f"{user_line()}: RecomputeOptimizer computes nothing again: the backward pass reads no activation in "
                "front of the last checkpoint that is not kept for another reason (docs/optimizers.md)"
            )
            warn_once(_log, text)
        return pairs

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record the updates for given gradients; return their operators."""
        found: list[BlockOperator] = self._optimizer.apply_gradients(params_grads)
        return found

    def load(self, stat_dict: Any) -> None:
        """Raises ProgramError: states of an optimizer are variables, which `fluid.io` loads."""
        raise ProgramError(f"{user_line()}: RecomputeOptimizer.load: load its variables by fluid.io.load_persistables")

    def __getattr__(self, name: str) -> Any:
        return attribute_of_inner(self, name)
