"""GEO: each trainer trains by itself, and exchanges its progress with the servers every N steps.

After N steps of a variable its delta, divided by the number of trainers, goes to the servers, and the others' progress
comes back. The exchange runs on a thread while the next steps compute; the first step of the variable that finds it
ended, at the latest the one that begins the next exchange, takes in what came. Of a sparse variable the union of the
rows touched since the last exchange is sent, and the rows that others changed come back. Steps that are left at the end
are sent on `close`. Between exchanges operators count steps and touched rows without Python (`native/src/ps/geo.h`).

`parameter` is what the trainer trains; `old` the servers' value at the last exchange, plus the progress sent since.
Invariant: with one trainer old equals the servers' value to the bit, because both add the same deltas to the same
values in the same order; so taking over adds exact zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerError, SpecError
from penstock.native.channels import LocalSteps, close_local_steps, incoming, open_local_steps, outgoing
from penstock.ps.communicators.base import OverServers, Servers
from penstock.ps.counters import Counters, count_no_waits_here
from penstock.ps.remote import Descriptor, GeoCall, SendCall
from penstock.ps.rows import Table, are_within, check_rows
from penstock.ps.settings import CommunicatorSettings


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of one variable to send: a delta [h, ...], or [n, ...] of the rows `ids` int64[n], ascending."""

    table: Table
    delta: Tensor
    ids: Tensor | None

    def push(self) -> SendCall:
        """Return it as a push."""
        table = self.table
        if self.ids is None:
            return SendCall(table.name, table.blocks, table.at, _cut(table, self.delta))
        return SendCall(table.name, table.blocks, table.at, [self.delta], table.heights, self.ids)


@dataclass(frozen=True, slots=True)
class _Received:
    """What servers answered for one variable: its value, or some rows and theirs."""

    values: Tensor
    rows: Tensor | None = None


@dataclass(slots=True)
class _Variable:
    """`old`: see the module; `pending`: the exchange that is under way, by variable."""

    table: Table
    old: Tensor
    pending: Future[Mapping[str, _Received]] | None = None


