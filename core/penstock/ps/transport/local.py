"""Calls over lines: between processes of one host by an abstract Unix socket, with bodies in shared memory.

`LineServer` also serves other hosts, over TCP, for channels; `LocalClient` is of one host alone.

A connection opens with `hello`, which holds the job and its token; nothing else is read before that is right. At most
`MAX_UNKNOWN` connections may be without it: the one that has taken longest makes room for the next. Each connection has
a thread on the server and carries one call at a time; a client opens as many as it has calls at once.
A client may make its connection a channel (`native/src/ps`), over which steps go.
A handler may wait (a barrier does); its answer's tensors are copied into shared memory before it is called again.
The socket is abstract: nothing in the file system, nothing left after SIGKILL.
"""

from __future__ import annotations

import functools
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.errors import PeerError, PenstockError, Unavailable
from penstock.logger import warn_once
from penstock.machine.capability import capability
from penstock.native.channels import Answers, Prepared, Request, TlsContext, Traffic
from penstock.ps.transport.frames import Closed, Connection, Line
from penstock.ps.transport.secure import SecureLine
from penstock.ps.wire import Message, WireError

_log = logging.getLogger(__name__)


@functools.cache
def host_id() -> str:
    """Return what is equal for processes of one running machine and network namespace, and differs for others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


@dataclass(frozen=True, slots=True)
class Guarded:
    """An answer whose tensors may be changed by others, but not while `reading` is held: no copy of them is needed."""

    message: Message
    reading: AbstractContextManager[None]


Handler = Callable[[Message], Message | Guarded]
"""Answers a request; runs on the connection's thread. Its tensors are valid until it returns.

What it raises refuses the request, except Unavailable: that breaks the connection, so the client retries.
"""


class ChannelHandler(Protocol):
    """Answers requests over channels; `traffic` counts what goes over them.

    `in_parts`: it takes each message ahead of a step, where bodies go through the connection. `prepared`: answers
    what it can before the handler is asked, where memory is shared.
    """

    traffic: Traffic
    in_parts: bool
    prepared: Prepared | None

    def open(self, message: Message) -> Message:
        """Answer the request to make its connection a channel. What it raises refuses that."""

    def answer(self, request: Request, channel: Answers) -> None:
        """Answer one request; runs on the channel's thread. What it raises is as with `Handler`."""

    def closed(self, channel: Answers) -> None:
        """A channel has ended."""


MAX_UNKNOWN = 64
HELLO_S = 10.0  # seconds for a connection's `hello`
DRAIN_S = 1.0  # for answers when the server ends
ANSWER_S = 60.0  # seconds for a client to take its answer
_ACCEPT_RETRY_S = 0.05  # before a connection is accepted again, after one could not be


def refusal(reason: str, *, rejoin: bool = False) -> Message:
    """Return the answer to a request that is refused."""
    return Message("refuse", {"reason": reason, "rejoin": rejoin})


def refused(error: Exception) -> Message:
    """Return the answer to a request that has failed. A fault of the server is logged, and sent with its type."""
    if isinstance(error, PenstockError):
        return refusal(str(error))
    _log.error("a request has failed", exc_info=error)
    return refusal(f"the server failed with {type(error).__name__}: {error}")


