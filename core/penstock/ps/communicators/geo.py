"""GEO: each trainer trains by itself, and exchanges its progress with the servers every N steps.

After N steps of a variable its delta, divided by the number of trainers, goes to the servers, and the others' progress
comes back. The exchange runs on a thread while the next step computes; the variable's next step takes in what came. Of
a sparse variable the union of the rows touched since the last exchange is sent, and the rows that others changed come
back. Steps that are left at the end are sent on `close`.

`parameter` is what the trainer trains; `old` the servers' value at the last exchange, plus the progress sent since.
Invariant: with one trainer old equals the servers' value to the bit, because both add the same deltas to the same
values in the same order; so taking over adds exact zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.ps.communicators.base import OverServers, Servers
from penstock.ps.counters import Counters, count_no_waits_here
from penstock.ps.remote import Descriptor
from penstock.ps.rows import Table, parts_of, unique
from penstock.ps.settings import CommunicatorSettings


def outgoing(parameter: Tensor, old: Tensor, num_trainers: int) -> Tensor:
    """Return this trainer's share of the progress since the last exchange, and count it as sent."""
    delta = (parameter - old).div_(num_trainers)
    old.add_(delta)
    return delta


def incoming(parameter: Tensor, old: Tensor, server: Tensor) -> None:
    """Take over what the others did: the servers' value is now `server`."""
    parameter.add_(server - old)
    old.copy_(server)


def outgoing_rows(parameter: Tensor, old: Tensor, rows: Tensor, num_trainers: int) -> Tensor:
    """`outgoing` of some rows, each once."""
    before = old[rows]
    delta = (parameter[rows] - before).div_(num_trainers)
    old[rows] = before.add_(delta)
    return delta


