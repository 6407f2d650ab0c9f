"""Learning-rate schedules as operators of the program (role LR_SCHED), from a count of runs.

Each returns a persistable float32 scalar, written in place once a run, before the updates that read it; what a script
computes of such ones, an optimizer keeps as one more. The count is
one persistable int64 for all schedules of a program: 0 in the first run, or 1 if the program's first schedule is
`noam_decay`, whose formula has no value at 0. Formulas are computed in float64.
Source: python/paddle/fluid/layers/learning_rate_scheduler.py (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, name_scope, role
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes
from penstock.program.training.parameters import constant_state

COUNTER = "@LR_DECAY_COUNTER@"


def _schedule(kind: str, formula: Callable[[torch.Tensor], torch.Tensor], begin: int = 0) -> Variable:
    """Record `formula` of the run's number: `begin` in the first run, unless a schedule before has begun the count."""
    main = default_main_program()
    prefix, recording = main.unique(kind), recording_of(main)
    counter = _counter(begin)
    rate = constant_state(f"{prefix}.learning_rate", 0.0)
    with name_scope(prefix), torch.no_grad(), recording_modes(recording), role(Role.LR_SCHED):
        rate.fake.copy_(formula(counter.fake.to(torch.float64)))
    return rate


def computed_rate(prefix: str, given: Variable) -> Variable | None:
    """Return state of a rate that a script computes of schedules, `noam_decay(…) * 2.0`, or feeds as one number.

    None if parameters or rows of a batch take part.
    """
    main = given.program
    if given.fake.numel() != 1 or not given.fake.dtype.is_floating_point or _reads_rows(main, given.name):
        return None
    rate = constant_state(f"{prefix}.learning_rate", 0.0, given.desc.dtype)
    with torch.no_grad(), recording_modes(recording_of(main)), role(Role.LR_SCHED):
        rate.fake.copy_(given.fake.reshape([]))
    return rate


def _reads_rows(program: Program, name: str) -> bool:
    """Whether a value was computed of rows of inputs or of parameters, which replicas may have different values of.

    An input of one number is none: if replicas are fed different ones, a run raises FeedError (exec/fed_rates.py).
    """
    makers = {made: op for op in program.operators for made in op.output_names()}
    found, waiting = {name}, [name]
    while waiting:
        op = makers.get(waiting.pop())
        new = set(op.input_names()) - found if op is not None else set()
        found |= new
        waiting += new
    read = (program.variables[one] for one in found if one in program.variables)
    return any(var.parameter or var.buffer or (var.feed and any(d != 1 for d in var.shape)) for var in read)


def _counter(begin: int) -> Variable:
    """The count of runs, which the program's first schedule begins."""
    main = default_main_program()
    if COUNTER in main.variables:
        return main.handle(COUNTER)  # type: ignore[no-any-return]  # a Variable
    counter = constant_state(COUNTER, begin - 1, "int64")
    with torch.no_grad(), recording_modes(recording_of(main)), role(Role.LR_SCHED):
        counter.fake.add_(1)
    return counter


def decay_step_counter(begin: int = 0) -> Any:
    """Return the run's number as float32 [1], `begin` in the first run, for a schedule that a script writes itself."""
    count: Any = _counter(begin)
    with torch.no_grad(), role(Role.LR_SCHED):
        return count.reshape([1]).to(torch.float32)


def _parts(step: torch.Tensor, decay_steps: int, staircase: bool) -> torch.Tensor:
    parts = step / decay_steps
    return parts.floor() if staircase else parts


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate * decay_rate ** (step / decay_steps); `staircase`: whole quotients alone."""
    return _schedule(
        "exponential_decay",
        lambda step: torch.pow(float(decay_rate), _parts(step, decay_steps, staircase)) * learning_rate,
    )


def natural_exp_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate * exp(-decay_rate * step / decay_steps)."""
    return _schedule(
        "natural_exp_decay",
        lambda step: torch.exp(_parts(step, decay_steps, staircase) * -decay_rate) * learning_rate,
    )


def inverse_time_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Variable:
    """learning_rate / (1 + decay_rate * step / decay_steps)."""
    return _schedule(
        "inverse_time_decay",
        lambda step: learning_rate / (_parts(step, decay_steps, staircase) * decay_rate + 1.0),
    )


def polynomial_decay(
    learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Variable:
    """(learning_rate - end) * (1 - step / decay_steps) ** power + end; then `end`.

    `cycle`: decay_steps grows to the next multiple that holds the step, instead.
    """

    def formula(step: torch.Tensor) -> torch.Tensor:
        if cycle:
            share = step / ((step / decay_steps).ceil().clamp_min(1.0) * decay_steps)
        else:
            share = step.clamp_max(float(decay_steps)) / decay_steps
        return torch.pow(1.0 - share, power) * (learning_rate - end_learning_rate) + end_learning_rate

    return _schedule("polynomial_decay", formula)


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Variable:
    """values[i] as long as step < boundaries[i]; the last value then. Raises ProgramError if the lengths do not fit."""
    if len(values) != len(boundaries) + 1:
        raise ProgramError(
            f"{user_line()}: piecewise_decay needs one more value than boundaries; got {len(values)} and "
            f"{len(boundaries)}"
        )

    def formula(step: torch.Tensor) -> torch.Tensor:
        rate = torch.full_like(step, float(values[-1]))
        for boundary, value in reversed(list(zip(boundaries, values, strict=False))):
            rate = torch.where(step < boundary, torch.full_like(step, float(value)), rate)
        return rate

    return _schedule("piecewise_decay", formula)


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Variable:
    """learning_rate / 2 * (cos(floor(step / step_each_epoch) * pi / epochs) + 1)."""
    return _schedule(
        "cosine_decay",
        lambda step: ((step / step_each_epoch).floor() * (math.pi / epochs)).cos().add(1.0) * (0.5 * learning_rate),
    )


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> Variable:
    """learning_rate * d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5).

    The count begins at 1 where this is the program's first schedule, for those after it too. After another one it
    began at 0, and the first rate is 0.
    """

    def formula(step: torch.Tensor) -> torch.Tensor:
        return torch.minimum(step.rsqrt(), step * math.pow(warmup_steps, -1.5)) * (learning_rate / math.sqrt(d_model))

    return _schedule("noam_decay", formula, begin=1)


def linear_lr_warmup(learning_rate: float | Variable, warmup_steps: int, start_lr: float, end_lr: float) -> Variable:
    """From `start_lr` in a line to `end_lr` over `warmup_steps`; then `learning_rate`, which may be a schedule."""

    def formula(step: torch.Tensor) -> torch.Tensor:
        after: Any = learning_rate
        after = after.fake if isinstance(after, Variable) else torch.full_like(step, float(after))
        line = step * ((end_lr - start_lr) / warmup_steps) + start_lr
        return torch.where(step < warmup_steps, line, after.to(torch.float64))

    return _schedule("linear_lr_warmup", formula)
