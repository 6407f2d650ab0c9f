"""`fluid.profiler`: what operators cost between a start and a stop, as a table and as a trace in Chrome's format.

The records are those of torch.profiler, of all threads, so that runs of an Executor and of the engine are seen alike.
One profile at a time. Open the trace in Perfetto or at chrome://tracing. Source: fluid.profiler (Fluid 1.8).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.compat.torch import all_threads_config
from penstock.errors import SpecError

_log = logging.getLogger(__name__)
_STATES = ("CPU", "GPU", "All")
_ORDERS = ("calls", "total", "max", "min", "ave")


@dataclass(frozen=True, slots=True)
class _Cost:
    """What the calls of one operator took, in milliseconds of its own thread."""

    name: str
    calls: int
    total: float
    max: float
    min: float

    @property
    def ave(self) -> float:
        return self.total / self.calls


class _Running:
    """The profile that runs, if there is one."""

    current: profile | None = None
    state = "All"


@contextmanager
def profiler(
    state: str,
    sorted_key: str | None = None,
    profile_path: str = "/tmp/profile",
    tracer_option: str = "Default",
) -> Iterator[None]:
    """Profile the block, then print a table and write the trace, see `stop_profiler`."""
    _check_order(sorted_key)
    start_profiler(state, tracer_option)
    try:
        yield
    except BaseException:
        _stop_after_error(sorted_key, profile_path)
        raise
    stop_profiler(sorted_key, profile_path)


def start_profiler(state: str, tracer_option: str = "Default") -> None:
    """Begin. `state`: "CPU", "GPU" or "All"; `tracer_option` changes nothing: every operator is recorded.

    If a profile runs already, it goes on. Raises SpecError.
    """
    if _Running.current is not None:
        return
    if state not in _STATES:
        raise SpecError(f"start_profiler: state is {state!r}; expected one of {', '.join(_STATES)}", got=state)
    activities = [] if state == "GPU" else [ProfilerActivity.CPU]
    if state != "CPU" and torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    if not activities:
        raise SpecError("start_profiler(state='GPU'): no GPU can be used here; pass 'CPU' or 'All'")
    _Running.state = state
    _Running.current = profile(activities=activities, experimental_config=all_threads_config())
    _Running.current.start()


def stop_profiler(sorted_key: str | None = None, profile_path: str = "/tmp/profile") -> None:
    """End; print what each operator cost and write the trace (JSON in Chrome's format) to `profile_path`.

    `sorted_key`: "calls", "total", "max", "min" or "ave" orders the table, largest first; None or "default": as first
    called. Without a profile nothing happens. Raises SpecError for another `sorted_key`; then the profile goes on.
    """
    if _Running.current is None:
        return
    _check_order(sorted_key)
    running, _Running.current = _Running.current, None
    running.stop()
    Path(profile_path).parent.mkdir(parents=True, exist_ok=True)
    running.export_chrome_trace(profile_path)
    costs = _costs(running)
    if sorted_key in _ORDERS:
        costs.sort(key=lambda cost: float(getattr(cost, sorted_key)), reverse=True)
    print(_table(costs))  # noqa: T201 - what it is for


def reset_profiler() -> None:
    """Forget what was recorded, and go on. Without a profile nothing happens."""
    running, _Running.current = _Running.current, None
    if running is not None:
        running.stop()
        start_profiler(_Running.state)


def _check_order(sorted_key: str | None) -> None:
    if sorted_key not in (None, "default", *_ORDERS):
        raise SpecError(f"profiler: sorted_key is {sorted_key!r}; expected one of {', '.join(_ORDERS)}", got=sorted_key)


def _stop_after_error(sorted_key: str | None, profile_path: str) -> None:
    """End the profile of a block that has failed, whose own error is the one to see."""
    try:
        stop_profiler(sorted_key, profile_path)
    except Exception:  # noqa: BLE001 - recorded; the error of the block is raised
        _log.exception("the profile of a block that failed could not be written to %s", profile_path)


def _costs(running: profile) -> list[_Cost]:
    times: dict[str, list[float]] = {}
    events: Any = running.events()  # type: ignore[no-untyped-call]  # torch has not typed it
    for event in events or ():
        times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000.0)
    return [_Cost(name, len(spent), sum(spent), max(spent), min(spent)) for name, spent in times.items()]


def _table(costs: list[_Cost]) -> str:
    lines = [f"{'operator':<40} {'calls':>8} {'total ms':>12} {'min ms':>10} {'max ms':>10} {'ave ms':>10}"]
    lines += [
        f"{c.name[:40]:<40} {c.calls:>8} {c.total:>12.4f} {c.min:>10.4f} {c.max:>10.4f} {c.ave:>10.4f}" for c in costs
    ]
    return "\n".join(lines)
