"""A relay between trainers' channels and a parameter server, which loses requests and answers, and repeats requests.

It takes the stream apart into frames, and knows nothing of messages but their kind. What it does to the n-th request is
drawn as in `relay.py`. A connection over which something was lost is broken, as is one of TCP: its other side finds out
no other way. A request is repeated over a connection of its own, with the same greeting.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from tests.faults.relay import LATE_S, Faults

KINDS = {1: "lookup", 2: "ahead", 3: "step"}
EARLY = 18
_PREFIXES = {b"PSL1": struct.Struct("<4sIIQ"), b"PSC2": struct.Struct("<4sIIIQ")}
_NUM_GREETINGS = 2  # `hello`, and the request to be a channel


def frame_of(connection: socket.socket) -> bytes:
    """Receive one frame. Raises ConnectionError when the connection has ended."""
    magic = _exactly(connection, 4)
    prefix = magic + _exactly(connection, _PREFIXES[magic].size - 4)
    _, _, head, *_, body = _PREFIXES[magic].unpack(prefix)
    return prefix + _exactly(connection, head + body)


def _exactly(connection: socket.socket, length: int) -> bytes:
    out = bytearray()
    while len(out) < length:
        piece = connection.recv(length - len(out))
        if not piece:
            raise ConnectionError("the connection has ended")
        out += piece
    return bytes(out)


def kind_of(frame: bytes) -> int:
    """Return the kind of a channel's message: the first number of its head."""
    (kind,) = struct.unpack_from("<H", frame, _PREFIXES[b"PSC2"].size)
    return int(kind)


@dataclass
class _Pair:
    """A trainer's connection, and the one to the server behind it."""

    near: socket.socket
    far: socket.socket
    greetings: list[bytes] = field(default_factory=list)
    answers: SimpleQueue[bytes] = field(default_factory=SimpleQueue)  # empty bytes: there will be none

    def close(self) -> None:
        for one in (self.near, self.far):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class ChannelRelay:
    """Passes connections to `at` on to `to`. `faults`: what it did."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], *, seed: int, share: float) -> None:
        self.faults, self._to = Faults(seed, share), to
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._socket = socket.create_server(at)
        self._start(self._accept)

    def _start(self, run: object, *args: object, after_s: float = 0.0) -> None:
        thread = threading.Timer(after_s, run, args)  # type: ignore[arg-type]  # any callable
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                pair = _Pair(near, self._connected())
            except OSError:
                near.close()  # the server has ended
                continue
            with self._lock:
                self._pairs.append(pair)
            self._start(self._serve, pair)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._to)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _serve(self, pair: _Pair) -> None:
        pair.near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            for _ in range(_NUM_GREETINGS):
                pair.greetings.append(frame_of(pair.near))
                pair.far.sendall(pair.greetings[-1])
                pair.near.sendall(frame_of(pair.far))
            self._start(self._take_answers, pair)
            while self._pass_on(pair):
                pass
        pair.close()

    def _take_answers(self, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while True:
                frame = frame_of(pair.far)
                if kind_of(frame) == EARLY:
                    pair.near.sendall(frame)
                else:
                    pair.answers.put(frame)
        pair.answers.put(b"")

    def _pass_on(self, pair: _Pair) -> bool:
        """Pass on one request, with what comes ahead of it; False: no other follows."""
        request = frame_of(pair.near)
        whole = request
        while KINDS[kind_of(request)] == "ahead":
            pair.far.sendall(request)
            request = frame_of(pair.near)
            whole += request
        what = self.faults.draw(KINDS[kind_of(request)])
        if what == "lost request":
            return False
        pair.far.sendall(request)
        answer = pair.answers.get()
        if what == "lost answer" or not answer:
            return False
        if what == "twice":
            answer = self._again(pair.greetings, whole) or answer
        if what == "late":
            self._start(self._again, pair.greetings, whole, after_s=LATE_S)
        pair.near.sendall(answer)
        return True

    def _again(self, greetings: list[bytes], request: bytes) -> bytes:
        """Send a request over another connection; return its answer, nothing if the server has ended."""
        with contextlib.suppress(OSError), self._connected() as connection:
            for greeting in greetings:
                connection.sendall(greeting)
                frame_of(connection)
            connection.sendall(request)
            while kind_of(answer := frame_of(connection)) == EARLY:
                pass
            return answer
        return b""

    def close(self) -> None:
        """End."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()
        for thread in self._threads:
            thread.join()
        for pair in pairs:
            pair.near.close()
            pair.far.close()
