"""Momentum with deep gradient compression: what a replica adds to the exchange are its largest sums of gradients.

A parameter of at least 16384 elements, in float32, keeps on each replica a momentum u and a sum v of it, from the step
`rampup_begin_step` on: u = mu u + g, v = v + u. The elements of v that are largest by magnitude are the gradient that
is exchanged, and begin anew as zeros in u and v; the others wait. The update is then p -= lr g. Before that step, and
for other parameters, it is MomentumOptimizer's.
The exchange itself carries whole gradients, with zeros: this is the arithmetic of the compression, not its speed.
Sources: dgc_op.h, dgc_momentum_op.h, DGCMomentumOptimizer (Fluid 1.8); Lin et al., Deep Gradient Compression (2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.optimizers.base import Optimizer, State
from penstock.program.record.context import role
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes
from penstock.program.training.clipping import GradientClipByNorm
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.parameters import constant_state
from penstock.program.training.regularizers import Regularizer, regularizer_of

_LEAST_ELEMENTS = 16384  # of a parameter that is compressed


class DGCMomentumOptimizer(Optimizer):
    """Momentum whose gradients are compressed before their exchange; see the module.

    `sparsity`: the shares of elements that wait, one after another over `rampup_step` steps, the last one from then on.
    `grad_clip`: a GradientClipByNorm of each replica's own gradient, at clip_norm / sqrt(num_trainers); decay, too, is
    added before the exchange. Raises ProgramError for other settings.
    """

    kind = "dgc_momentum"
    _states: Mapping[str, float] = {"velocity": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        rampup_begin_step: int,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        parameter_list: Sequence[str | Variable] | None = None,
        *,
        use_nesterov: bool = False,
        num_trainers: int | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClipByNorm | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._momentum, self._nesterov = float(momentum), bool(use_nesterov)
        if rampup_begin_step < 0 or rampup_step < 1 or not sparsity or not all(0.0 <= s < 1.0 for s in sparsity):
            raise ProgramError(
                f"{user_line()}: DGCMomentumOptimizer: rampup_begin_step is {rampup_begin_step}, rampup_step "
                f"{rampup_step} and sparsity {list(sparsity)}; expected a step from 0 on, a positive number of steps, "
                "and shares from 0 to below 1"
            )
        self._begin_step, self._steps, self._sparsity = int(rampup_begin_step), int(rampup_step), tuple(sparsity)
        self._clip_norm = math.inf
        if grad_clip is not None:
            by_norm: object = grad_clip
            if not isinstance(by_norm, GradientClipByNorm) or not num_trainers or num_trainers < 0:
                raise ProgramError(
                    f"{user_line()}: DGCMomentumOptimizer: grad_clip is {grad_clip} and num_trainers {num_trainers}; "
                    "expected a GradientClipByNorm and how many trainers there are"
                )
            self._clip_norm = grad_clip.clip_norm / math.sqrt(num_trainers)
        self._step: Any = None

    def _before_exchange(self, prefix: str, pending: Sequence[PendingGradient], states: Mapping[str, State]) -> None:
        self._step = constant_state(f"{prefix}.step", 0.0).fake
        for one in filter(_is_compressed, pending):
            sums = [_of_each_replica(f"{prefix}.{key}.{one.param.name}", one.param) for key in ("u", "v")]
            most = torch.tensor(self._numbers_sent(one.param.fake.numel()))
            recording = recording_of(one.param.program)
            pair = ((one.param.name, one.gradient.name),)
            with torch.no_grad(), recording_modes(recording), role(Role.BACKWARD, pair):
                self._compress(one, sums, recording.capture(most), states[one.param.name]["velocity"])

    def _after_exchange(self, pending: Sequence[PendingGradient]) -> Sequence[PendingGradient]:
        return [one for one in pending if not _is_compressed(one)]

    def _numbers_sent(self, size: int) -> list[int]:
        """How many of so many elements are sent under each sparsity; shares are float32 in Fluid."""
        return [max(1, int(size * float(np.float32(1.0) - np.float32(share)))) for share in self._sparsity]

    def _compress(
        self, one: PendingGradient, sums: Sequence[torch.Tensor], numbers: torch.Tensor, velocity: torch.Tensor
    ) -> None:
        """Record the local step of one gradient, which becomes what is exchanged, in place. `sums`: u and v."""
        gradient: Any = one.gradient
        u, v = sums
        given, share = gradient.fake, _share_of_replica(one.param)
        is_on, is_first = self._step >= self._begin_step, self._step == self._begin_step
        clipped = given
        if math.isfinite(self._clip_norm):
            factor = self._clip_norm / given.square().sum().sqrt().clamp_min(self._clip_norm)
            clipped = torch.where(is_on, given * factor, given)
        decay = regularizer_of(one, self._regularization)
        local = clipped if decay is None else clipped + decay.term(one.param.fake) * share
        before = torch.where(is_first, velocity * share, u)
        moved = (before + local) * self._momentum if self._nesterov else before * self._momentum + local
        total = v + moved + clipped * share if self._nesterov else v + moved  # without decay, as the kernel of 1.8
        is_sent = (total.abs() >= self._least_sent(total, numbers)) & is_on
        waits = torch.logical_not(is_sent) & is_on
        given.copy_(torch.where(is_on, total * is_sent, local))
        u.copy_(moved * waits)
        v.copy_(total * waits)

    def _least_sent(self, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        largest = torch.topk(total.abs().reshape([-1]), max(self._numbers_sent(total.numel()))).values
        period = ((self._step - self._begin_step) * len(self._sparsity) / self._steps).floor()
        period = period.clamp(0, len(self._sparsity) - 1).to(torch.int64).reshape([1])
        return largest.index_select(0, numbers.index_select(0, period) - 1)

    def _update(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        if not _is_compressed(one):
            super()._update(one, lr, state)
            return
        velocity, gradient, is_on = state["velocity"], one.value, self._step >= self._begin_step
        moved = velocity * self._momentum + gradient
        plain = gradient + moved * self._momentum if self._nesterov else moved
        velocity.copy_(torch.where(is_on, velocity, moved))
        one.param.fake.sub_(torch.where(is_on, gradient, plain) * lr)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        velocity = state["velocity"]
        velocity.mul_(self._momentum).add_(g)
        p.sub_((g + velocity * self._momentum if self._nesterov else velocity) * lr)

    def _after_updates(self) -> None:
        self._step.add_(1.0)


def _is_compressed(one: PendingGradient) -> bool:
    is_large = one.param.fake.numel() >= _LEAST_ELEMENTS and one.param.desc.dtype == "float32"
    return is_large and one.rows is None


def _of_each_replica(name: str, param: Variable) -> torch.Tensor:
    """State beside a parameter of which each replica has its own."""
    made = constant_state(name, 0.0, param.desc.dtype, [int(size) for size in param.fake.shape])
    variables = param.program.variables
    variables[name] = replace(variables[name], buffer=True)
    return made.fake


def _share_of_replica(param: Variable) -> torch.Tensor:
    """The gradient of the loss, a number: the share of a replica's rows in all."""
    program = param.program
    name = next(n for op in program.operators if op.role == Role.BACKWARD | Role.LOSS for n in op.output_names())
    found = recording_of(program).fake_of(name)
    assert found is not None  # `append_backward` has recorded it
    return found.reshape([])
