"""Optimizers: `minimize` records the backward pass and one update operator a parameter.

State lives in persistable variables named `<optimizer>.<state>.<parameter>`; the step count and the
learning rate are one variable each for all parameters. Sparse gradients are applied lazily: rows that
the batch did not use keep their value and their moments (as torch's SparseAdam).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.backward import Gradient, SelectedRows, append_backward
from penstock.program.ir import Operator, Role
from penstock.program.parameters import constant_state
from penstock.program.program import Program
from penstock.program.record.context import name_scope, program_guard, role
from penstock.program.record.recording import recording_of
from penstock.program.record.variable import Variable, recording_modes

Pair = tuple[Variable, Gradient]


class Optimizer:
    """Base: learning rate, the order of recording, and the seams `_begin` and `_update`."""

    kind = "optimizer"

    def __init__(
        self,
        learning_rate: float | Variable,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        if regularization is not None or grad_clip is not None:
            raise ProgramError(f"{type(self).__name__}: regularization and grad_clip are not supported in this version")
        self._learning_rate = learning_rate
        self._name = name

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> tuple[list[Operator], list[Pair]]:
        """Record backward pass and updates; return (update operators, (parameter, gradient) pairs)."""
        with program_guard(loss.program, startup_program):
            pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
            return self.apply_gradients(pairs), pairs

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> list[Pair]:
        """Record the backward pass alone."""
        return append_backward(loss, parameter_list, no_grad_set)

    def apply_gradients(self, params_grads: Sequence[Pair]) -> list[Operator]:
        """Record the updates for given gradients; return their operators."""
        if not params_grads:
            raise ProgramError(f"{type(self).__name__} got no gradients to apply")
        program = params_grads[0][0].program
        before = len(program.operators)
        prefix = self._name or program.unique(self.kind)
        recording = recording_of(program)
        with name_scope(prefix):
            kinds = {param.desc.dtype for param, _ in params_grads}
            rate = self._rate(prefix, "float64" if "float64" in kinds else "float32")
            state = self._prepare(prefix, params_grads)
            with torch.no_grad(), recording_modes(recording), role(Role.OPTIMIZE):
                self._begin(state)
                for param, grad in params_grads:
                    with role(Role.OPTIMIZE, ((param.name, grad.name),)):
                        self._update(param, grad, rate.fake, state)
        return program.operators[before:]

    def _rate(self, prefix: str, dtype: str) -> Variable:
        if isinstance(self._learning_rate, Variable):
            return self._learning_rate
        return constant_state(f"{prefix}.learning_rate", float(self._learning_rate), dtype)

    def _prepare(self, prefix: str, pairs: Sequence[Pair]) -> dict[str, Variable]:
        return {}

    def _begin(self, state: dict[str, Variable]) -> None:
        """Record what happens once a step."""

    def _update(self, param: Variable, grad: Gradient, rate: torch.Tensor, state: dict[str, Variable]) -> None:
        raise NotImplementedError


class SGDOptimizer(Optimizer):
    """p -= lr * g."""

    kind = "sgd"

    def _update(self, param: Variable, grad: Gradient, rate: torch.Tensor, state: dict[str, Variable]) -> None:
        if isinstance(grad, SelectedRows):
            torch.ops.penstock.sparse_sgd_(param.fake, grad.rows.fake, grad.values.fake, rate)
        else:
            torch.ops.penstock.sgd_(param.fake, grad.fake, rate)


class AdamOptimizer(Optimizer):
    """Adam with bias correction; sparse gradients lazily (`lazy_mode` is accepted, and always so for sparse ones)."""

    kind = "adam"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        super().__init__(learning_rate, regularization, grad_clip, name)
        self._betas = (float(beta1), float(beta2))
        self._epsilon = float(epsilon)

    def _prepare(self, prefix: str, pairs: Sequence[Pair]) -> dict[str, Variable]:
        state = {"step": constant_state(f"{prefix}.step", 0.0)}
        for param, _ in pairs:
            sizes = [int(d) for d in param.fake.shape]
            for moment in ("moment1", "moment2"):
                key = f"{moment}.{param.name}"
                state[key] = constant_state(f"{prefix}.{key}", 0.0, param.desc.dtype, sizes)
        return state

    def _begin(self, state: dict[str, Variable]) -> None:
        state["step"].fake.add_(1.0)

    def _update(self, param: Variable, grad: Gradient, rate: torch.Tensor, state: dict[str, Variable]) -> None:
        moments = [state[f"{m}.{param.name}"].fake for m in ("moment1", "moment2")]
        step, (beta1, beta2), epsilon = state["step"].fake, self._betas, self._epsilon
        if isinstance(grad, SelectedRows):
            rows, values = grad.rows.fake, grad.values.fake
            torch.ops.penstock.sparse_adam_(param.fake, *moments, step, rows, values, rate, beta1, beta2, epsilon)
        else:
            torch.ops.penstock.adam_(param.fake, *moments, step, grad.fake, rate, beta1, beta2, epsilon, 0.0)


SGD, Adam = SGDOptimizer, AdamOptimizer
