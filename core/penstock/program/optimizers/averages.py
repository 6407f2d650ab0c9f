"""Averages of parameters over steps, and optimizers around optimizers.

What they keep is recorded into the main program behind the updates, with the role OPTIMIZE: in AllReduce mode every
replica does it, else the first one. Averages are put into the parameters by small programs, which an executor runs.
Source: fluid.optimizer (Fluid 1.8); the accumulation of `ModelAverage`: operators/average_accumulates_op.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.ir import Operator, Ref, Role, VarDesc
from penstock.program.operator_types import BlockOperator
from penstock.program.optimizers.base import Optimizer, Pair
from penstock.program.program import Program
from penstock.program.record.context import (
    default_main_program,
    default_startup_program,
    name_scope,
    program_guard,
    role,
)
from penstock.program.record.declared import Declared, written
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.parameters import constant_state, create_persistable

_MAX_TERMS = 16384
"""Steps after which ModelAverage begins another sum, so that small terms are not lost in a large one."""


class _Averages:
    """What exponential and window averages have in common: swapping them with the parameters."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._averages: dict[str, Callable[[Program], Any]] = {}
        self._described: dict[str, VarDesc] = {}

    @contextmanager
    def apply(self, executor: Any, need_restore: bool = True) -> Iterator[None]:
        """Put the averages into the parameters of the current scope within the block; then, with `need_restore`,
        what they were before."""
        executor.run(self._program(self._put))
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: Any) -> None:
        """Put into the parameters what they were before the last `apply`."""
        executor.run(self._program(self._take_back))

    def _program(self, write: Callable[[Program, str], None]) -> Program:
        program = Program()
        with program_guard(program, Program()), torch.no_grad():
            for name in self._averages:
                write(program, name)
        return program

    def _put(self, program: Program, name: str) -> None:
        param = _persistable(program, self._described[name])
        saved = Declared(recording_of(program), VarDesc(self._saved(name), (), param.desc.dtype))
        written(saved, torch.clone(param))
        saved.persistable = True
        written(param, self._averages[name](program))

    def _take_back(self, program: Program, name: str) -> None:
        described = self._described[name]
        saved = VarDesc(self._saved(name), described.shape, described.dtype, persistable=True)
        written(_persistable(program, described), _persistable(program, saved))

    def _saved(self, name: str) -> str:
        return f"{self._prefix}.saved.{name}"


def _persistable(program: Program, described: VarDesc) -> Any:
    """Return a variable of another program, by its description, in `program`: state, never trained there."""
    if described.name in program.variables:
        return program.handle(described.name)
    recording = recording_of(program)
    sizes = [int(d) for d in described.shape if isinstance(d, int)]
    fake = recording.fake_of_shape(sizes, getattr(torch, described.dtype))
    recording.bind(fake, recording.describe(fake, described.name, persistable=True))
    return recording.handle(fake)


class ExponentialMovingAverage(_Averages):
    """ema = decay ema + (1 - decay) parameter, at each step, of every trained parameter that exists at `update`,
    unless its ParamAttr says do_model_average=False.

    Applied, it is divided by 1 - decay^steps, since it begins at zero. `thres_steps`: a variable t; the decay is then
    min(decay, (1 + t) / (10 + t)), and the division takes the last one.
    """

    def __init__(self, decay: float = 0.999, thres_steps: Variable | None = None, name: str | None = None) -> None:
        super().__init__(name or default_main_program().unique("ema"))
        self._decay, self._thres_steps = float(decay), thres_steps

    def update(self) -> None:
        """Record one step of the averages, behind the optimizer's updates."""
        main = default_main_program()
        params = [v for v in main.all_parameters() if v.desc.trainable and v.do_model_average]
        if not params:
            raise ProgramError(f"{user_line()}: ExponentialMovingAverage.update() finds no trained parameters")
        steps = constant_state(f"{self._prefix}.steps", 0.0)
        decay: Any = constant_state(f"{self._prefix}.decay", self._decay)
        states = [constant_state(f"{self._prefix}.{p.name}", 0.0, p.desc.dtype, p.desc.shape) for p in params]
        with name_scope(self._prefix), role(Role.OPTIMIZE), torch.no_grad():
            steps.add_(1.0)
            if self._thres_steps is not None:
                limit: Any = (self._thres_steps + 1.0) / (self._thres_steps + 10.0)  # type: ignore[operator]  # a Variable
                decay.copy_(torch.clamp(limit.reshape([]).to(torch.float32), max=self._decay))
            for param, state in zip(params, states, strict=True):
                one = decay.to(param.dtype)
                state.copy_(state * one + param * (1.0 - one))
        for param, state in zip(params, states, strict=True):
            self._described[param.name] = param.desc
            self._averages[param.name] = self._corrected(state.desc, steps.desc, decay.desc)

    def _corrected(self, state: VarDesc, steps: VarDesc, decay: VarDesc) -> Callable[[Program], Any]:
        def average(program: Program) -> Any:
            ema, number, base = (_persistable(program, v) for v in (state, steps, decay))
            share = (1.0 - base**number).to(ema.dtype)
            return torch.where(number > 0, ema / share, ema)

        return average


