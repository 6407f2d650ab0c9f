"""What a pass over a data set shows while it runs: fetched variables, a user's handler, where the time goes.

All of it but the progress is about the first thread's steps, as in Fluid. Printing goes to stdout, the profile and the
progress to stderr.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock import telemetry
from penstock.errors import SpecError
from penstock.exec.data_parallel import DataParallel
from penstock.exec.fetching import fetch_names
from penstock.program.program import Program

_log = logging.getLogger(__name__)
_SHOWN_VALUES = 20
_PROFILED_STEPS = 100
_SHOWN_OPERATORS = 15
_SENT_S, _LINE_S = 0.5, 1.0
_PER_MILLE = 1000


class Fetches:
    """Prints `fetch_list` every `print_period` batches: `<info>\\t<name>\\tdim: …\\tdtype: …\\tdata: …`.

    `fetch_info` None: the variables' names. Raises SpecError if there are not as many texts as variables.
    """

    def __init__(
        self, program: Program, fetch_list: Sequence[Any] | None, fetch_info: Sequence[str] | None, print_period: int
    ) -> None:
        self._names = fetch_names(program, fetch_list)
        self._info = list(self._names if fetch_info is None else fetch_info)
        if len(self._info) != len(self._names):
            raise SpecError(
                f"fetch_info has {len(self._info)} texts for the {len(self._names)} variables of fetch_list; give one "
                "for each, or None for their names"
            )
        if print_period < 1:
            raise SpecError(f"print_period is {print_period!r}; expected a number of batches of at least 1")
        self._period = print_period

    def names(self, batch: int) -> tuple[str, ...]:
        """Return what batch number `batch` (from 1) has to fetch."""
        return tuple(self._names) if batch % self._period == 0 else ()

    def show(self, batch: int, values: Sequence[Any]) -> None:
        """Print what was fetched."""
        for info, name, value in zip(self._info, self._names, values, strict=False):  # none, if it was not their turn
            flat = np.asarray(value).reshape(-1)
            data = " ".join(f"{v:.6g}" for v in flat[:_SHOWN_VALUES]) + (" …" if flat.size > _SHOWN_VALUES else "")
            print(f"{info}\t{name}\tdim: {list(np.shape(value))}\tdtype: {flat.dtype}\tdata: [{data}]", flush=True)


class FetchHandler:
    """Override `handler`; it is given the newest values of `var_dict`'s variables every `period_secs`, and at the end.

    It runs on a thread of its own; training does not wait for it. An exception in it ends its calls and is logged.
    """

    def __init__(self, var_dict: Mapping[str, Any] | None = None, period_secs: float = 60) -> None:
        if not var_dict or not isinstance(var_dict, Mapping):
            raise SpecError(
                "FetchHandler needs var_dict, a dict from keys of one's own to variables, such as {'loss': loss}; got "
                f"{var_dict!r}",
                got=var_dict,
            )
        if period_secs <= 0:
            raise SpecError(f"period_secs is {period_secs!r}; expected seconds above 0", got=period_secs)
        self.var_dict, self.period_secs = dict(var_dict), period_secs

    def handler(self, res_dict: dict[str, Any]) -> None:
        """Look at the values: an array for each key, or None before the first step."""
        for key, value in res_dict.items():
            print(f"{key}: {value}", flush=True)


class HandlerThread:
    """Calls a FetchHandler while a pass runs."""

    def __init__(self, handler: FetchHandler, program: Program) -> None:
        if not isinstance(handler, FetchHandler):
            raise SpecError(f"fetch_handler is a {type(handler).__name__}; expected a fluid.FetchHandler")
        self._handler = handler
        self.names = tuple(fetch_names(program, list(handler.var_dict.values())))
        self._newest: Sequence[Any] = [None] * len(self.names)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-fetch-handler", daemon=True)
        self._thread.start()

    def see(self, values: Sequence[Any]) -> None:
        """Take the values of a step."""
        self._newest = values

    def close(self) -> None:
        """Call a last time and end."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._handler.period_secs)
            try:
                self._handler.handler(dict(zip(self._handler.var_dict, self._newest, strict=True)))
            except Exception as error:  # noqa: BLE001 - a user's code; training goes on
                _log.error("the fetch handler failed and is not called again: %r", error)
                return


