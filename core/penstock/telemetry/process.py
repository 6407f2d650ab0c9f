"""The one session of this process: made at first use, closed at exit, given up in forked children."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError
from penstock.protocol import contract
from penstock.telemetry.outcome import ExitWatch, Outcome
from penstock.telemetry.unwatched import Session, Unwatched

if TYPE_CHECKING:
    from penstock.telemetry.exchanges import ExchangeSource, TableSource
    from penstock.telemetry.input import InputTrace
    from penstock.telemetry.media import Loggable
    from penstock.telemetry.work import WorkSource

_log = logging.getLogger(__name__)


class _Process:
    """The session of this process, of which there is one, as there is one environment and one exit."""

    def __init__(self) -> None:
        self.exits, self.lock = ExitWatch(), threading.Lock()
        self.session: Session | None = None

    def opened(self) -> Session:
        """Return the session, decided at the first call."""
        if self.session is None:  # without the lock, which a signal may find held
            with self.lock:
                if self.session is None:
                    self.session = decide()
                    if not isinstance(self.session, Unwatched):
                        self.exits.install()
                        atexit.register(self.session.close)
                        os.register_at_fork(after_in_child=self._leave_to_parent)
        return self.session

    def _leave_to_parent(self) -> None:
        """In a forked child: it has none of the threads, and the process that is watched is its parent."""
        former, self.session, self.lock = self.session, Unwatched(), threading.Lock()
        if former is not None:
            atexit.unregister(former.close)
            former.abandon()


_process = _Process()


def session() -> Session:
    """Return the session of this process; what kind it is was decided from the environment at the first call."""
    return _process.opened()


def outcome() -> Outcome:
    """Return how this process ends, as far as that is known: exact at the interpreter's exit, if it is watched."""
    return _process.exits.outcome()


def decide(environ: Mapping[str, str] | None = None) -> Session:
    """Return a session for an environment. One that cannot be read is logged once, and leaves the process unwatched."""
    try:
        found = contract.from_environ(environ, default_name=_default_name())
    except SpecError as error:
        _log.warning("%s. Training continues without telemetry.", error)
        return Unwatched()
    if isinstance(found, contract.UnwatchedProcess):
        return Unwatched()
    from penstock.telemetry.sessions import Watched  # with its sockets, threads and models

    return Watched(found, outcome=_process.exits.outcome)


def log(values: Mapping[str, Loggable] | None = None, /, *, step: int | None = None, **named: Loggable) -> None:
    """Send scalars, which the job's page draws as series: `log(auc=0.78)`, or `log({"auc/valid": 0.78}, step=9)`.

    A `Table` or a `Histogram` among the values is shown as it is, by step: `log({"confusion": Table(columns, rows)})`.
    `step` None: the newest finished step. Raises as `Session.log`, and TypeError for `values` without names.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"penstock.telemetry.log got {values!r}; expected names: log(loss=0.5, step=9), or a dict")
    session().log(step, **{**(values or {}), **named})


def exchange(
    counters: ExchangeSource, *, endpoints: Sequence[str] = (), tables: TableSource | None = None, mode: str = "",
    work: WorkSource | None = None,
) -> None:  # fmt: skip
    """Report the counters of an exchange with parameter servers (`penstock.ps.counters.Counters`), while they change.

    `endpoints`: the servers in the job's order, for a trainer; `tables`, `mode`, `work`: of a server. Costs nothing in
    a process that is not watched.
    """
    session().exchange(counters, endpoints=endpoints, tables=tables, mode=mode, work=work)


def end_exchange(counters: ExchangeSource) -> None:
    """Let go of what `exchange` was given, as its client or server has ended; the sums stay in the job's."""
    session().end_exchange(counters)


def input_trace() -> InputTrace | None:
    """Return where the data feed records its work; None in an unwatched process, in which it records nothing."""
    return session().input()


def progress(done: int, total: int, unit: str = "steps") -> None:
    """Report how far the script is; the dashboard shows it as a bar and estimates the end."""
    session().progress(done, total, unit)


def close() -> None:
    """Send what is left and GOODBYE, in at most 2 s. Happens at the interpreter's exit by itself."""
    session().close()


def _default_name() -> str:
    """Return a job name for a process that a person started: the script's, as a job may be called."""
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:63].rstrip("-._") or "attached"