def _cut(table: Table, whole: Tensor) -> list[Tensor]:
    """Return the views of a variable that are its blocks."""
    return [whole] if len(table.blocks) == 1 else list(whole.split_with_sizes(list(table.heights)))


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
        self._stepping = threading.Lock()  # of the steps that Python makes
        self._variables: dict[str, _Variable] = {}
        self._began_with: dict[str, Tensor] = {}  # block -> what the startup program pulled
        self._pool = ThreadPoolExecutor(
            settings.thread_pool_size, thread_name_prefix="ps-geo", initializer=count_no_waits_here
        )
        self._local = LocalSteps(every)
        open_local_steps(str(descriptor), self._local)

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
        """`geo_step` of one parameter; `rows` int64 of any shape."""
        self.geo_step([GeoCall(variable, blocks, at, heights, parameter, None if rows is None else [rows])])

    def geo_step(self, calls: Sequence[GeoCall]) -> None:
        """Count a step of each; take in what came of the last exchange, and begin one of those for which it is time."""
        self._check()
        with self._stepping:
            states = [self._count(call) for call in calls]
            due = [s for s in states if self._local.steps(s.table.name) >= self.descriptor.push_every]
            for state in states:
                if state.pending is not None and (state.pending.done() or state in due):
                    self._take_in(state)
            if due:
                self._begin_exchange(due)

    def queue_depths(self) -> dict[str, int]:
        """Return the number of steps that were not sent yet, by variable."""
        with self._lock:
            return {name: self._local.steps(name) for name in self._variables}

    def flush(self) -> None:
        """Send the steps since the last exchange; return when the servers have them. Raises the first error."""
        with self._lock:
            self._check()
            states = list(self._variables.values())
        for state in states:
            self._finish(state)
        self._failure.check()

    def close(self) -> None:
        """Send the steps that are left, leave the servers, end. Raises the first error."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            states = list(self._variables.values())
        close_local_steps(str(self.descriptor), self._local)
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
        with self._stepping:
            pending, state.pending = state.pending, None
            if pending is not None and pending.exception() is not None:
                self._failure.check()
            self.servers.recv(table.name, table.blocks, table.at, out)
            for old, value in zip(_cut(table, state.old), out, strict=True):
                old.copy_(value)
            self._local.take(table.name)

    def _count(self, call: GeoCall) -> _Variable:
        state = self._variable(call)
        rows = [r.detach().cpu().contiguous() for r in call.rows or ()]
        for ids in rows:
            check_rows(state.table, ids)
        self._local.set_news(call.variable, False)
        self._local.count(call.variable, call.parameter, rows)
        return state

    def _variable(self, call: GeoCall) -> _Variable:
        with self._lock:
            found = self._variables.get(call.variable)
            if found is not None:
                return found
            table = Table.of(call.variable, call.blocks, call.at, call.heights)
            began_with = [self._began_with.pop(name) for name in table.blocks if name in self._began_with]
            old = torch.empty(call.parameter.shape, dtype=call.parameter.dtype)
            if len(began_with) == len(table.blocks):
                for block, value in zip(_cut(table, old), began_with, strict=True):
                    block.copy_(value)
            else:  # no startup program has pulled it: set out from what the servers have
                self.servers.recv(table.name, table.blocks, table.at, _cut(table, old))
            self._local.add(table.name, None if call.rows is None else len(old))
            self._variables[table.name] = _Variable(table, old)
            return self._variables[table.name]

    def _parameter(self, state: _Variable) -> tuple[Tensor, Tensor]:
        """Return the parameter, and it on the CPU."""
        parameter = self._local.parameter(state.table.name).detach()
        return parameter, parameter.cpu().contiguous()

    def _progress(self, state: _Variable) -> _Progress:
        """Return what the servers have not received, and count it as sent."""
        ids = self._local.take(state.table.name)
        _, mine = self._parameter(state)
        return _Progress(state.table, outgoing(mine, state.old, ids, self.descriptor.num_trainers), ids)

    def _begin_exchange(self, states: Sequence[_Variable]) -> None:
        pending = self._pool.submit(self._exchange, [self._progress(state) for state in states])
        names = [state.table.name for state in states]
        for state in states:
            state.pending = pending
        pending.add_done_callback(lambda _: self._notify(names))

    def _notify(self, variables: Sequence[str]) -> None:
        """See to it that the next step of each comes to Python."""
        for name in variables:
            self._local.set_news(name, True)

    def _exchange(self, progress: Sequence[_Progress]) -> Mapping[str, _Received]:
        try:
            self._send(progress)
            dense = {p.table.name: (p.table, torch.empty_like(p.delta)) for p in progress if p.ids is None}
            received = {p.table.name: self._changed(p) for p in progress if p.ids is not None}
            if dense:
                blocks = [b for table, value in dense.values() for b in _cut(table, value)]
                tables = [table for table, _ in dense.values()]
                self.servers.recv_step(
                    [t.name for t in tables for _ in t.blocks],
                    [b for t in tables for b in t.blocks],
                    [at for t in tables for at in t.at],
                    blocks,
                )
            return received | {name: _Received(value) for name, (_, value) in dense.items()}
        except Exception as error:
            names = ", ".join(repr(p.table.name) for p in progress)
            where = self._where([at for p in progress for at in p.table.at])
            self._failure.record(f"exchanging {names} with {where}", error)
            raise

    def _send(self, progress: Sequence[_Progress]) -> None:
        self.servers.send_step([p.push() for p in progress])
        for p in progress:
            ids_bytes = 0 if p.ids is None else p.ids.nbytes
            self.counters.add("", p.table.name, calls=1, sent_bytes=ids_bytes + p.delta.nbytes)

    def _changed(self, progress: _Progress) -> _Received:
        """Ask for the rows that others changed."""
        table, first = progress.table, 0
        rows: list[Tensor] = []
        values: list[Tensor] = []
        for name, at, height in zip(table.blocks, table.at, table.heights, strict=True):
            of_block, now = self.servers.changed(name, at)
            if not are_within(of_block, height):
                raise PeerError(f"a server answers rows of {name!r} that it does not have", variable=table.name)
            rows.append(of_block + first)
            values.append(now)
            first += height
        return _Received(torch.cat(values), torch.cat(rows))

    def _take_in(self, state: _Variable) -> None:
        """Wait for the exchange under way, and add what the others did."""
        if state.pending is None:
            return
        pending, state.pending = state.pending, None
        with self.counters.waiting("", state.table.name):
            error = pending.exception()
        if error is not None:
            self._failure.check()
        received = pending.result()[state.table.name]
        if received.rows is not None and not len(received.rows):
            return
        parameter, mine = self._parameter(state)
        incoming(mine, state.old, received.rows, received.values)
        if mine is not parameter:
            parameter.copy_(mine)

    def _finish(self, state: _Variable) -> None:
        with self._stepping:
            pending = state.pending
            if pending is not None and pending.exception() is not None:
                return  # kept by the failure
            self._take_in(state)
            if self._local.steps(state.table.name) and not self._failure.happened:
                try:
                    self._send([self._progress(state)])
                except Exception as error:  # noqa: BLE001  # raised by close, after the servers are left
                    where = self._where(state.table.at)
                    self._failure.record(f"sending {where} the last steps of {state.table.name!r}", error)
