"""Optimizers with a learning rate for each element.

Sources: adagrad_op, decayed_adagrad_op, adadelta_op, rmsprop_op, ftrl_op (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.program.optimizers.base import Optimizer, State
from penstock.program.record.variable import Variable
from penstock.program.training.backward import SelectedRows
from penstock.program.training.clipping import Clip
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.regularizers import Regularizer


class AdagradOptimizer(Optimizer):
    """m += g g; p -= lr g / (sqrt(m) + epsilon)."""

    kind = "adagrad"
    sparse_kernel = True

    def __init__(
        self,
        learning_rate: float | Variable,
        epsilon: float = 1e-06,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._epsilon, self._states = float(epsilon), {"moment": float(initial_accumulator_value)}

    def _sparse_kernel(self, one: PendingGradient, lr: torch.Tensor, state: State) -> None:
        assert isinstance(one.gradient, SelectedRows)
        rows, values = one.gradient.rows.fake, one.gradient.values.fake
        torch.ops.penstock.sparse_adagrad_(one.param.fake, state["moment"], rows, values, lr, self._epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        moment = state["moment"]
        moment.addcmul_(g, g)
        p.sub_(g * lr / (moment.sqrt() + self._epsilon))


class DecayedAdagradOptimizer(Optimizer):
    """m = decay m + (1 - decay) g g; p -= lr g / (sqrt(m) + epsilon)."""

    kind = "decayed_adagrad"
    _states: Mapping[str, float] = {"moment": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        decay: float = 0.95,
        epsilon: float = 1e-06,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._decay, self._epsilon = float(decay), float(epsilon)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        moment = state["moment"]
        moment.mul_(self._decay).addcmul_(g, g, value=1.0 - self._decay)
        p.sub_(g * lr / (moment.sqrt() + self._epsilon))


class AdadeltaOptimizer(Optimizer):
    """s = rho s + (1 - rho) g g; d = -sqrt((u + epsilon) / (s + epsilon)) g; u = rho u + (1 - rho) d d; p += d.

    As in Fluid 1.8 the learning rate has no part in it; Paddle 2.6 multiplies d with it in the last formula.
    """

    kind = "adadelta"
    _states: Mapping[str, float] = {"avg_squared_grad": 0.0, "avg_squared_update": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        epsilon: float = 1e-06,
        rho: float = 0.95,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._epsilon, self._rho = float(epsilon), float(rho)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        square, update = state["avg_squared_grad"], state["avg_squared_update"]
        square.mul_(self._rho).addcmul_(g, g, value=1.0 - self._rho)
        change = ((update + self._epsilon) / (square + self._epsilon)).sqrt() * g
        update.mul_(self._rho).addcmul_(change, change, value=1.0 - self._rho)
        p.sub_(change)


class RMSPropOptimizer(Optimizer):
    """s = rho s + (1 - rho) g g; v = momentum v + lr g / sqrt(s + epsilon); p -= v.

    `centered`: the variance s - a a instead of s, with a = rho a + (1 - rho) g.
    """

    kind = "rmsprop"

    def __init__(
        self,
        learning_rate: float | Variable,
        rho: float = 0.95,
        epsilon: float = 1e-06,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._rho, self._epsilon, self._momentum = float(rho), float(epsilon), float(momentum)
        self._centered = bool(centered)
        self._states = dict.fromkeys(("mean_square", "velocity", *(("mean_grad",) if centered else ())), 0.0)

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        square, velocity = state["mean_square"], state["velocity"]
        square.mul_(self._rho).addcmul_(g, g, value=1.0 - self._rho)
        spread = square
        if self._centered:
            mean = state["mean_grad"]
            mean.mul_(self._rho).add_(g, alpha=1.0 - self._rho)
            spread = square - mean * mean
        velocity.mul_(self._momentum).add_(g * lr / (spread + self._epsilon).sqrt())
        p.sub_(velocity)


class FtrlOptimizer(Optimizer):
    """n' = n + g g; z += g - (n' ** a - n ** a) / lr p, with a = -lr_power;
    p = 0 where |z| <= l1, else (l1 sign(z) - z) / (n' ** a / lr + 2 l2)."""

    kind = "ftrl"
    _states: Mapping[str, float] = {"squared": 0.0, "linear": 0.0}

    def __init__(
        self,
        learning_rate: float | Variable,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        parameter_list: Sequence[str | Variable] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name)
        self._l1, self._l2, self._power = float(l1), float(l2), -float(lr_power)

    def _raised(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt() if self._power == 0.5 else x**self._power

    def _rule(self, p: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, state: State) -> None:
        squared, linear = state["squared"], state["linear"]
        before = self._raised(squared)
        squared.addcmul_(g, g)
        after = self._raised(squared)
        linear.add_(g - (after - before) / lr * p)
        shrunk = (linear.sign() * self._l1 - linear) / (after / lr + 2.0 * self._l2)
        # An element that never had a gradient divides 0 by 0; it is among those that become 0.
        p.copy_(torch.where(linear.abs() > self._l1, shrunk, torch.zeros_like(p)))