def incoming_rows(parameter: Tensor, old: Tensor, rows: Tensor, server: Tensor) -> None:
    """`incoming` of some rows, each once."""
    parameter.index_add_(0, rows, server - old[rows])
    old[rows] = server


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress to send: a delta for each block; `ids`: of its rows, ascending, if not of all."""

    deltas: list[Tensor]
    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Received:
    """What servers answered for one block: its value, or some rows (counted from its first) and theirs."""

    values: Tensor
    rows: Tensor | None = None


@dataclass(slots=True)
class _Variable:
    """`old`: see `outgoing`; `pending`: the exchange that is under way; `steps`: since the last exchange."""

    table: Table
    parameter: Tensor
    old: list[Tensor]
    steps: int = 0
    touched: list[Tensor] = field(default_factory=list)
    pending: Future[list[_Received]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def blocks(self) -> Sequence[Tensor]:
        """Return the views of the parameter that are its blocks."""
        whole = self.parameter.detach()
        return [whole] if len(self.table.blocks) == 1 else whole.split_with_sizes(list(self.table.heights))


class GeoCommunicator(OverServers):
    """A Remote for geo mode. The descriptor has the number of steps between exchanges (geo_sgd_need_push_nums)."""

    def __init__(
        self, servers: Servers, descriptor: Descriptor, settings: CommunicatorSettings, *, counters: Counters
    ) -> None:
        super().__init__(servers, descriptor, counters=counters)
        every = descriptor.push_every
        if every < 1:
            raise SpecError(f"GEO exchanges every {every} steps; expected a number from 1 on", got=every)
        self._lock = threading.Lock()
        self._variables: dict[str, _Variable] = {}
        self._began_with: dict[str, Tensor] = {}  # block -> what the startup program pulled
        self._pool = ThreadPoolExecutor(
            settings.thread_pool_size, thread_name_prefix="ps-geo", initializer=count_no_waits_here
        )

    # -- what the program calls ------------------------------------------------------------------

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull, and remember the values as those from which this trainer sets out.

        In the middle of a training too: what a startup program overwrites is no progress, and is not sent.
        """
        self._check()
        with self._lock:
            state = self._variables.get(variable)
        if state is not None:
            self._begin_again(state, out)
            return
        self.servers.recv(variable, blocks, at, out)
        with self._lock:
            self._began_with.update({name: value.clone() for name, value in zip(blocks, out, strict=True)})

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[Any]) -> None:
        """Push at once: what a program sends itself is not GEO's."""
        self._check()
        self.servers.send(variable, blocks, at, values)

    def send_rows(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], rows: Any, values: Any
    ) -> None:
        """Push at once: what a program sends itself is not GEO's."""
        self._check()
        self.servers.send_rows(variable, blocks, at, heights, rows, values)

    def geo(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], parameter: Any, rows: Any
    ) -> None:
        """Count a step; take in what came of the last exchange, and begin one if it is time."""
        self._check()
        state = self._variable(Table.of(variable, blocks, at, heights), parameter)
        with state.lock:
            state.parameter = parameter
            state.steps += 1
            if rows is not None:
                state.touched.append(rows.detach().cpu().reshape(-1).clone())
            self._take_in(state)
            if state.steps >= self.descriptor.push_every:
                state.pending = self._pool.submit(self._exchange, state.table, self._progress(state))

    def queue_depths(self) -> dict[str, int]:
        """Return the number of steps that were not sent yet, by variable."""
        with self._lock:
            return {name: state.steps for name, state in self._variables.items()}

    def close(self) -> None:
        """Send the steps that are left, leave the servers, end. Raises the first error."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            states = list(self._variables.values())
        try:
            for state in states:
                self._finish(state)
            self._pool.shutdown()
            self.servers.close()
        finally:
            self._failure.check_unless_raised()

    # -- exchange --------------------------------------------------------------------------------

    def _begin_again(self, state: _Variable, out: Sequence[Tensor]) -> None:
        table = state.table
        with state.lock:
            pending, state.pending = state.pending, None
            if pending is not None and pending.exception() is not None:
                self._failure.check()
            self.servers.recv(table.name, table.blocks, table.at, out)
            state.old, state.steps, state.touched = [value.clone() for value in out], 0, []

    def _variable(self, table: Table, parameter: Tensor) -> _Variable:
        with self._lock:
            found = self._variables.get(table.name)
            if found is not None:
                return found
            state = _Variable(table, parameter, [self._began_with.get(name, torch.empty(0)) for name in table.blocks])
            if not self._began_with.keys() >= set(table.blocks):
                # No startup program has pulled it: set out from what the servers have.
                state.old = [torch.empty(t.shape, dtype=t.dtype) for t in state.blocks()]
                self.servers.recv(table.name, table.blocks, table.at, state.old)
            for name in table.blocks:
                self._began_with.pop(name, None)
            self._variables[table.name] = state
            return state

    def _progress(self, state: _Variable) -> _Progress:
        """Return what the servers have not received, and count it as sent."""
        share = self.descriptor.num_trainers
        blocks = [(mine.cpu(), old) for mine, old in zip(state.blocks(), state.old, strict=True)]
        state.steps = 0
        if not state.touched:
            return _Progress([outgoing(mine, old, share) for mine, old in blocks])
        ids, _ = unique(torch.cat(state.touched))
        parts = parts_of(state.table, ids)
        state.touched = []
        deltas = [outgoing_rows(*b, p.rows, share) for b, p in zip(blocks, parts, strict=True)]
        return _Progress(deltas, ids)

    def _exchange(self, table: Table, progress: _Progress) -> list[_Received]:
        try:
            self._send_progress(table, progress)
            if progress.ids is not None:
                changed = [self.servers.changed(name, at) for name, at in zip(table.blocks, table.at, strict=True)]
                return [_Received(values, rows) for rows, values in changed]
            received = [torch.empty_like(delta) for delta in progress.deltas]
            self.servers.recv(table.name, table.blocks, table.at, received)
            return [_Received(values) for values in received]
        except Exception as error:
            self._failure.record(f"exchanging {table.name!r} with {self._where(table.at)}", error)
            raise

    def _send_progress(self, table: Table, progress: _Progress) -> None:
        if progress.ids is None:
            self.servers.send(table.name, table.blocks, table.at, progress.deltas)
        else:
            deltas = torch.cat(progress.deltas)
            self.servers.send_rows(table.name, table.blocks, table.at, table.heights, progress.ids, deltas)
        ids_bytes = 0 if progress.ids is None else progress.ids.nbytes
        self.counters.add("", table.name, calls=1, sent_bytes=ids_bytes + sum(d.nbytes for d in progress.deltas))

    def _take_in(self, state: _Variable) -> None:
        """Wait for the exchange under way, and add what the others did."""
        if state.pending is None:
            return
        pending, state.pending = state.pending, None
        with self.counters.waiting("", state.table.name):
            error = pending.exception()
        if error is not None:
            self._failure.check()
        for block, old, received in zip(state.blocks(), state.old, pending.result(), strict=True):
            mine = block.cpu()
            if received.rows is None:
                incoming(mine, old, received.values)
            else:
                incoming_rows(mine, old, received.rows, received.values)
            if mine.device != block.device:
                block.copy_(mine)

    def _finish(self, state: _Variable) -> None:
        with state.lock:
            pending = state.pending
            if pending is not None and pending.exception() is not None:
                return  # kept by the failure
            self._take_in(state)
            if state.steps and not self._failure.happened:
                try:
                    self._send_progress(state.table, self._progress(state))
                except Exception as error:  # noqa: BLE001  # raised by close, after the servers are left
                    where = self._where(state.table.at)
                    self._failure.record(f"sending {where} the last steps of {state.table.name!r}", error)
