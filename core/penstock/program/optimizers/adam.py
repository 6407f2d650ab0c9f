"""Adam and its kin.

Sources: adam_op, adamax_op, lamb_op (Fluid 1.8); AdamW: torch.optim.AdamW, paddle.optimizer.AdamW (2.0).

Where epsilon goes is a matter of the source: Fluid 1.8 adds it to the root of the second moment as it is kept
(`epsilon_hat`), torch and Paddle from 2.0 on to the corrected root, which is epsilon * sqrt(1 - b2^t) beside the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from penstock.errors import ProgramError
from penstock.program.optimizers.base import Optimizer, State
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.backward import SelectedRows
from penstock.program.training.clipping import Clip
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.regularizers import Regularizer


def _left(beta: float, step: torch.Tensor) -> torch.Tensor:
    """1 - beta ** step, in float64 whatever the step is kept in."""
    return 1.0 - torch.pow(beta, step.to(torch.float64))


class AdamOptimizer(Optimizer):
    """Adam with bias correction; sparse gradients lazily, whatever `lazy_mode` says: rows move only when they are used.

    m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g g; p -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(s) + epsilon).
    """

    kind = "adam"
    counts_steps = True
    sparse_kernel = True
    _states: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}
    _epsilon_hat: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._betas = (float(beta1), float(beta2))
        self._epsilon = float(epsilon)

    def _dense(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        kept = (state["moment1"], state["moment2"], state["step"])
        settings = (*self._betas, self._epsilon, 0.0, self._epsilon_hat)
        torch.ops.penstock.adam_(one.param.fake, *kept, one.value, lr, *settings)

    def _sparse_kernel(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        assert isinstance(one.gradient, SelectedRows)
        kept = (state["moment1"], state["moment2"], state["step"])
        rows, values = one.gradient.rows.fake, one.gradient.values.fake
        torch.ops.penstock.sparse_adam_(one.param.fake, *kept, rows, values, lr, *self._betas, self._epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        (beta1, beta2), first, second = self._betas, state["moment1"], state["moment2"]
        first.mul_(beta1).add_(g, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        root = _left(beta2, state["step"]).sqrt()
        epsilon = self._epsilon if self._epsilon_hat else root * self._epsilon
        p.sub_(first * (lr * root / _left(beta1, state["step"])) / (second.sqrt() + epsilon))


class TorchAdamOptimizer(AdamOptimizer):
    """torch.optim.Adam: epsilon beside the corrected root; for sparse gradients torch.optim.SparseAdam."""

    _epsilon_hat = False


class AdamWOptimizer(AdamOptimizer):
    """Adam after p *= 1 - lr * weight_decay (decoupled), with epsilon beside the corrected root.

    Of a sparse table the used rows alone decay.
    """

    kind = "adamw"
    sparse_kernel = False
    _epsilon_hat = False

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        grad_clip: Clip | None = None,
        name: str | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, None, grad_clip, name)
        self._weight_decay = float(weight_decay)

    def _dense(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        one.param.fake.mul_(1.0 - lr * self._weight_decay)
        super()._dense(one, lr, state)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        p.mul_(1.0 - lr * self._weight_decay)
        super()._rule(p, g, lr, state)


class AdamaxOptimizer(Optimizer):
    """m = b1 m + (1 - b1) g; u = max(|g|, b2 u + epsilon); p -= lr / (1 - b1^t) m / u."""

    kind = "adamax"
    counts_steps = True
    _states: Mapping[str, float] = {"moment": 0.0, "inf_norm": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._betas, self._epsilon = (float(beta1), float(beta2)), float(epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        (beta1, beta2), moment, norm = self._betas, state["moment"], state["inf_norm"]
        moment.mul_(beta1).add_(g, alpha=1.0 - beta1)
        norm.copy_(torch.maximum(g.abs(), norm * beta2 + self._epsilon))
        p.sub_(moment / norm * (lr / _left(beta1, state["step"])))


class LambOptimizer(Optimizer):
    """m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g g; r = m / (sqrt(s) + epsilon) + decay p; p -= lr |p| / |r| r.

    The ratio of the norms is 1 where one of them is 0. As in Fluid 1.8 the moments are not corrected; Paddle 2 corrects
    them. Raises ProgramError for a sparse gradient: norms are those of the whole parameter.
    """

    kind = "lamb"
    _states: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        exclude_from_weight_decay_fn: Callable[[Variable], bool] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._decay, self._excludes = float(lamb_weight_decay), exclude_from_weight_decay_fn
        self._betas, self._epsilon = (float(beta1), float(beta2)), float(epsilon)

    def _update(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        if one.rows is not None:
            raise ProgramError(
                f"{user_line()}: Lamb got a sparse gradient of {one.param.name!r}, but needs the norm of the whole "
                "table; look it up with is_sparse=False, or take Adam",
                variable=one.param.name,
            )
        (beta1, beta2), first, second, p = self._betas, state["moment1"], state["moment2"], one.param.fake
        first.mul_(beta1).add_(one.value, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(one.value, one.value, value=1.0 - beta2)
        decay = 0.0 if self._excludes and self._excludes(one.param) else self._decay
        change = first / (second.sqrt() + self._epsilon) + p * decay
        norm, of_change = p.square().sum().sqrt(), change.square().sum().sqrt()
        ratio = torch.where((norm > 0) & (of_change > 0), norm / of_change, torch.ones_like(norm))
        p.sub_(change * (ratio * lr))
