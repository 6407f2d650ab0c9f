"""SGD and momentum. Sources: sgd_op, momentum_op, lars_momentum_op (Fluid 1.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from penstock.errors import ProgramError
from penstock.program.optimizers.base import Optimizer, State
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.backward import SelectedRows
from penstock.program.training.clipping import Clip
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.regularizers import Regularizer


class SGDOptimizer(Optimizer):
    """p -= lr * g."""

    kind = "sgd"
    sparse_kernel = True

    def _dense(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        torch.ops.penstock.sgd_(one.param.fake, one.value, lr)

    def _sparse_kernel(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        assert isinstance(one.gradient, SelectedRows)
        torch.ops.penstock.sparse_sgd_(one.param.fake, one.gradient.rows.fake, one.gradient.values.fake, lr)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        p.sub_(g * lr)


class MomentumOptimizer(Optimizer):
    """v = mu v + g; p -= lr v, or lr (g + mu v) with Nesterov's look-ahead."""

    kind = "momentum"
    _states: Mapping[str, float] = {"velocity": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        parameter_list: Sequence[str | Variable] | None = None,
        use_nesterov: bool = False,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        if hasattr(use_nesterov, "term"):  # the fourth, before there was a parameter_list
            if regularization is not None:
                raise ProgramError(f"{user_line()}: Momentum: regularization is given twice")
            use_nesterov, regularization = False, cast("Regularizer", use_nesterov)
        if isinstance(parameter_list, bool):
            parameter_list, use_nesterov = None, parameter_list
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._momentum, self._nesterov = float(momentum), bool(use_nesterov)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        velocity = state["velocity"]
        velocity.mul_(self._momentum).add_(g)
        p.sub_((g + velocity * self._momentum if self._nesterov else velocity) * lr)


class LarsMomentumOptimizer(Optimizer):
    """v = mu v + local (g + decay p); p -= v, where local = lr coeff |p| / (|g| + decay |p|).

    `local` is lr itself if a norm or the decay is 0. Norms are those of the whole parameter and its gradient, so the
    sparse form reads the whole table once a step; what it writes are the used rows alone.
    """

    kind = "lars_momentum"
    _states: Mapping[str, float] = {"velocity": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._momentum, self._coeff, self._decay = float(momentum), float(lars_coeff), float(lars_weight_decay)

    def _update(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        g = one.value
        if one.rows is not None:
            # Each row once, in a table that is zero elsewhere.
            one.scratch.index_copy_(0, one.rows, g)
            gradient_norm = one.scratch.square().sum().sqrt()
            one.scratch.index_fill_(0, one.rows, 0.0)
        else:
            gradient_norm = g.square().sum().sqrt()
        super()._update(one, self._local(one.param.fake.square().sum().sqrt(), gradient_norm, lr), state)

    def _local(self, norm: torch.Tensor, gradient_norm: torch.Tensor, lr: torch.Tensor) -> torch.Tensor:
        if self._decay <= 0.0:
            return lr
        local = norm / (gradient_norm + norm * self._decay) * self._coeff * lr
        return torch.where((norm > 0) & (gradient_norm > 0), local, lr.to(local.dtype))

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        velocity = state["velocity"]
        velocity.mul_(self._momentum).add_((g + p * self._decay) * lr)
        p.sub_(velocity)


class DpsgdOptimizer(Optimizer):
    """p -= lr (g / max(1, |g| / clip) + noise / batch_size), with one normal number of deviation `sigma` as noise of a
    parameter's step: differentially private SGD. A table with a sparse gradient is refused.

    Noise follows from `Program.random_seed` and the number of the run. Source: dpsgd_op (Fluid 1.8).
    """

    kind = "dpsgd"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        clip: float = 0.9,
        batch_size: float = 0.999,
        sigma: float = 1e-8,
        parameter_list: Sequence[str | Variable] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, name=name, parameter_list=parameter_list)
        if not (clip > 0.0 and batch_size > 0.0 and sigma >= 0.0):
            raise ProgramError(
                f"{user_line()}: Dpsgd: clip is {clip}, batch_size {batch_size} and sigma {sigma}; expected positive "
                "ones"
            )
        self._clip, self._batch_size, self._sigma = float(clip), float(batch_size), float(sigma)

    def _update(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        if one.rows is not None:
            raise ProgramError(
                f"{user_line()}: Dpsgd: {one.param.name!r} has a sparse gradient; use embedding(is_sparse=False)",
                variable=one.param.name,
            )
        gradient, recording = one.value, recording_of(one.param.program)
        recording.num_seeds += 1
        operands = ("normal", 0.0, self._sigma, recording.num_seeds, True, -1, 1, gradient.dtype)
        noise = torch.ops.penstock.random(recording.rng(), [1], *operands)
        scale = (one.square_sum().sqrt() / self._clip).clamp_min(1.0)
        one.param.fake.sub_((gradient / scale + noise.reshape(()) / self._batch_size) * lr)
