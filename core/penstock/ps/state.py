"""State that the threads of a parameter server share: settings, storage and its locks, log, payloads, counters.

A payload is the bytes of a push, between the request that brings it and the update that uses it. A request's tensors
are valid only while its handler runs. In sync mode that is over long before the round is applied: they are copied, into
buffers that are used again, so that a step allocates nothing once the first ones have run. In the other modes, and with
a `step`, the handler waits for the update, which reads them where they are.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from penstock.errors import SpecError
from penstock.ps.counters import Counters
from penstock.ps.durability.wal import AppliedIndex, WriteAheadLog
from penstock.ps.rounds.messages import Payload
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import BlockLocks, Gradient, Storage, describe
from penstock.ps.wire import MAX_TENSORS


class BufferPool:
    """Buffers of whole powers of two bytes; freed ones are kept. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_made = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes."""
        size = 1 << max(6, (num_bytes - 1).bit_length())
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self.num_made += 1
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let a buffer be used again."""
        with self._lock:
            self._free[len(buffer)].append(buffer)


@dataclass(slots=True)
class HeldPush:
    """One push. `buffers`: what its gradient lies in, if it was copied."""

    gradient: Gradient
    buffers: list[torch.Tensor] = field(default_factory=list)


class Payloads:
    """Pushes by number. Thread-safe."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self._held: dict[Payload, HeldPush] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, gradient: Gradient, *, copied: bool) -> Payload:
        """Keep a push; return its number. `copied`: its bytes are gone when the request is answered."""
        held = self._copy(gradient) if copied else HeldPush(gradient)
        number = next(self._numbers)
        self._held[number] = held
        return number

    def _copy(self, gradient: Gradient) -> HeldPush:
        held = HeldPush(gradient)
        values, rows = (self._copied(t, held) for t in (gradient.values, gradient.rows))
        held.gradient = Gradient(values, rows, gradient.trainer)
        return held

    def _copied(self, tensor: torch.Tensor | None, held: HeldPush) -> torch.Tensor | None:
        if tensor is None:
            return None
        buffer = self.pool.take(tensor.nbytes)
        held.buffers.append(buffer)
        return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def gradient(self, number: Payload) -> Gradient:
        """Return a push that is held."""
        return self._held[number].gradient

    def release(self, number: Payload) -> None:
        """Forget a push; its buffers are used again."""
        for buffer in self._held.pop(number).buffers:
            self.pool.give_back(buffer)


class ServerState:
    """What the parts of one server share, built once. Recovery restores `storage` and `applied`.

    `log`: counts only, until recovery has read the one before. `goes_on`: whether the values are
    from a state of its own, in which no checkpoint is named.
    """

    def __init__(self, settings: ServerSettings, storage: Storage) -> None:
        self.settings, self.storage = settings, storage
        self.specs = describe(storage)
        if settings.state_dir is not None and 2 * len(self.specs) > MAX_TENSORS:
            raise SpecError(f"a server that keeps a log has at most {MAX_TENSORS // 2} blocks, not {len(self.specs)}")
        self.locks = BlockLocks(list(self.specs))
        self.payloads, self.counters = Payloads(), Counters()
        self.applied = AppliedIndex(trainers=settings.fanin, keeps_changes=settings.mode == "geo")
        self.log = WriteAheadLog(None)
        self.goes_on = False