class ModelAverage(_Averages):
    """Mean of each parameter over a window of the last steps: between `min_average_window` and `max_average_window`,
    else `average_window_rate` of all steps. Make it behind `minimize`."""

    def __init__(
        self,
        average_window_rate: float,
        min_average_window: int = 10000,
        max_average_window: int = 10000,
        regularization: object = None,
        name: str | None = None,
    ) -> None:
        main = default_main_program()
        super().__init__(name or main.unique("model_average"))
        self._rate, self._least, self._most = average_window_rate, min_average_window, max_average_window
        params = [v for v in main.all_parameters() if v.desc.trainable and v.do_model_average]
        if not params:
            raise ProgramError(f"{user_line()}: ModelAverage finds no trained parameters; make it behind minimize()")
        counts = [constant_state(f"{self._prefix}.{n}", 0, "int64") for n in ("updates", "terms", "old_terms")]
        sums = [
            [constant_state(f"{self._prefix}.sum_{i}.{p.name}", 0.0, p.desc.dtype, p.desc.shape) for i in (1, 2, 3)]
            for p in params
        ]
        with name_scope(self._prefix), role(Role.OPTIMIZE), torch.no_grad():
            self._accumulate(params, counts, sums)
        for param, parts in zip(params, sums, strict=True):
            self._described[param.name] = param.desc
            self._averages[param.name] = _mean_of([v.desc for v in parts], [v.desc for v in counts[1:]])

    def _accumulate(self, params: Sequence[Any], counts: Sequence[Any], sums: Sequence[Sequence[Any]]) -> None:
        updates, terms, old_terms = counts
        updates.add_(1)
        terms.add_(1)
        moves = updates % _MAX_TERMS == 0
        window = torch.clamp((updates.to(torch.float64) * self._rate).to(torch.int64), max=self._most)
        restarts: Any = (terms >= self._least) & (terms >= window)
        for param, (first, second, third) in zip(params, sums, strict=True):
            total = first + param
            both = second + total
            third.copy_(torch.where(restarts, both, third))
            second.copy_(torch.where(restarts, torch.zeros_like(both), torch.where(moves, both, second)))
            first.copy_(torch.where(restarts | moves, torch.zeros_like(total), total))
        old_terms.copy_(torch.where(restarts, terms, old_terms))
        terms.copy_(torch.where(restarts, torch.zeros_like(terms), terms))


def _mean_of(parts: Sequence[VarDesc], counts: Sequence[VarDesc]) -> Callable[[Program], Any]:
    def average(program: Program) -> Any:
        first, second, third = (_persistable(program, v) for v in parts)
        terms, old_terms = (_persistable(program, v) for v in counts)
        return (first + second + third) / (terms + old_terms).to(first.dtype)

    return average


class LookaheadOptimizer:
    """Every `k` steps of `inner_optimizer`, slow parameters move by `alpha` towards its own, which start there anew."""

    def __init__(self, inner_optimizer: Optimizer, alpha: float = 0.5, k: int = 5) -> None:
        if not 0.0 <= alpha <= 1.0 or k < 1:
            raise ProgramError(
                f"{user_line()}: LookaheadOptimizer: alpha is {alpha}, k {k}; expected 0 to 1, at least 1"
            )
        self.inner_optimizer, self.alpha, self.k = inner_optimizer, alpha, k

    def minimize(
        self, loss: Variable, startup_program: Program | None = None
    ) -> tuple[list[BlockOperator], list[Pair]]:
        """Record the inner optimizer's updates, which it returns, and the slow parameters behind them."""
        updates, pairs = self.inner_optimizer.minimize(loss, startup_program)
        program = loss.program
        startup = startup_program or default_startup_program()
        with program_guard(program, startup):
            prefix = program.unique("lookahead")
            step: Any = constant_state(f"{prefix}.step", 0, "int64")
            slows = [self._slow(startup, prefix, param) for param, _ in pairs]
            with name_scope(prefix), role(Role.OPTIMIZE), torch.no_grad():
                step.add_(1)
                meets: Any = step % self.k == 0
                for (param, _), slow in zip(pairs, slows, strict=True):
                    fast: Any = param
                    mixed = fast * self.alpha + slow * (1.0 - self.alpha)
                    slow.copy_(torch.where(meets, mixed, slow))
                    fast.copy_(torch.where(meets, mixed, fast))
        return updates, pairs

    @staticmethod
    def _slow(startup: Program, prefix: str, param: Variable) -> Any:
        """Return a slow parameter, which the startup program makes of the parameter's first value."""
        slow = create_persistable(f"{prefix}.slow.{param.name}", param.desc.shape, param.desc.dtype, Constant(0.0))  # type: ignore[arg-type]  # parameters have sizes
        name = startup.unique_operator("clone")
        startup.operators[-1] = Operator(
            name, "aten.clone.default", (Ref(param.name),), (slow.name,), source=user_line()
        )
        return slow
