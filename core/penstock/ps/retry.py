"""Retry of RPCs to parameter servers: back-off between attempts, and the pushes to replay after a reconnect.

A server that is started again knows the rounds that it has applied, and nothing of the open one: all of it is pushed
again, under the same keys. Only the barrier's answer ends a round, so only then its memory is used for the next.
No I/O, no clock, no sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.errors import PeerError, ProgramError
from penstock.ps.wire import MAX_TENSORS, WireTensor, to_wire

FIRST_S = 0.03
LARGEST_S = 1.0


def state_lost(endpoint: str, how_far: str) -> PeerError:
    """Return the error of a server that does not know any more what it has acknowledged. `how_far`: its state."""
    return PeerError(
        f"{endpoint} {how_far}: it was started again without its state. Give servers a PENSTOCK_PS_STATE_DIR that "
        "outlives them, or start the job again",
        endpoint=endpoint,
    )


def missed(number: int, first: int) -> str:
    """Describe what a trainer in round `number` may miss, of which the server waits for it from round `first` on.

    It had reached the barrier of its round, perhaps, and only the answer was lost.
    """
    if first <= number:
        return f", in round {number}"
    gone = f"round {number}" if first == number + 1 else f"rounds {number} to {first - 1}"
    return f": {gone} may have gone on without its gradients, and it takes part from round {first} on"


UNOPENED = 3  # attempts in a row that open no channel, after which the next waits for
CHANNELS_AGAIN_S = 30.0


class ChannelOpenings:
    """When channels to a server are opened: at the next call, every half minute once that has failed three times.

    After a refusal not before the next success: joining again counts as one, since it may be another server.
    """

    def __init__(self) -> None:
        self.succeeded()

    def succeeded(self) -> None:
        """Begin anew."""
        self._num_failed, self._due_at = 0, 0.0

    def failed(self, now_s: float, *, is_refused: bool) -> bool:
        """Note a failure. Returns whether steps do without channels for a while, which the user has to know."""
        self._num_failed += 1
        if is_refused:
            self._due_at = float("inf")
        elif self._num_failed >= UNOPENED:
            self._due_at = now_s + CHANNELS_AGAIN_S
        return self._due_at > now_s

    def is_due(self, now_s: float) -> bool:
        """Whether to try now."""
        return now_s >= self._due_at


class Acknowledged:
    """Pushes of one trainer to one server, by their numbers, which only grow. Thread-safe.

    A push of another thread may be acknowledged while a join is on its way: what the join's answer has to know of is
    `newest` as it was when it was sent.
    """

    def __init__(self, endpoint: str, *, natively: Callable[[], int]) -> None:
        self._endpoint, self._natively = endpoint, natively
        self._lock = threading.Lock()
        self._newest = 0

    @property
    def newest(self) -> int:
        """The largest number of a push that is acknowledged, also `natively`; 0: none is."""
        return max(self._newest, self._natively())

    def note(self, number: int) -> None:
        """The server has acknowledged this push."""
        with self._lock:
            self._newest = max(self._newest, number)

    def check(self, applied: int, newest: int) -> None:
        """Raise PeerError if a server that has applied pushes up to `applied` has acknowledged `newest`."""
        if applied < newest:
            raise state_lost(
                self._endpoint, f"has applied this trainer's pushes up to {applied}, but has acknowledged {newest}"
            )


Named = Sequence[tuple[str, torch.Tensor]]
Kept = tuple[WireTensor, ...]
_MANY = MAX_TENSORS // 4  # blocks, of up to two tensors, for one message


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for one tensor of a block, as it is copied into and as it is sent."""

    tensor: torch.Tensor
    wire: WireTensor


def _room_for(name: str, tensor: torch.Tensor) -> _Room:
    # Never empty: such an array has no stride, and torch then views it as nothing else.
    memory = np.empty(max(tensor.nbytes, 1), np.uint8)
    room = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return _Room(room, replace(to_wire(name, tensor), data=memory[: tensor.nbytes].data))


def _copies(kept: Kept) -> Kept:
    return tuple(replace(t, data=memoryview(bytes(t.data))) for t in kept)


