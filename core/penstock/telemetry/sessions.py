"""The telemetry of one process: its watcher, what it runs, and the thread that carries the one to the other.

Three kinds of session, decided once from the environment: *managed* (an agent started the process; its Unix socket),
*attached* (a person did; a websocket of its own), *unwatched* (no thread, no socket, empty methods).

The thread of the training only appends to deques. A daemon thread takes from them each `INTERVAL_S`, drains the trace
sources and makes frames; the sender's thread sends them. Whatever fails here is logged once and never reaches training.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.identity import Role
from penstock.process.private import read_private
from penstock.protocol import recording
from penstock.protocol.contract import Attached, Managed
from penstock.protocol.frames import Array, Column, Kind
from penstock.protocol.graphdoc import GraphDocument, GraphHash, Threads
from penstock.telemetry.collector import Collected, Collector, Draft
from penstock.telemetry.events import TraceSource
from penstock.telemetry.exchanges import ExchangeSource, ExchangeWatch, TableSource
from penstock.telemetry.input import InputSampler, InputTrace, Turn
from penstock.telemetry.link import ProcessIdentity, dialer, leaver
from penstock.telemetry.media import Loggable, split
from penstock.telemetry.metrics import checked_count, checked_scalars, evaluation_apart
from penstock.telemetry.outbox import Outbox, Parcel, message, pack
from penstock.telemetry.outcome import Outcome
from penstock.telemetry.sampling import Sampler
from penstock.telemetry.sender import Sender
from penstock.telemetry.tally import Tally
from penstock.telemetry.unwatched import NullWatch, Session, ThreadsOf, Watch
from penstock.telemetry.watch import LiveWatch
from penstock.telemetry.work import WorkSource, WorkWatch
from penstock.version import __version__

INTERVAL_S = 0.1
CLOSE_S = 2.0
REPORT_S = 2.0
"""How often what was counted is reported, while it changes: what a killed process had counted since is unknown."""
_log = logging.getLogger(__name__)


class Watched(Session):
    """A managed or attached session. Threads start with the first call of a method other than `close`.

    `outcome`: how the program ends; GOODBYE reports it, and after an error the last steps are sent as well.
    """

    def __init__(
        self,
        contract: Managed | Attached,
        *,
        outcome: Callable[[], Outcome] = Outcome,
        sampler: Sampler | None = None,
    ) -> None:
        self.drain_cpu_s = 0.0
        self.sampler = sampler or Sampler()
        self._redials = isinstance(contract, Attached)  # a registration belongs to its connection
        self._request = recording.request_path(contract.socket) if isinstance(contract, Managed) else None
        self._identity = _identity(contract)
        self._outcome = outcome
        self._lock = threading.RLock()  # state below; reentrant, since a finalizer may close a watch at any point
        self._watches: list[LiveWatch] = []
        self._exchange = ExchangeWatch()
        self._tally = Tally()  # of operator events
        self._input, self._inputs = InputTrace(), InputSampler()
        self._work = WorkWatch(self._inputs.tally)  # whose events are of the same kind
        self._counted_input = Tally()  # as it was posted last
        self._turns: list[Turn] = []  # of watches that were closed since the last tick
        self._scalars: deque[dict[str, Any]] = deque()
        self._progress: dict[str, Any] | None = None
        self._started = self._closed = False
        self._trains = False  # any watch, closed ones included
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-telemetry-drain", daemon=True)
        self._since_report_s = 0.0
        outbox = Outbox(process=self._identity.process)
        outbox.introduce(self._identity.hello())
        dial, leave = dialer(contract, self._who), leaver(contract)
        self._sender = Sender(outbox, dial, on_end=self._stop.set, leave=leave)

    def register(self, *, role: Role = "trainer", endpoint: str | None = None, index: int | None = None) -> None:
        with self._lock:
            number = self._identity.index if index is None else index
            self._identity = replace(self._identity, role=role, endpoint=endpoint, index=number)
            hello = self._identity.hello()
            self._sender.edit(lambda outbox: outbox.introduce(hello), redial=self._redials and self._started)
            self._start()

    def watch(self, source: TraceSource, *, name: str, threads: ThreadsOf | None = None) -> Watch:
        counts = None if threads is None else threads()
        with self._lock:
            if self._closed:
                return NullWatch()
            self._start()
            collector = Collector(self.sampler, tally=self._tally)
            watch = LiveWatch(source, collector, name=name, on_close=self._close_watch, threads=counts)
            self._watches.append(watch)
            return watch

    def exchange(
        self, counters: ExchangeSource, *, endpoints: Sequence[str] = (), tables: TableSource | None = None,
        mode: str = "", work: WorkSource | None = None,
    ) -> None:  # fmt: skip
        self._start()
        if not self._closed:
            self._exchange.add(counters, endpoints, tables, mode)
            if work is not None:
                self._work.add(id(counters), work)

    def end_exchange(self, counters: ExchangeSource) -> None:
        try:
            self._work.remove(id(counters))
            self._exchange.remove(counters)
        except Exception:  # noqa: BLE001 - a boundary: counters that fail must not keep their owner from its end
            _log.exception("what was exchanged last with parameter servers is not shown; training goes on")

    def input(self) -> InputTrace | None:
        return None if self._closed else self._input

    def log(self, step: int | None = None, **values: Loggable) -> None:
        at = None if step is None else checked_count(step, "step")
        scalars, media = split(values)
        finite = checked_scalars(scalars)
        self._start()
        if not self._closed:
            when = {"step": self._last_step() if at is None else at, "time_ns": time.time_ns()}
            if finite or not media:
                self._scalars.append({**when, "values": finite})
            # A frame for each, so that none is too large. A server that does not know them finds no value.
            self._scalars.extend({**when, "values": {}, "media": {name: one}} for name, one in media.items())

    def progress(self, done: int, total: int, unit: str = "steps") -> None:
        counts = {"done": checked_count(int(done), "done"), "total": checked_count(int(total), "total")}
        self._start()
        self._progress = {**counts, "unit": unit}

    def close(self) -> None:
        with self._lock:
            if self._closed or not self._started:
                self._closed = True
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_S
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._sender.close(timeout_s=max(deadline - time.monotonic(), 0.0))

    def abandon(self) -> None:
        """Let nothing pile up from now on: the drain thread has ended, or, in a forked child, never was. Lock-free."""
        self._closed = True
        for watch in self._watches:
            watch.forget()

    def _who(self) -> ProcessIdentity:
        return self._identity  # read at each dial, since `register` changes it

    def _start(self) -> None:
        if not self._started:  # read without the lock: it only ever becomes true
            with self._lock:
                self._start_once()

    def _start_once(self) -> None:
        if not self._started and not self._closed:
            self._started = True
            self._sender.start()
            self._thread.start()

    def _last_step(self) -> int:
        watches = [watch for watch in self._watches if watch.collector.trains] or self._watches
        return max((watch.last_step for watch in watches), default=0)

    # ---- the drain thread

    def _run(self) -> None:
        """Tick until the session closes or a peer refused this process for good."""
        try:
            last_s = time.monotonic()
            while not self._stop.wait(INTERVAL_S):
                now_s = time.monotonic()
                self._tick(now_s - last_s)
                last_s = now_s
            with self._lock:
                self._tick(time.monotonic() - last_s)
                self._post_exchange(math.inf)  # what is left, before GOODBYE
                for watch in list(self._watches):
                    self._close_watch(watch)
                turns, self._turns = self._turns, []
            self._post_input(turns, is_last=True)
            self._sender.post([message(Kind.GOODBYE, self._outcome().body(), t0_ns=time.time_ns())])
        except Exception:  # noqa: BLE001 - a boundary: a fault of the telemetry must not end the training
            _log.exception("telemetry failed and is switched off; training goes on")
        finally:
            self.abandon()

    def _is_asked_for_all(self) -> bool:
        return self._request is not None and recording.until(read_private(self._request), time.monotonic()) > 0

    def _tick(self, interval_s: float) -> None:
        """Drain every source, and hand what there is to the sender."""
        began_s = time.thread_time()
        self.sampler.in_full = self._is_asked_for_all()
        with self._lock:
            turns, self._turns = self._turns, []
            sample_s = self._post_steps(interval_s, turns)
        self._post_input(turns)
        self._post_words()
        self._post_exchange(interval_s)
        self._report(interval_s)
        spent_s = time.thread_time() - began_s
        self.drain_cpu_s += spent_s
        self.sampler.observe(interval_s=interval_s, cpu_s=spent_s, sample_cpu_s=sample_s)

    def _post_steps(self, interval_s: float, turns: list[Turn]) -> float:
        """Send what the watches have; return the processor time that sampled steps took, in seconds."""
        sample_s, items, lost = 0.0, [], 0
        num_watches = len(self._watches)
        for watch, got in [(watch, self._collect(watch)) for watch in list(self._watches)]:
            packed, packing_s = _pack(got.drafts)
            sample_s += got.sample_cpu_ns / 1e9 + packing_s
            items += packed + self._metrics(watch, watch.thinner.add(got.rows, interval_s=interval_s))
            turns += got.turns
            lost += got.lost
        self._post_events(items, lost, failed=len(self._watches) < num_watches)
        return sample_s

    def _post_events(self, items: list[Parcel], lost: int, *, failed: bool) -> None:
        """Send frames of watches, and what was counted with them. `failed`: a watch has failed meanwhile."""
        self._tally.passed += sum(item.rows for item in items if item.kind is Kind.OP_EVENTS)
        if failed:
            self._tally.fail()
        self._sender.post(items, lost_events=lost, counted={Kind.OP_EVENTS: self._tally.copy()})

    def _report(self, interval_s: float) -> None:
        """Have what was counted sent, at most each `REPORT_S`."""
        self._since_report_s += interval_s
        if self._since_report_s >= REPORT_S:
            self._since_report_s = 0.0
            self._sender.edit(Outbox.report)

    def _collect(self, watch: LiveWatch) -> Collected:
        try:
            got = watch.collect(time.time_ns(), partial(self._announce, threads=watch.threads))
            self._trains = self._trains or watch.collector.trains
            return got
        except Exception:  # noqa: BLE001 - a boundary: one source that fails must not end training, nor other watches
            _log.exception("the telemetry of %s failed and is switched off; training goes on", watch.name)
            watch.collector.give_up()
            self._detach(watch)
            return Collected()

    def _post_input(self, turns: list[Turn], *, is_last: bool = False) -> None:
        drafts: list[Draft] = []
        try:
            events = self._input.drain()
            self._inputs.overwritten(self._input.take_overwritten())
            step, now_ns = self._last_step(), time.time_ns()
            drafts = self._inputs.choose(events, turns, step=step, now_ns=now_ns)
            drafts += self._work.choose(step=step, now_ns=now_ns, in_full=self.sampler.in_full)
        except Exception:  # noqa: BLE001 - a boundary: a reader that fails must not end the other telemetry
            _log.exception("the work of data feed and parameter server is not shown any more; training goes on")
            self._input, self._inputs = InputTrace(), self._inputs.failed()
            self._work, drafts = WorkWatch(self._inputs.tally), []
        if is_last:
            self._inputs.end()
        items, tally = [pack(draft) for draft in drafts], self._inputs.tally
        tally.passed += sum(item.rows for item in items)
        if tally != self._counted_input:
            self._counted_input = tally.copy()
            self._sender.post(items, counted={Kind.INPUT_EVENTS: self._counted_input})

    def _post_words(self) -> None:
        words = [self._scalars.popleft() for _ in range(len(self._scalars))]
        progress, self._progress = self._progress, None
        items = [_spoken(Kind.SCALARS, body, body["time_ns"]) for body in words]
        if progress is not None:
            items.append(_spoken(Kind.PROGRESS, progress, time.time_ns()))
        if items:
            self._sender.post(item for item in items if item is not None)

    def _post_exchange(self, interval_s: float) -> None:
        try:
            item = self._exchange.due(
                interval_s, step=self._last_step(), now_ns=time.time_ns(), cpu_ns=time.process_time_ns(),
                lanes=self._work.lanes(),
            )  # fmt: skip
        except Exception:  # noqa: BLE001 - a boundary: counters that fail must not end the other telemetry
            _log.exception("the exchange with parameter servers is not shown any more; training goes on")
            self._exchange = ExchangeWatch()
            return
        if item is not None:
            self._sender.post([item])

    def _close_watch(self, watch: LiveWatch) -> None:
        """Drain a watch a last time. Called by the thread that closes it, or by the drain thread at the end."""
        with self._lock:
            if watch not in self._watches:
                return
            got = self._collect(watch)
            failed = watch not in self._watches
            items, _ = _pack(got.drafts + watch.collector.last_words(failed=self._outcome().failed))
            items += self._metrics(watch, watch.thinner.add(got.rows, interval_s=0.0))
            items += self._metrics(watch, watch.thinner.flush())
            self._post_events(items, got.lost, failed=failed)
            self._turns += got.turns  # what the data feed did for them follows with the next tick
            self._detach(watch)

    def _detach(self, watch: LiveWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
        watch.forget()

    def _metrics(self, watch: LiveWatch, rows: dict[Column, Array] | None) -> list[Parcel]:
        """Return the METRICS frame of `rows`. Beside training, evaluation has none: one series is one thing.

        Before anything has trained, the loss of evaluation is a series of its own.
        """
        if rows is None or (self._trains and not watch.collector.trains):
            return []
        time_ns, step, items = int(rows[Column.TIME_NS][-1]), int(rows[Column.STEP][-1]), []
        if watch.collector.evaluates:
            rows, evaluated = evaluation_apart(rows)
            body = {"step": step, "time_ns": time_ns, "values": evaluated}
            items = [message(Kind.SCALARS, body, t0_ns=time_ns)] if evaluated else []
        return [pack(Draft(Kind.METRICS, rows, time_ns, step)), *items]

    def _announce(self, graph: GraphHash, document: GraphDocument, *, threads: Threads | None) -> None:
        def announce(outbox: Outbox) -> None:
            if not outbox.knows(graph):
                outbox.announce(graph, document.model_dump(mode="json"), threads)

        try:
            self._sender.edit(announce)
        except ValueError as error:
            _log.warning("the graph of %s is not shown: %s", document.program, error)


def _pack(drafts: list[Draft]) -> tuple[list[Parcel], float]:
    """Encode; return also the processor time that the sampled steps took, in seconds."""
    samples_first = sorted(drafts, key=lambda draft: draft.kind is not Kind.OP_EVENTS)
    num_samples = sum(draft.kind is Kind.OP_EVENTS for draft in drafts)
    began_s = time.thread_time()
    items = [pack(draft) for draft in samples_first[:num_samples]]
    sampled_s = time.thread_time() - began_s
    return items + [pack(draft) for draft in samples_first[num_samples:]], sampled_s


def _spoken(kind: Kind, body: dict[str, Any], time_ns: int) -> Parcel | None:
    """Encode a script's report; one that cannot be sent is logged and costs nothing but itself."""
    try:
        return message(kind, body, t0_ns=time_ns)
    except (TypeError, ValueError) as error:
        _log.warning("a %s message is not sent: %s", kind.name, error)
        return None


def _identity(contract: Managed | Attached) -> ProcessIdentity:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return ProcessIdentity(
        contract.role,
        contract.index,
        socket.gethostname(),
        os.getpid(),
        None,
        program,
        __version__,
        secrets.token_hex(8),
    )
