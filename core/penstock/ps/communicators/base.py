"""Base of the communicators: merging of gradients, the servers behind them, errors of background threads.

Sum is right for SGD, whose update is linear in the gradient; average keeps the size of a gradient for other optimizers
(communicator_is_sgd_optimizer).
Invariant: the first error of a background thread ends the exchange, and every later call raises it, with what was
being done, of which variable, with which endpoints. Nothing is swallowed, nothing waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import Bug, PeerError, PenstockError, Unavailable
from penstock.ps.counters import Counters
from penstock.ps.remote import Descriptor, GeoCall, SendCall, StepRemote
from penstock.ps.rows import summed


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """Of one variable, in one step: a tensor for each block, or with `rows` int64[n] one of their values [n, d].

    Rows are any int64 and may repeat.
    """

    values: tuple[Tensor, ...]
    rows: Tensor | None = None

    def copy(self) -> LocalGradient:
        """Return a gradient with memory of its own."""
        return LocalGradient(tuple(v.clone() for v in self.values), None if self.rows is None else self.rows.clone())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        rows = 0 if self.rows is None else self.rows.nbytes
        return rows + sum(v.nbytes for v in self.values)


def merge(gradients: Sequence[LocalGradient], *, average: bool) -> LocalGradient:
    """Return the sum or the average of gradients of one variable; rows come out ascending, each once.

    Summed in the given order; the average is over the gradients, whichever rows each of them has. Memory of the first
    may be reused. Raises PeerError if they do not fit together.
    """
    sparse = {g.rows is not None for g in gradients}
    widths = {tuple(tuple(v.shape[1:] if g.rows is not None else v.shape) for v in g.values) for g in gradients}
    if len(sparse) != 1 or len(widths) != 1:
        raise PeerError(f"gradients of one variable that do not fit together cannot be merged: {sorted(widths)}")
    divisor = len(gradients) if average else 1
    return _merge_rows(gradients, divisor) if sparse == {True} else _merge_dense(gradients, divisor)


def _merge_dense(gradients: Sequence[LocalGradient], divisor: int) -> LocalGradient:
    merged = gradients[0].values
    for other in gradients[1:]:
        for mine, more in zip(merged, other.values, strict=True):
            mine.add_(more)
    if divisor > 1:
        for mine in merged:
            mine.div_(divisor)
    return LocalGradient(merged)


def _merge_rows(gradients: Sequence[LocalGradient], divisor: int) -> LocalGradient:
    rows, values = summed(
        torch.cat([g.rows for g in gradients if g.rows is not None]), torch.cat([g.values[0] for g in gradients])
    )
    return LocalGradient((values.div_(divisor) if divisor > 1 else values,), rows)


class Servers(StepRemote, Protocol):
    """Parameter servers that answer each call before it returns: what a communicator stands on."""

    def serve_operators(self, num_threads: int = 1) -> None:
        """Let operators of the program reach the servers without Python, from now on.

        `num_threads`: how many train in step, from now on: their steps are pushed together, once those that wait have
        been.
        """

    def leave_threads(self) -> None:
        """The calling thread is none of those that train in step any more."""

    def leave_threads_for(self, thread: int) -> None:
        """As if the thread with this native identifier called `leave_threads`. It has ended."""

    def fail_threads(self) -> None:
        """The exchange has failed: threads that wait for each other do not any more, and raise."""

    def end_threads(self) -> None:
        """No threads train in step any more. Returns when what they have brought is pushed."""

    @property
    def num_pushed_together(self) -> int:
        """How many steps of several threads operators have pushed."""

    def waiting_threads(self) -> Mapping[str, int]:
        """Return how many gradients operators hold that wait for those of other threads, by the names of blocks."""

    def withdraw_operators(self) -> None:
        """Let operators call Python again, from now on."""

    def changed(self, block: str, at: int) -> tuple[Tensor, Tensor]:
        """GEO: return the rows of a block that others changed since the last call, int64[n], and their values now."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where the blocks of a variable are. `heights`: None for a dense one; see ps.remote.Remote."""

    variable: str
    blocks: tuple[str, ...]
    at: tuple[int, ...]
    heights: tuple[int, ...] | None = None