class OpenRound:
    """The open round of one trainer at one server. Thread-safe.

    `natively`: the round that steps over a channel have reached. They are whole ones: none is open beside a push here.
    `tell`: has the next one know of a round that was reached here; threads may do it out of order.
    """

    def __init__(self, endpoint: str, *, natively: Callable[[], int], tell: Callable[[int], None]) -> None:
        self._endpoint, self._natively, self._tell = endpoint, natively, tell
        self._lock = threading.Lock()
        self._number = -1  # not joined
        self._first = 0  # of the rounds that the server waits for this trainer in
        self._pushed: dict[str, Kept] = {}
        self._waiting: dict[str, Kept] = {}  # of these, those that no message has brought yet
        self._num_bytes = 0  # of those that wait
        self._rooms: dict[tuple[str, str], _Room] = {}

    @property
    def number(self) -> int:
        """The round that is pushed to."""
        return max(self._reached(), 0)

    def _reached(self) -> int:
        if not self._pushed and self._number >= 0:
            self._number = max(self._number, self._natively())
        return self._number

    def joined(self, first: int) -> None:
        """The server has (again) admitted this trainer, and waits for it from round `first` on.

        Raises PeerError if it is behind: what it had acknowledged is lost.
        """
        with self._lock:
            if first < self._reached():
                how_far = f"is at round {first}, but has acknowledged all before round {self._number}"
                raise state_lost(self._endpoint, how_far)
            self._first = first
            if self._number < 0:
                self._number = first

    def to_read(self) -> int:
        """Return the round whose beginning a read has to see.

        A trainer that was disconnected continues with the round that waits for it. In the middle of a step it stays in
        its old round, whose pushes are acknowledged and left out, since the server takes them for repetitions.
        """
        with self._lock:
            if not self._pushed:
                self._number = max(self._reached(), self._first)
                self._tell(self._number)
            return self._number

    def catch_up(self, open_round: int) -> None:
        """Others have gone on to this round while this trainer, between two steps, took no part."""
        with self._lock:
            if not self._pushed:
                self._number = max(self._reached(), open_round)
                self._tell(self._number)

    def keep(self, block: str, tensors: Named, *, owned: bool, waits: bool = False) -> tuple[int, Kept]:
        """Return (round, tensors) to push, of contiguous ones. `owned`: their memory does not change; else copied.

        `waits`: it is to be pushed together with others. Raises ProgramError for a second gradient of a block.
        """
        with self._lock:
            self._reached()
            if block in self._pushed:
                raise ProgramError(
                    f"block {block!r} was pushed already in round {self._number}, which no barrier has ended yet: was "
                    "a step repeated that failed between its send and its send_barrier?",
                    variable=block,
                )
            kept = tuple(to_wire(n, t) if owned else self._copied(block, n, t) for n, t in tensors)
            self._pushed[block] = kept
            if waits:
                self._waiting[block] = kept
                self._num_bytes += sum(len(t.data) for t in kept)
            return self._number, kept

    def _copied(self, block: str, name: str, tensor: torch.Tensor) -> WireTensor:
        room = self._rooms.get((block, name))
        if room is None or room.tensor.shape != tensor.shape or room.tensor.dtype != tensor.dtype:
            room = self._rooms[block, name] = _room_for(name, tensor)
        room.tensor.copy_(tensor)
        return room.wire

    def copy(self) -> None:
        """Copy what was pushed, since its memory may change from now on."""
        with self._lock:
            self._pushed = {block: _copies(kept) for block, kept in self._pushed.items()}
            self._waiting = {block: self._pushed[block] for block in self._waiting}

    def waiting(self) -> tuple[int, list[tuple[str, Kept]]]:
        """Return (round, what waits to be pushed to it)."""
        with self._lock:
            return self._reached(), list(self._waiting.items())

    def too_much(self, limit: int) -> list[tuple[str, Kept]]:
        """Return what waits if that is more than `limit` bytes, or many blocks: it waits no more."""
        with self._lock:
            if self._num_bytes <= limit and len(self._waiting) < _MANY:
                return []
            found = list(self._waiting.items())
            self._waiting.clear()
            self._num_bytes = 0
            return found

    def pushes(self) -> tuple[int, list[tuple[str, Kept]]]:
        """Return (round, what was pushed to it so far)."""
        with self._lock:
            return self._number, list(self._pushed.items())

    def applied(self, open_round: int) -> None:
        """The barrier was answered: the server now has `open_round` open."""
        with self._lock:
            self._pushed.clear()
            self._waiting.clear()
            self._num_bytes = 0
            self._number = max(open_round, self._first, self._number)
            self._tell(self._number)
