"""Asynchronous training: training threads fill queues; background threads merge, push, and pull the parameters.

send threads     communicator_thread_pool_size of them: take what is due (queues.SendQueues), merge it, push it
recv thread      pulls all parameters when enough was sent (queues.PullTrigger), as many at once as there are send
                 threads; without it (communicator_independent_recv_thread = 0) each push is followed by a pull
destinations     pulled parameters are written in place while steps run. That is Hogwild, on purpose: a step sees some
                 elements before the update and some after it; each element is written whole
stop             everything that waits is sent before the trainer leaves its servers
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import StorageWeakRef, storage_behind
from penstock.ps.communicators.base import LocalGradient, Location, OverServers, Servers
from penstock.ps.communicators.queues import PullTrigger, SendQueues
from penstock.ps.counters import Counters, count_no_waits_here
from penstock.ps.remote import Descriptor
from penstock.ps.settings import CommunicatorSettings

_Address = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """One tensor, by what it is a view of."""

    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _View:
        """Remember a tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has not typed it
        return _View(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if its memory is gone."""
        storage = storage_behind(self.storage)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Destinations:
    """The places to which each variable is pulled: those of several replicas or scopes. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Location, dict[_Address, list[_View]]]] = {}

    def knows(self, variable: str, out: Sequence[Tensor]) -> bool:
        """Whether `out` is a place of the variable. Another tensor at the same address is not."""
        _, places = self._places.get(variable, (None, {}))
        return _alive(places.get(_address(out), [])) is not None

    def add(self, target: Location, out: Sequence[Tensor]) -> None:
        """Make `out` a place of the variable."""
        views = [_View.of(tensor) for tensor in out]
        self._places.setdefault(target.variable, (target, {}))[1][_address(out)] = views

    def targets(self) -> list[Location]:
        """Return the variables that have places."""
        return [target for target, _ in self._places.values()]

    def of(self, variable: str) -> list[list[Tensor]]:
        """Return the places of a variable that are still there, and forget the others."""
        _, places = self._places.get(variable, (None, {}))
        found = []
        for address, views in list(places.items()):
            tensors = _alive(views)
            if tensors is None:
                del places[address]
            else:
                found.append(tensors)
        return found


def _alive(views: list[_View]) -> list[Tensor] | None:
    tensors = [t for t in (v.tensor() for v in views) if t is not None]
    return tensors if views and len(tensors) == len(views) else None


def _address(out: Sequence[Tensor]) -> _Address:
    return tuple(t.data_ptr() for t in out)


_Item = tuple[Location, LocalGradient]


