"""Optimizers with decoupled weight decay: parameters shrink by a share of themselves before each update.

Source: contrib/extend_optimizer/extend_optimizer_with_weight_decay.py (Fluid 1.8); Loshchilov & Hutter, arXiv
1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.operator_types import BlockOperator, in_fluids_names
from penstock.program.optimizers.base import Optimizer, Pair
from penstock.program.record.context import name_scope, role
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes


def extend_with_decoupled_weight_decay(base_optimizer: Any) -> type[Any]:
    """Return a class of optimizers that takes `weight_decay` and `apply_decay_param_fun` before those of the base.

    A parameter p becomes p - weight_decay * p, then the base updates it. `weight_decay`: a number, or a variable of one
    element. `apply_decay_param_fun`: gets a parameter's name and returns whether it decays. Raises ProgramError for
    what is no optimizer.
    """
    if not (isinstance(base_optimizer, type) and issubclass(base_optimizer, Optimizer)):
        raise ProgramError(
            f"{user_line()}: extend_with_decoupled_weight_decay: {base_optimizer!r} is no class of fluid.optimizer"
        )
    return type(f"{base_optimizer.__name__}WithDecoupledWeightDecay", (_Decoupled, base_optimizer), {})


class _Decoupled(Optimizer):
    """What stands before the base."""

    def __init__(
        self, weight_decay: float | Variable, apply_decay_param_fun: Callable[[str], bool] | None = None, **given: Any
    ) -> None:
        super().__init__(**given)
        if not isinstance(weight_decay, (float, int, Variable)):
            raise ProgramError(
                f"{user_line()}: {type(self).__name__}: weight_decay is {weight_decay!r}; expected a number or a "
                "variable"
            )
        self._weight_decay, self._decays = weight_decay, apply_decay_param_fun

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[BlockOperator]:
        """Record the decay, then what the base records; return the operators of both."""
        operators = params_grads[0][0].program.operators if params_grads else []
        before = len(operators)
        given: Sequence[tuple[Variable, Any]] = params_grads
        pairs = [pair for pair in given if pair[1] is not None]
        chosen = [pair for pair in pairs if self._decays is None or self._decays(pair[0].name)]
        with name_scope("weight_decay"), torch.no_grad():
            for param, gradient in chosen:
                pair = ((param.name, gradient.name),)
                with recording_modes(recording_of(param.program)), role(Role.OPTIMIZE, pair):
                    self._decay(param)
        super().apply_gradients(params_grads)
        return in_fluids_names(operators[before:])

    def _decay(self, param: Variable) -> None:
        given: Any = self._weight_decay
        share = given.fake.reshape(()) if isinstance(given, Variable) else float(given)
        param.fake.sub_(param.fake * share)