class Profile:
    """Where the first thread's time goes, printed every 100 steps (`debug=True`)."""

    def __init__(self, core: DataParallel) -> None:
        self._core = core
        self._reset()

    def _reset(self) -> None:
        self._steps = self._rows = 0
        self._read_s = self._all_s = 0.0

    def read(self, seconds: float) -> None:
        """Count time that was spent waiting for a batch and handing it over."""
        self._read_s += seconds

    def step(self, rows: int, seconds: float) -> None:
        """Count a step, reading included; print when there are enough."""
        self._steps += 1
        self._rows += rows
        self._all_s += seconds
        if self._steps == _PROFILED_STEPS:
            self.show()

    def show(self) -> None:
        """Print what was counted since the last time."""
        if not self._steps:
            return
        for line in self._operators():
            print(line, file=sys.stderr)
        print(
            f"mean read time: {1e3 * self._read_s / self._steps:.3f} ms, IO percent: "
            f"{100 * self._read_s / self._all_s:.1f} %, {self._rows / self._all_s:.0f} instances/s "
            f"(thread 0, {self._steps} batches)",
            file=sys.stderr,
            flush=True,
        )
        self._reset()

    def _operators(self) -> list[str]:
        graph = self._core.newest_graph
        if graph is None or self._core.is_watched:  # then the job's page shows them
            return []
        drained = self._core.engine.drain()
        operators = np.asarray(drained["op"])
        sums = np.bincount(operators, weights=drained["duration_ns"], minlength=len(graph.handles))
        order = np.argsort(-sums[: len(graph.handles)])[:_SHOWN_OPERATORS]
        return [
            f"{graph.handles[i].op.name}: {sums[i] / 1e3 / self._steps:.1f} us a step" for i in order if sums[i] > 0
        ]


class PassProgress:
    """Progress of a pass: sent to the dashboard twice a second, and shown as one line on a terminal once a second.

    `fraction`: of the data, None if it is not known. The line is for terminals, where nothing else is printed:
    `shows_line`. `trained` is any thread's, the rest the first thread's.
    """

    def __init__(
        self,
        fraction: Callable[[], float | None],
        *,
        shows_line: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fraction, self._clock, self._begin = fraction, clock, clock()
        self._stream = sys.stderr if shows_line and sys.stderr.isatty() else None
        self._lock = threading.Lock()
        self._rows = 0
        self._sent, self._shown = float("-inf"), self._begin

    def trained(self, rows: int) -> None:
        """Count a batch."""
        with self._lock:
            self._rows += rows

    def update(self) -> None:
        """Send and show the progress, if it is time."""
        now = self._clock()
        if now - self._sent >= _SENT_S:
            self._sent = now
            self._send()
        if self._stream is not None and now - self._shown >= _LINE_S:
            self._shown = now
            print(f"\r{self._line(now)}\x1b[K", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Send the progress a last time, and end the line, if there is one."""
        self._send()
        if self._stream is not None and self._shown > self._begin:
            print(f"\r{self._line(self._clock())}\x1b[K", file=self._stream, flush=True)

    def _send(self) -> None:
        fraction = self._fraction()
        if fraction is not None:
            telemetry.progress(int(fraction * _PER_MILLE), _PER_MILLE, "per mille of the data")

    def _line(self, now: float) -> str:
        fraction, seconds = self._fraction(), max(now - self._begin, 1e-9)
        share = "" if fraction is None else f"{100 * fraction:.1f} % of the data, "
        return f"penstock: {share}{self._rows} samples, {self._rows / seconds:.0f} samples/s"