class AsyncCommunicator(OverServers):
    """A Remote for async mode. Its threads live from here until `close`."""

    def __init__(
        self, servers: Servers, descriptor: Descriptor, settings: CommunicatorSettings, *, counters: Counters
    ) -> None:
        super().__init__(servers, descriptor, counters=counters)
        self.settings = settings
        self._lock = threading.Lock()
        self._room, self._work, self._pull = (threading.Condition(self._lock) for _ in range(3))
        self._queues: SendQueues[_Item] = SendQueues(
            capacity=settings.send_queue_size, max_merge=settings.max_merge_var_num, merge_wait_s=settings.merge_wait_s
        )
        self._trigger = PullTrigger(min_sends=settings.min_send_grad_num_before_recv)
        self._destinations = Destinations()
        self._stops_pulling = False
        self._senders = [
            threading.Thread(target=self._send_all, name=f"ps-send-{i}", daemon=True)
            for i in range(settings.thread_pool_size)
        ]
        self._receiver = threading.Thread(target=self._pull_all, name="ps-recv", daemon=True)
        for thread in (*self._senders, *([self._receiver] if settings.independent_recv_thread else [])):
            thread.start()

    # -- what the program calls ------------------------------------------------------------------

    def _queue(self, target: Location, gradient: LocalGradient) -> None:
        """Wait only while the variable's queue is full."""
        copy = gradient.copy()
        with self.counters.waiting("", target.variable), self._lock:
            self._check()
            while not self._queues.offer(target.variable, (target, copy), time.monotonic()):
                self._room.wait()
                self._check()
            self._work.notify_all()
        self.counters.add("", target.variable, calls=1)

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull now if `out` is new, and let the recv thread pull into it from then on."""
        with self._lock:
            self._check()
            if self._destinations.knows(variable, out):
                return
        self.servers.recv(variable, blocks, at, out)
        with self._lock:
            self._destinations.add(Location(variable, tuple(blocks), tuple(at)), out)

    def queue_depths(self) -> dict[str, int]:
        """Return the number of gradients that wait, by variable."""
        with self._lock:
            return self._queues.depths()

    def flush(self) -> None:
        """Send what waits; return when the servers have it. Raises the background's error."""
        with self._lock:
            self._check()
            self._queues.flush()
            self._work.notify_all()
            self._work.wait_for(lambda: self._queues.is_sent or self._failure.happened)
            self._queues.flush(ends=not self._is_closed)
        self._failure.check()

    def close(self) -> None:
        """Send what waits, leave the servers, end. Raises the background's error if no call has raised it yet.

        A call that waits for room in a queue ends with Unavailable.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._queues.flush()
            for condition in (self._work, self._room):
                condition.notify_all()
        for thread in self._senders:
            thread.join()
        with self._lock:
            self._stops_pulling = True
            self._pull.notify_all()
        if self.settings.independent_recv_thread:
            self._receiver.join()
        try:
            self.servers.close()
        finally:
            self._failure.check_unless_raised()

    # -- send threads ----------------------------------------------------------------------------

    def _send_all(self) -> None:
        count_no_waits_here()
        while (taken := self._take()) is not None:
            target, gradients = taken[0][0], [gradient for _, gradient in taken]
            try:
                self._send(target, gradients)
            except Exception as error:  # noqa: BLE001  # raised by the training thread's next call
                self._fail(f"sending the gradient {target.variable!r} to {self._where(target.at)}", error)
                return
            with self._lock:
                self._queues.done(target.variable)
                self._trigger.sent(target.variable, len(gradients))
                self._work.notify_all()
                if self._trigger.is_due:
                    self._pull.notify_all()

    def _take(self) -> list[_Item] | None:
        """Wait for gradients that are due; None when there will be none any more."""
        with self._lock:
            while not self._failure.happened:
                now = time.monotonic()
                taken = self._queues.take(now)
                if taken is not None:
                    self._room.notify_all()
                    return taken[1]
                if self._is_closed and self._queues.is_empty:
                    return None
                due_at = self._queues.due_at()
                self._work.wait(None if due_at == math.inf else max(0.0, due_at - now))
            return None

    def _send(self, target: Location, gradients: Sequence[LocalGradient]) -> None:
        self._push(target, gradients, average=not self.settings.is_sgd_optimizer)
        if not self.settings.independent_recv_thread and target.heights is None:
            with self._lock:
                pulled = [r for r in self._destinations.targets() if r.blocks == target.blocks]
            for destination in pulled:
                self._pull_one(destination)

    def _fail(self, doing: str, error: BaseException) -> None:
        self._failure.record(doing, error)
        with self._lock:
            for condition in (self._room, self._work, self._pull):
                condition.notify_all()

    # -- recv thread -----------------------------------------------------------------------------

    def _pull_all(self) -> None:
        num = self.settings.thread_pool_size
        with ThreadPoolExecutor(num, thread_name_prefix="ps-pull", initializer=count_no_waits_here) as pool:
            while (targets := self._next_pull()) is not None:
                for target, future in [(r, pool.submit(self._pull_one, r)) for r in targets]:
                    error = future.exception()
                    if error is not None:
                        self._fail(f"pulling the parameter {target.variable!r} from {self._where(target.at)}", error)

    def _next_pull(self) -> list[Location] | None:
        with self._lock:
            while not (self._stops_pulling or self._failure.happened):
                if self._trigger.is_due:
                    self._trigger.pulled()
                    return self._destinations.targets()
                self._pull.wait()
            return None

    def _pull_one(self, target: Location) -> None:
        """Pull a variable into one of its places, and copy it to the others."""
        with self._lock:
            places = self._destinations.of(target.variable)
        if not places:
            return
        self.servers.recv(target.variable, target.blocks, target.at, places[0])
        for others in places[1:]:
            for theirs, pulled in zip(others, places[0], strict=True):
                theirs.copy_(pulled)
