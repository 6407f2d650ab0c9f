"""Adam and its kin. Sources: adam_op, adamax_op (Fluid 1.8); AdamW: torch.optim.AdamW, paddle.optimizer.AdamW (2.0)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.program.optimizers.base import Optimizer, State
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

    m = b1 m + (1 - b1) g; s = b2 s + (1 - b2) g g; p -= lr / (1 - b1^t) m / (sqrt(s / (1 - b2^t)) + epsilon).
    The sparse form adds epsilon before the correction, as torch's SparseAdam: sqrt(1 - b2^t) m / (sqrt(s) + epsilon).
    """

    kind = "adam"
    counts_steps = True
    sparse_kernel = True
    _states: Mapping[str, float] = {"moment1": 0.0, "moment2": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        super().__init__(learning_rate, regularization, grad_clip, name)
        self._betas = (float(beta1), float(beta2))
        self._epsilon = float(epsilon)

    def _dense(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        kept = (state["moment1"], state["moment2"], state["step"])
        torch.ops.penstock.adam_(one.param.fake, *kept, one.value, lr, *self._betas, self._epsilon, 0.0)

    def _sparse_kernel(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        assert isinstance(one.gradient, SelectedRows)
        kept = (state["moment1"], state["moment2"], state["step"])
        rows, values = one.gradient.rows.fake, one.gradient.values.fake
        torch.ops.penstock.sparse_adam_(one.param.fake, *kept, rows, values, lr, *self._betas, self._epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        (beta1, beta2), first, second = self._betas, state["moment1"], state["moment2"]
        first.mul_(beta1).add_(g, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        rate = lr * _left(beta2, state["step"]).sqrt() / _left(beta1, state["step"])
        p.sub_(first * rate / (second.sqrt() + self._epsilon))


class AdamWOptimizer(AdamOptimizer):
    """Adam after p *= 1 - lr * weight_decay (decoupled). Of a sparse table the used rows alone decay."""

    kind = "adamw"
    sparse_kernel = False

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, None, grad_clip, name)
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
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, regularization, grad_clip, name)
        self._betas, self._epsilon = (float(beta1), float(beta2)), float(epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        (beta1, beta2), moment, norm = self._betas, state["moment"], state["inf_norm"]
        moment.mul_(beta1).add_(g, alpha=1.0 - beta1)
        norm.copy_(torch.maximum(g.abs(), norm * beta2 + self._epsilon))
        p.sub_(moment / norm * (lr / _left(beta1, state["step"])))
