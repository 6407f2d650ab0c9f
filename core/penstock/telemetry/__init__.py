"""Telemetry of a training process: operator events, gradient exchange, metrics and progress, sent to a watcher.

`session()` is the door for executors and pservers; `log`, `progress` and `close` are for scripts, `exchange` and
`end_exchange` for clients and parameter servers, `input_trace` for data sets and loaders. A process with neither an
agent nor PENSTOCK_URL and PENSTOCK_TOKEN runs exactly the same, and nothing here costs it anything.
Needs numpy, not torch, and pydantic where it is watched.

    events, sums, sync, exchanges, input, sampling, metrics, media, collector, outbox, outcome    decide; no thread
    watch, sessions, process, sender, link                                      the threads and connections around them
    unwatched                                                                 the same calls where nothing comes of them
"""

from __future__ import annotations

from penstock.telemetry.events import TraceSource
from penstock.telemetry.process import close, end_exchange, exchange, input_trace, log, progress, session
from penstock.telemetry.unwatched import Session, Watch

__all__ = [
    "Session",
    "TraceSource",
    "Watch",
    "close",
    "end_exchange",
    "exchange",
    "input_trace",
    "log",
    "progress",
    "session",
]