class Failure:
    """The first error of the background threads of one communicator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, BaseException] | None = None
        self._was_raised = False

    def record(self, doing: str, error: BaseException) -> None:
        """Keep an error, if it is the first one."""
        with self._lock:
            if self._first is None:
                self._first = (doing, error)

    @property
    def happened(self) -> bool:
        """Whether there was one."""
        return self._first is not None

    def check(self) -> None:
        """Raise the error, as a new exception that names what was being done."""
        with self._lock:
            if self._first is None:
                return
            self._was_raised = True
            doing, error = self._first
        text = f"{doing} failed in the background: {error}"
        if isinstance(error, PenstockError):
            raise type(error)(text, **error.fields) from error
        raise Bug(f"{text} ({type(error).__name__})") from error

    def check_unless_raised(self) -> None:
        """Raise the error if no call has raised it yet."""
        if not self._was_raised:
            self.check()


class OverServers:
    """Base of the communicators: sends each gradient to the servers as it comes."""

    def __init__(self, servers: Servers, descriptor: Descriptor, *, counters: Counters) -> None:
        self.servers, self.descriptor = servers, descriptor
        # Rows of peer '': what this trainer did before anything went to a server.
        self.counters = counters
        self._failure = Failure()
        self._is_closed = False

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Any, out: Any
    ) -> None:
        """Pull rows: the step waits for them, so nothing is gained by a thread."""
        self._check()
        self.servers.prefetch(table, blocks, at, heights, ids, out)

    def send_barrier(self) -> None:
        """Do nothing: there is no barrier in this mode."""
        self._check()

    def fetch_barrier(self) -> None:
        """Do nothing: there is no barrier in this mode."""
        self._check()

    def geo(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], parameter: Any, rows: Any
    ) -> None:
        """Refuse: only GEO's communicator knows what to do."""
        raise Bug(f"the geo operator of {variable!r} ran in a program of {self.descriptor.mode} mode")

    def geo_step(self, calls: Sequence[GeoCall]) -> None:
        """Refuse, as `geo`."""
        for call in calls:
            self.geo(call.variable, call.blocks, call.at, call.heights, call.parameter, None)

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[Any]) -> None:
        """Queue a copy of the gradient of each block."""
        self._queue(Location(variable, tuple(blocks), tuple(at)), LocalGradient(tuple(values)))

    def send_rows(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], rows: Any, values: Any
    ) -> None:
        """Queue a copy of a sparse gradient."""
        self._queue(Location(variable, tuple(blocks), tuple(at), tuple(heights)), LocalGradient((values,), rows))

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        """Queue copies of all gradients of a step."""
        for push in pushes:
            if push.rows is None:
                self.send(push.variable, push.blocks, push.at, push.values)
            else:
                self.send_rows(push.variable, push.blocks, push.at, push.heights, push.rows, push.values[0])

    def recv_step(self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull each variable."""
        of_variable: dict[str, list[int]] = {}
        for i, variable in enumerate(variables):
            of_variable.setdefault(variable, []).append(i)
        for variable, own in of_variable.items():
            self.recv(variable, [blocks[i] for i in own], [at[i] for i in own], [out[i] for i in own])

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull each block into `out[i]`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send what waits; return when the servers have it. Between two steps of this process; the exchange goes on.

        Raises the background's error.
        """
        raise NotImplementedError

    def _queue(self, target: Location, gradient: LocalGradient) -> None:
        raise NotImplementedError

    def _push(self, target: Location, gradients: Sequence[LocalGradient], *, average: bool) -> None:
        """Send gradients of one variable as one."""
        to, merged = target, merge(gradients, average=average)
        if to.heights is None:
            self.servers.send(to.variable, to.blocks, to.at, merged.values)
        else:
            self.servers.send_rows(to.variable, to.blocks, to.at, to.heights, merged.rows, merged.values[0])
        self.counters.add("", to.variable, sent_bytes=merged.num_bytes, merges=len(gradients) - 1)

    def _check(self) -> None:
        self._failure.check()
        if self._is_closed:
            raise Unavailable("the communicator is stopped")

    def _where(self, at: Sequence[int]) -> str:
        """Return the endpoints of a variable, for an error message."""
        known = self.descriptor.endpoints
        return ", ".join(dict.fromkeys(known[i] if i < len(known) else f"server {i}" for i in at))
