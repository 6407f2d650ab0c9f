"""Settings ranked by the step time that the simulation predicts for them, with a reason for each. Pure.

Predictions are relative: the current setting is simulated too, and all are scaled so that it comes out at what was
measured. So a part of the step that the model lacks counts as in proportion to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.advice.budget import affordable
from penstock.advice.costs import Costs
from penstock.advice.plan import Template, tasks_of, template_of
from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting
from penstock.advice.simulate import Simulated, Task, simulate

LEAST_GAIN = 0.02
"""What promises less than this is no reason to change: the current setting stands before it."""
LEAST_SCALE, MOST_SCALE = 0.5, 2.0
"""Beyond these the recording and its graph contradict each other, and the scale stays at the bound."""


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `busy`: share of the workers' time in operators; `path`: operators that bound the step, the longest
    first; `operators_ns`, `exchange_ns`, `outside_ns`: of a step, over all workers.
    """

    setting: Setting
    step_ns: float
    samples_per_s: float
    workers: int
    intra_op: int
    busy: float
    busy_ns: tuple[float, ...]
    path: tuple[str, ...]
    operators_ns: float
    exchange_ns: float
    outside_ns: float
    is_current: bool
    reason: str = ""


def advise(run: Recorded, settings: Sequence[Setting] | None = None) -> list[Option]:
    """Return each setting with its prediction, the fastest first; the current setting is always among them.

    The current one stands before those that promise less than `LEAST_GAIN`.
    """
    current = run.setting.canonical()
    wanted = affordable(run)[0] if settings is None else settings
    template, costs = template_of(run.graph), Costs(run)
    made = {setting: _option(run, template, costs, setting) for setting in dict.fromkeys([current, *wanted])}
    now = made[current]
    scale = min(MOST_SCALE, max(LEAST_SCALE, run.step_ns / now.step_ns)) if now.step_ns > 0 and run.step_ns > 0 else 1.0
    found = [_explained(_scaled(option, scale), _scaled(now, scale)) for option in made.values()]
    return sorted(found, key=lambda option: option.step_ns * (1 - LEAST_GAIN if option.is_current else 1))


def _option(run: Recorded, template: Template, costs: Costs, setting: Setting) -> Option:
    tasks = tasks_of(template, run, setting, costs)
    workers = setting.workers(run.cores)
    outside = costs.outside(setting)
    step = simulate(tasks, workers=workers, cores=run.cores)
    total = step.span_ns + outside
    return Option(
        setting, total, run.rows / total * 1e9 if total > 0 else 0.0, workers, setting.intra_op(run.cores),
        sum(step.busy_ns) / (workers * step.span_ns) if step.span_ns > 0 else 0.0, step.busy_ns,
        _longest(tasks, step), sum(step.busy_ns),
        sum(task.cost_ns for task in tasks if task.name.startswith("exchange.")), outside,
        setting == run.setting.canonical(),
    )  # fmt: skip


def _longest(tasks: Sequence[Task], step: Simulated, most: int = 5) -> tuple[str, ...]:
    path = sorted(step.path, key=lambda index: -tasks[index].cost_ns)
    return tuple(dict.fromkeys(tasks[index].name for index in path))[:most]


def _scaled(option: Option, scale: float) -> Option:
    return replace(
        option, step_ns=option.step_ns * scale, samples_per_s=option.samples_per_s / scale,
        busy_ns=tuple(ns * scale for ns in option.busy_ns), operators_ns=option.operators_ns * scale,
        exchange_ns=option.exchange_ns * scale, outside_ns=option.outside_ns * scale,
    )  # fmt: skip


def _explained(option: Option, now: Option) -> Option:
    return replace(option, reason=_of_itself(option) if option.is_current else _beside(option, now))


def _of_itself(option: Option) -> str:
    threads = f"{option.workers} thread{'s' if option.workers > 1 else ''}"
    return (
        f"as recorded: operators take {_ms(option.operators_ns)}, {_ms(option.exchange_ns)} of it exchange gradients, "
        f"and {threads} {'are' if option.workers > 1 else 'is'} {_percent(option.busy)} busy"
    )


def _beside(option: Option, now: Option) -> str:
    """Say what differs from the current setting, the largest difference first."""
    parts: list[tuple[float, str]] = []
    work = option.operators_ns - option.exchange_ns - (now.operators_ns - now.exchange_ns)
    if abs(work) > 0.02 * now.step_ns:
        parts.append((abs(work), f"operators take {_ms(abs(work))} {'more' if work > 0 else 'less'}"))
    exchange = option.exchange_ns - now.exchange_ns
    if abs(exchange) > 0.01 * now.step_ns:
        parts.append((abs(exchange), f"exchanges {_ms(abs(exchange))} {'more' if exchange > 0 else 'less'}"))
    if (option.workers, option.intra_op) != (now.workers, now.intra_op):
        each = f"{option.workers} at once with {option.intra_op} core{'s' if option.intra_op > 1 else ''} each"
        parts.append((now.step_ns, f"operators run {each}, not {now.workers} with {now.intra_op}"))
    idle = (1 - option.busy) - (1 - now.busy)
    if abs(idle) > 0.03:
        parts.append((abs(idle) * now.step_ns, f"threads are {_percent(option.busy)} busy, not {_percent(now.busy)}"))
    if not parts:
        return "no part of the step changes by more than 2 %"
    return "; ".join(text for _, text in sorted(parts, key=lambda part: -part[0])[:3])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f} ms"