def listener_beside(endpoint: str) -> socket.socket:
    """Return a TCP socket bound to any free port of an endpoint's host. Raises Unavailable."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise Unavailable(f"the server cannot listen at {host}: {error}") from error


_IDLE_S, _PROBE_S, _NUM_PROBES = 10, 5, 2  # as gRPC's connections (`tcp.py`): 20 s from a silence to its end


def keep_alive(connection: socket.socket) -> None:
    """Let a TCP connection carry short messages, and break within 20 s when the other side answers no more.

    Probes are for a connection that only waits; the user timeout is for bytes that are sent and not acknowledged.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _NUM_PROBES * _PROBE_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class LineServer:
    """Serves `handler` to processes of this host, and `channels`. `address`: what a client connects to.

    `listener`: a bound TCP socket, to serve other hosts with instead; bodies go through the connection then, with `tls`
    encrypted.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        job: str,
        token: str,
        channels: ChannelHandler | None = None,
        listener: socket.socket | None = None,
        tls: TlsContext | None = None,
    ) -> None:
        self._tls = tls
        self._handler, self._job, self._token, self._channels = handler, job, token, channels
        self._prepared = None if channels is None else channels.prepared
        self._shares = listener is None
        self.address = "" if listener is not None else f"penstock-ps-{secrets.token_hex(8)}"
        self._socket = listener or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        if listener is None:
            self._socket.bind("\0" + self.address)
        self._socket.listen(128)
        self._lines: set[Line | Answers] = set()
        self._unknown: dict[Line, None] = {}  # of these, those without a `hello` so far, oldest first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="ps-local-accept", daemon=True)
        self._accepting.start()

    @property
    def num_clients(self) -> int:
        """How many connections and channels are open. A process has some from its first call to its end."""
        with self._lock:
            return len(self._lines) - len(self._unknown)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or no descriptor is free
                self._closed.wait(_ACCEPT_RETRY_S)
                continue
            line: Line | None = None
            try:
                if not self._shares:
                    keep_alive(connection)
                line = Line(connection, shares=self._shares) if self._tls is None else SecureLine(connection, self._tls)
                self._begin(line)
            except (RuntimeError, MemoryError, OSError, PeerError) as error:  # no thread, or no memory, is to be had
                warn_once(_log, f"a connection is closed, since it cannot be served: {error!r}", self, about="served")
                (line or connection).close()
                self._closed.wait(_ACCEPT_RETRY_S)

    def _begin(self, line: Line) -> None:
        thread = threading.Thread(target=self._serve, args=(line,), name="ps-local", daemon=True)
        with self._lock:
            if self._closed.is_set():
                line.close()
                return
            if len(self._unknown) >= MAX_UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                oldest.shut_down()  # its thread ends with that
            thread.start()
            self._lines.add(line)
            self._unknown[line] = None
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def _serve(self, line: Line) -> None:
        try:
            if self._authenticate(line):
                with self._lock:
                    self._unknown.pop(line, None)
                while (opened := self._answer(line)) is None:
                    pass
                self._serve_channel(line, opened)
        except (Unavailable, PeerError):
            pass  # the client disconnected, or sent what is no frame: nothing of it was carried out
        finally:
            with self._lock:
                self._lines.discard(line)
                self._unknown.pop(line, None)
            line.close()

    def _authenticate(self, line: Line) -> bool:
        deadline = time.monotonic() + HELLO_S
        try:
            line.open(deadline)
        except PeerError as error:
            warn_once(_log, f"a connection to the port for channels was refused: {error}", self, about="refused")
            raise
        hello = line.receive(deadline, max_body=0)  # not authenticated yet
        right = hello.kind == "hello" and hello.fields["job"] == self._job
        if right and hmac.compare_digest(str(hello.fields["token"]).encode(), self._token.encode()):
            line.send(Message("answer", {"round": 0, "staleness": 0}), deadline)
            return True
        line.send(refusal("the job or its token is wrong"), deadline)
        return False

    def _serve_channel(self, line: Line, handler: ChannelHandler) -> None:
        shares = self._shares and capability("memfd").present
        channel = Answers(line.detach(), handler.traffic, shares=shares)
        with self._lock:
            self._lines.discard(line)
            self._lines.add(channel)
            is_late = self._closed.is_set()
        try:
            while not is_late:
                request = self._next(channel, in_parts=handler.in_parts and not self._shares)
                try:
                    handler.answer(request, channel)
                except Unavailable:
                    raise
                except Exception as error:  # noqa: BLE001  # sent to the client
                    answer = refused(error)
                    channel.refuse(str(answer.fields["reason"]), False, time.monotonic() + ANSWER_S)
                finally:
                    del request  # its memory is used again for the next one
                if why := channel.take_why():
                    warn_once(_log, f"answers are copied through sockets: {why}", self, about="shared memory")
        finally:
            with self._lock:
                self._lines.discard(channel)
            handler.closed(channel)
            channel.close()

    def _next(self, channel: Answers, *, in_parts: bool) -> Request:
        """Receive a request. Logs a warning for the first that is malformed: every step of its sender may be."""
        try:
            return channel.receive(in_parts=in_parts, prepared=self._prepared)
        except PeerError as error:
            text = f"a channel is closed, since what a trainer sent over it is malformed: {error}"
            warn_once(_log, text, self, about="malformed")
            raise

    def _answer(self, line: Line) -> ChannelHandler | None:
        """Answer one request. Return what serves the connection from now on, if that is a channel."""
        try:
            request = line.receive(float("inf"))
        except WireError as error:
            line.send(refusal(f"not a message: {error}"), time.monotonic() + ANSWER_S)
            raise
        channels = self._channels if request.kind == "channel" else None
        try:
            answer = self._handler(request) if channels is None else channels.open(request)
            deadline = time.monotonic() + ANSWER_S
            if isinstance(answer, Guarded):
                line.send(answer.message, deadline, reading=answer.reading)
            else:
                line.send(answer, deadline)
        except Unavailable:
            raise
        except Exception as error:  # noqa: BLE001  # sent to the client; nothing of the answer was sent before it
            line.send(refused(error), time.monotonic() + ANSWER_S)
            return None
        return channels

    def close(self) -> None:
        """Stop serving. Answers on their way are sent; calls that take longer than a second break."""
        with self._lock:
            self._closed.set()
            lines, threads = list(self._lines), list(self._threads)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for line in lines:
            line.stop_receiving()
        deadline = time.monotonic() + DRAIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.shut_down()
        for thread in (self._accepting, *threads):
            if thread is not threading.current_thread():
                thread.join()


def channel_of(line: Line, hello: Message, message: Message, deadline: float) -> tuple[Connection, list[str]]:
    """Make a new connection a channel; return it and the server's blocks. Takes the line over.

    Raises Unavailable, PeerError (a server that has no channels).
    """
    try:
        line.open(deadline)
        for asked in (hello, message):
            line.send(asked, deadline)
            answer = line.receive(deadline)
            if answer.kind == "refuse":
                raise PeerError(f"the server refuses a channel: {answer.fields['reason']}")
        if [t.name for t in answer.tensors] != ["blocks"]:
            raise PeerError("the server does not say which blocks it has")
        try:
            blocks: list[str] = json.loads(bytes(answer.tensors[0].data))
        except ValueError as error:
            raise PeerError(f"the server names its blocks in no JSON: {error}") from error
        return line.detach(), blocks
    finally:
        line.close()


class LocalClient:
    """Calls a LineServer. Thread-safe: each call at the same time has a connection of its own."""

    def __init__(self, address: str, *, job: str, token: str) -> None:
        self._address, self._hello = address, Message("hello", {"job": job, "token": token})
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, message: Message, *, deadline_s: float) -> Answered:
        """Send a request and return its answer, whose tensors are valid until `release`. Raises Unavailable, PeerError.

        After an error it is not known whether the request was carried out: retry, with the same key.
        """
        deadline = time.monotonic() + deadline_s
        line = self._take(deadline)
        try:
            line.send(message, deadline)
            answer = line.receive(deadline)
        except BaseException:
            self._end(line)  # its answer may still come: this connection is of no more use
            raise
        return Answered(answer, lambda: self._give_back(line))

    def _take(self, deadline: float) -> Line:
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        line = self._connect(deadline)
        with self._lock:
            if self._closed:
                line.close()
                raise Unavailable("the client is closed")
            self._busy.add(line)
        try:
            line.send(self._hello, deadline)
            answer = line.receive(deadline)
            if answer.kind == "refuse":
                raise PeerError(f"the server refuses the connection: {answer.fields['reason']}")
        except BaseException:
            self._end(line)
            raise
        return line

    def _connect(self, deadline: float) -> Line:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect("\0" + self._address)
        except OSError as error:
            connection.close()
            raise Closed(f"no server listens at {self._address}: {error}") from error
        return Line(connection)

    def open_channel(self, message: Message, *, deadline_s: float) -> tuple[Connection, list[str]]:
        """Return a connection that is a channel, which is the caller's, and the server's blocks.

        Raises Unavailable, PeerError (a server that has none).
        """
        deadline = time.monotonic() + deadline_s
        return channel_of(self._connect(deadline), self._hello, message, deadline)

    def _give_back(self, line: Line) -> None:
        with self._lock:
            if not self._closed:
                self._busy.discard(line)
                self._idle.append(line)
                return
        self._end(line)

    def _end(self, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
            line.close()  # under the lock, so that `close` never shuts down a descriptor that was reused by then

    def close(self) -> None:
        """Close; calls in progress break. Answers that are being read stay readable until they are released."""
        with self._lock:
            self._closed = True
            lines, self._idle = self._idle, []
            for line in self._busy:
                line.shut_down()
        for line in lines:
            line.close()


class Answered:
    """An answer. Use as a context, or call `release` when its tensors have been read."""

    def __init__(self, message: Message, release: Callable[[], None]) -> None:
        self.message, self._release = message, release

    def release(self) -> None:
        """Let the connection, and the memory in which the tensors lie, be used again."""
        release, self._release = self._release, lambda: None
        release()

    def __enter__(self) -> Message:
        return self.message

    def __exit__(self, *error: object) -> None:
        self.release()
