"""`global_shuffle`: rows of an InMemoryDataset exchanged between the trainers of a job.

Each trainer shuffles its rows and deals them out, so that all trainers have equally many afterwards (or one more), and
shuffles what it has got. Rows go from trainer to trainer over connections of their own, of which each begins with a
number that only the job knows. The result is a function of the seed and of what each trainer had, whatever the order in
which rows arrive. A trainer keeps its old rows until it knows that all have theirs: an exchange succeeds for all or
fails for all, unless one is lost in the very end.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.dataset.peers import Peers, own_address
from penstock.dataset.slots import Slot
from penstock.errors import PeerError, SpecError, Unavailable
from penstock.native import _feed

SILENCE_S = 300.0  # of a trainer, in the middle of an exchange
_GREETING_S = 10.0
_LOOK_S = 0.5
_HELLO = struct.Struct("<qQ")  # the receiver's number, the sender's rank
_MOST_BYTES = 1 << 34  # of a message; its sizes come from the other side
_GOLDEN = 0x9E3779B97F4A7C15


def exchanged(
    store: _feed.Store,
    slots: Sequence[Slot],
    peers: Peers,
    seed: int | None,
    *,
    shuffle: Callable[[int], None],
    rows_a_message: int,
) -> tuple[_feed.Store, int]:
    """Return this trainer's new rows, and the seed that was used: rank 0's if none was given. All trainers call it.

    `shuffle` puts the rows of `store` in another order, by a seed. Raises SpecError if trainers have other slots or
    seeds, Unavailable naming a trainer that is lost or silent; then `store` holds what it held.
    """
    with socket.create_server((own_address(peers.towards()), 0), backlog=peers.num) as server:
        announced = _Announced.gathered(server, store, slots, peers, seed)
        shuffle(_mixed(announced.seed, peers.rank))
        exchange = _Exchange(store, slots, peers, announced, rows_a_message)
        error: Exception | None = None
        try:
            exchange.run(server)
        except (OSError, PeerError, Unavailable, ValueError) as failed:
            error = failed
        _all_have_theirs(peers, error)
        return exchange.received(_mixed(announced.seed, peers.num + peers.rank)), announced.seed


def _mixed(seed: int, number: int) -> int:
    return (seed * _GOLDEN + number) % (1 << 64)


def _all_have_theirs(peers: Peers, error: Exception | None) -> None:
    failed = [rank for rank, (is_well,) in enumerate(peers.gather([int(error is None)])) if not is_well]
    others = [rank for rank in failed if rank != peers.rank]
    # One lost connection may make others fail, and which of them a trainer meets first is chance: all are named.
    names = ", ".join(map(peers.name, others))
    if error is not None:
        also = f" ({names} could not exchange rows either)" if others else ""
        raise Unavailable(f"global_shuffle: {error}{also}. Every trainer has its old ones", ranks=others) from error
    if failed:
        raise Unavailable(
            f"global_shuffle: {names} could not exchange rows. Every trainer has its old ones", ranks=failed
        )


class _Announced:
    """What all trainers announce before: how many rows they have, where they are reached, the seed."""

    def __init__(self, announced: list[list[int]], seed: int) -> None:
        self.sizes = [numbers[0] for numbers in announced]
        self.numbers = [numbers[2] for numbers in announced]
        self.endpoints = [(_address(numbers[3:5]), numbers[5]) for numbers in announced]
        self.seed = seed

    @classmethod
    def gathered(
        cls, server: socket.socket, store: _feed.Store, slots: Sequence[Slot], peers: Peers, seed: int | None
    ) -> _Announced:
        address, port = server.getsockname()[:2]
        drawn = secrets.randbits(62) if seed is None else seed % (1 << 62)
        columns = zlib.crc32(repr([slot.native for slot in slots]).encode())
        number = secrets.randbits(63)
        given = int(seed is not None)
        announced = peers.gather([len(store), columns, number, *_numbers(address), port, given, drawn])
        for rank, (_, others_columns, *_, others_given, others_seed) in enumerate(announced):
            if others_columns != columns:
                raise SpecError(f"global_shuffle: {peers.name(rank)} has set other inputs (set_use_var) than this one")
            if others_given != given or (given and others_seed != drawn):
                raise SpecError(
                    f"global_shuffle: {peers.name(rank)} gives another seed than this one; give one, or none"
                )
        return cls(announced, announced[0][-1])


def _numbers(address: str) -> tuple[int, int]:
    """Return an address as two numbers of 64 bits."""
    found = ipaddress.ip_address(address)
    packed = found.packed if found.version == 6 else b"\0" * 10 + b"\xff\xff" + found.packed
    first, second = struct.unpack("<qq", packed)
    return first, second


def _address(numbers: Sequence[int]) -> str:
    found = ipaddress.IPv6Address(struct.pack("<qq", *numbers))
    return str(found.ipv4_mapped or found)


class _Exchange:
    """The rows that go to the others, and those that come, by rank."""

    def __init__(
        self, store: _feed.Store, slots: Sequence[Slot], peers: Peers, announced: _Announced, rows_a_message: int
    ) -> None:
        self._store, self._slots, self._peers, self._announced = store, slots, peers, announced
        self._rows_a_message = rows_a_message
        self._came: dict[int, _feed.Chunk] = {peers.rank: self._chunk()}
        self._lock = threading.Lock()
        self._errors: list[Exception] = []
        begin = sum(announced.sizes[: peers.rank])
        self._counts = _dealt(begin, announced.sizes[peers.rank], peers.num)

    def run(self, server: socket.socket) -> None:
        """Return when all is sent and all has come. Raises the first error."""
        others = [rank for rank in range(self._peers.num) if rank != self._peers.rank]
        threads = [self._thread(partial(self._give_to, rank)) for rank in others]
        try:
            self._take_own()
            threads += self._accepted(server, len(others))
        except Exception as error:  # noqa: BLE001 - raised below, once the threads have ended
            self._errors.append(error)
            server.close()  # trainers that have connected and were not accepted see it
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def received(self, seed: int) -> _feed.Store:
        """Return what has come, shuffled."""
        store = _feed.Store([slot.native for slot in self._slots])
        for rank in range(self._peers.num):
            store.add(self._came[rank])
        store.shuffle(seed)
        return store

    # -- sending ---------------------------------------------------------------------------------------

    def _give_to(self, rank: int) -> None:
        try:
            self._send_to(rank)
        except OSError as error:
            raise Unavailable(f"rows could not be given to {self._peers.name(rank)}: {error}") from error

    def _send_to(self, rank: int) -> None:
        with socket.create_connection(self._announced.endpoints[rank], timeout=SILENCE_S) as to:
            to.sendall(_HELLO.pack(self._announced.numbers[rank], self._peers.rank))
            for first, count in self._messages(rank):
                batch = self._store.gather(first, count)
                arrays = [array for i, slot in enumerate(self._slots) for array in _arrays(batch, i, slot)]
                sizes = [len(batch), *(array.size for array in arrays)]
                to.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
                for array in arrays:
                    to.sendall(_bytes(array))
            to.sendall(struct.pack("<Q", 0))
            if to.recv(1) != b"\1":
                raise PeerError(f"{self._peers.name(rank)} has not confirmed that it has all rows")

    def _take_own(self) -> None:
        own = self._came[self._peers.rank]
        for first, count in self._messages(self._peers.rank):
            batch = self._store.gather(first, count)
            own.extend([_column(list(_arrays(batch, i, slot))) for i, slot in enumerate(self._slots)], count)

    def _messages(self, rank: int) -> list[tuple[int, int]]:
        """Return first row and number of rows of each message for a trainer."""
        begin = sum(self._counts[:rank])
        end = begin + self._counts[rank]
        step = self._rows_a_message
        return [(first, min(step, end - first)) for first in range(begin, end, step)]

    # -- receiving -------------------------------------------------------------------------------------

    def _accepted(self, server: socket.socket, count: int) -> list[threading.Thread]:
        """Accept the others. Raises Unavailable naming those that did not connect, or the first error of a thread."""
        server.settimeout(_LOOK_S)
        threads: list[threading.Thread] = []
        until = time.monotonic() + SILENCE_S
        try:
            while len(self._came) < count + 1:
                self._check(until)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                rank = self._greeted(connection)
                if rank is not None:
                    threads.append(self._thread(partial(self._receive, connection, rank)))
        except BaseException:
            for thread in threads:
                thread.join()
            raise
        return threads

    def _check(self, until: float) -> None:
        self._peers.check()
        if self._errors:
            raise self._errors[0]
        if time.monotonic() > until:
            absent = [self._peers.name(rank) for rank in range(self._peers.num) if rank not in self._came]
            raise Unavailable(f"{', '.join(absent)} did not connect within {SILENCE_S:.0f} s")

    def _greeted(self, connection: socket.socket) -> int | None:
        """Return the rank of the trainer that connects; None: it is not a member of the job."""
        connection.settimeout(_GREETING_S)
        try:
            number, rank = _HELLO.unpack(_read(connection, _HELLO.size))
        except (OSError, PeerError):
            number, rank = -1, 0
        connection.settimeout(SILENCE_S)
        if number != self._announced.numbers[self._peers.rank] or rank >= self._peers.num or rank in self._came:
            connection.close()
            return None
        self._came[rank] = self._chunk()
        return int(rank)

    def _receive(self, connection: socket.socket, rank: int) -> None:
        with connection:
            try:
                while self._message(connection, self._came[rank]):
                    pass
                connection.sendall(b"\1")
            except (OSError, PeerError) as error:
                raise Unavailable(f"rows of {self._peers.name(rank)} did not arrive: {error}") from error

    def _message(self, connection: socket.socket, chunk: _feed.Chunk) -> bool:
        (rows,) = struct.unpack("<Q", _read(connection, 8))
        if not rows:
            return False
        kinds = [kind for slot in self._slots for kind in _kinds(slot)]
        sizes = struct.unpack(f"<{len(kinds)}Q", _read(connection, 8 * len(kinds)))
        if 8 * sum(sizes) > _MOST_BYTES:
            raise PeerError(f"a message announces {sum(sizes)} values")
        arrays = [_array(connection, kind, size) for kind, size in zip(kinds, sizes, strict=True)]
        parts = iter(arrays)
        chunk.extend([_column([next(parts) for _ in _kinds(slot)]) for slot in self._slots], rows)
        return True

    def _chunk(self) -> _feed.Chunk:
        return _feed.Chunk(slots=[slot.native for slot in self._slots], skips_bad_lines=False)

    def _thread(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: `run` raises it
                with self._lock:
                    self._errors.append(error)

        thread = threading.Thread(target=guarded, name="penstock-global-shuffle", daemon=True)
        thread.start()
        return thread


def _dealt(begin: int, count: int, num: int) -> list[int]:
    """Return how many of `count` rows each of `num` trainers gets, if row i of all rows goes to trainer i % num."""
    return [(begin + count - rank + num - 1) // num - (begin - rank + num - 1) // num for rank in range(num)]


def _kinds(slot: Slot) -> tuple[type, ...]:
    values = np.float32 if slot.is_float else np.int64
    return (values,) if slot.width else (values, np.int64)


def _arrays(batch: _feed.Batch, place: int, slot: Slot) -> tuple[np.ndarray, ...]:
    values = batch.values(place, slot.width, slot.is_float).reshape(-1)
    return (values,) if slot.width else (values, batch.lengths(place))


def _column(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def _array(connection: socket.socket, kind: type, size: int) -> np.ndarray:
    array: np.ndarray = np.empty(size, kind)
    _read_into(connection, _bytes(array))
    return array


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _read(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise PeerError("the connection was closed in the middle")
        view = view[got:]


__all__ = ["exchanged"]
