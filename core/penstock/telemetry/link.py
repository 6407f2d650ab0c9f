"""Connections to a watcher: the agent's Unix socket, or the server's websocket. Shells: no decisions but the dial's.

A link is used from the sender thread only. `send` and `idle` raise `Unavailable` when the connection is gone; `dial`
raises it when there is no answer, and `PeerError` when the other side has refused, which no retry would change.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PeerError, SpecError, Unavailable
from penstock.failover import ServerAddresses
from penstock.protocol.attach import REGISTERED, STORED, Heartbeat, Register, Registered
from penstock.protocol.completeness import COUNTED
from penstock.protocol.contract import MAX_LEFT_BYTES, Attached, Managed
from penstock.protocol.frames import SPOOLED
from penstock.protocol.wire import parse
from penstock.telemetry.outbox import Parcel

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

OPEN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
LINGER_S = 0.5
_log = logging.getLogger(__name__)


class Link(Protocol):
    """An open connection. `stream` and `epoch` go into every frame; call `idle` at least each `idle_s`.

    `confirms`: the peer may report what it has stored; `stored_seq`: up to which frame, -1: nothing yet.
    """

    stream: int
    epoch: int
    idle_s: float
    confirms: bool
    stored_seq: int

    def send(self, item: Parcel) -> None:
        """Send one frame; block while the peer does not read."""
        ...

    def idle(self) -> None:
        """Do what is due when there is nothing to send."""
        ...

    def close(self) -> None:
        """Close; what was sent is on its way. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of this process. `endpoint`: where a pserver listens, None for a trainer.

    `process`: a name that no other process has, in reports of what it counts.
    """

    role: str
    index: int
    host: str
    pid: int
    endpoint: str | None
    program: str
    version: str
    process: str

    def hello(self) -> dict[str, Any]:
        """Return the body of HELLO."""
        body: dict[str, Any] = {
            "role": self.role, "index": self.index, "host": self.host, "pid": self.pid, "program": self.program,
            "version": self.version, "process": self.process,
        }  # fmt: skip
        return body if self.endpoint is None else {**body, "endpoint": self.endpoint}


class UnixLink:
    """Length-prefixed frames to the agent; back comes the number of the newest one that it has on disk.

    An older agent sends nothing: then the newest figures are sent again over the next connection, which is harmless.
    """

    idle_s = 60.0
    confirms = True

    def __init__(self, managed: Managed) -> None:
        self.stream, self.epoch = managed.stream, managed.epoch
        self.stored_seq = -1
        self._answer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(managed.socket)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"the agent's telemetry socket {managed.socket} does not answer: {error}") from error

    def send(self, item: Parcel) -> None:
        try:
            self._socket.sendall(item.data)
        except OSError as error:
            raise Unavailable(f"the agent's telemetry socket closed: {error}") from error
        try:
            self._read_all()
        except OSError as error:
            if item.kind not in COUNTED:  # rows of these would be there twice; the next frame finds the closed socket
                raise Unavailable(f"the agent's telemetry socket closed: {error}") from error

    def idle(self) -> None:
        """Read what the agent has on disk."""
        try:
            self._read_all()
        except OSError as error:
            raise Unavailable(f"the agent's telemetry socket closed: {error}") from error

    def _read_all(self) -> None:
        try:
            part = self._socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not part:
            raise ConnectionResetError("it was closed by the agent")
        self._answer += part
        whole = len(self._answer) - len(self._answer) % SPOOLED.size
        if whole:
            (self.stored_seq,) = SPOOLED.unpack(self._answer[whole - SPOOLED.size : whole])
            self._answer = self._answer[whole:]

    def close(self) -> None:
        """Close once the agent has read everything, or after `LINGER_S`: answers left unread would reset its side."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(LINGER_S)
            while self._socket.recv(4096):
                pass
        except OSError:
            pass  # closed by the agent, or it does not read
        self._socket.close()


class LeftLink:
    """Frames into a file that the agent made, for when it is back: how a process ends while there is no agent.

    In the page cache, which outlives the process. Raises Unavailable where there is no such file, as of an older agent,
    or it is full.
    """

    idle_s = 60.0
    confirms = False
    stored_seq = -1

    def __init__(self, managed: Managed) -> None:
        self.stream, self.epoch = managed.stream, managed.epoch
        self._path = managed.left
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"the last telemetry of this process is lost, as {self._path}: {error}") from error

    def send(self, item: Parcel) -> None:
        """Append one frame; of several processes each writes whole ones."""
        if item.kind in COUNTED:
            return  # a recording has gaps, which are counted; series have none
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            size = os.fstat(self._file).st_size
            if size + len(item.data) > MAX_LEFT_BYTES:
                raise OSError(errno.EFBIG, f"it has {size} bytes")
            if os.write(self._file, item.data) != len(item.data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, "the frame was not written whole")
        except OSError as error:
            raise Unavailable(f"the last telemetry of this process is lost, as {self._path}: {error}") from error
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def idle(self) -> None:
        return

    def close(self) -> None:
        os.close(self._file)


class WebsocketLink:
    """Binary messages to the server, after registration; a heartbeat each third of the lease."""

    confirms = True

    def __init__(self, attached: Attached, identity: ProcessIdentity) -> None:
        # Only a process that a person attached needs websockets; importing it costs 60 ms.
        from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

        self._closed_error = ConnectionClosed
        try:
            self._stack = ExitStack()
            self._socket = self._stack.enter_context(_connection(attached))
        except InvalidStatus as error:
            raise _refusal(attached, error.response.status_code) from error
        except (WebSocketException, OSError, TimeoutError) as error:  # the first: it hung up before it answered
            raise Unavailable(f"the server at {attached.url} does not answer: {error}") from error
        try:
            answer = self._register(attached, identity)
            self.stream, self.epoch, self.idle_s = answer.stream, answer.epoch, answer.lease_ttl_s / 3
        except (PeerError, ValueError) as error:
            self.close()
            raise PeerError(f"the server at {attached.url} did not register this {identity.role}: {error}") from error
        except (ConnectionClosed, OSError, TimeoutError) as error:
            self.close()
            raise _hung_up(attached, identity, error) from error
        self.stored_seq = -1
        self._heartbeat_at = time.monotonic()

    def _register(self, attached: Attached, identity: ProcessIdentity) -> Registered:
        fields = {name: value for name, value in asdict(identity).items() if value is not None}
        self._socket.send(Register.model_validate({**fields, "job_name": attached.job_name}).encode())
        return parse(REGISTERED, self._socket.recv(timeout=OPEN_TIMEOUT_S))

    def send(self, item: Parcel) -> None:
        try:
            self._socket.send(item.frame)
        except (self._closed_error, OSError) as error:
            raise Unavailable(f"the server closed the connection: {error}") from error
        if time.monotonic() - self._heartbeat_at >= self.idle_s:
            self.idle()

    def idle(self) -> None:
        """Send a heartbeat, and read the answers: unread messages would stall its pings."""
        try:
            if time.monotonic() - self._heartbeat_at >= self.idle_s * 0.9:
                self._socket.send(Heartbeat().encode())
                self._heartbeat_at = time.monotonic()
            self._read_all()
        except (self._closed_error, OSError) as error:
            raise Unavailable(f"the server closed the connection: {error}") from error

    def _read_all(self) -> None:
        while True:
            try:
                self.stored_seq = max(self.stored_seq, stored_seq(self._socket.recv(timeout=0)))
            except TimeoutError:
                return

    def close(self) -> None:
        self._stack.close()


def stored_seq(answer: str | bytes) -> int:
    """Return up to which frame a server reports as stored, -1 if this message does not."""
    try:
        return parse(STORED, answer).stored_seq
    except PeerError:
        return -1  # of a newer server


def _connection(attached: Attached) -> AbstractContextManager[ClientConnection]:
    from websockets.sync.client import connect  # see WebsocketLink

    from penstock.tls import ClientCertificate, context_for  # loads ssl

    return connect(
        "ws" + attached.url.removeprefix("http") + "/api/v1/attach",
        additional_headers={"Authorization": f"Bearer {attached.token}"},
        compression=None,
        open_timeout=OPEN_TIMEOUT_S,
        close_timeout=CLOSE_TIMEOUT_S,
        max_size=1 << 20,
        ssl=context_for(attached.url, ClientCertificate.from_environ()),
    )


def _refusal(attached: Attached, status: int) -> PeerError | Unavailable:
    if status in (401, 403):
        return PeerError(
            f"the server at {attached.url} refused PENSTOCK_TOKEN (status {status}); its scope must be attach"
        )
    if status < 500:
        return PeerError(f"{attached.url} answered with status {status}; does PENSTOCK_URL name a Penstock server?")
    return Unavailable(f"the server at {attached.url} answered with status {status}")


def _hung_up(attached: Attached, identity: ProcessIdentity, error: Exception) -> PeerError | Unavailable:
    """Distinguish a refusal of the registration (close codes 1008 and 4400 to 4499) from a connection that broke."""
    received = getattr(error, "rcvd", None)
    if received is not None and (received.code == 1008 or 4400 <= received.code < 4500):
        return PeerError(
            f"the server at {attached.url} refused {identity.role} {identity.index} of job {attached.job_name!r}: "
            f"{received.reason or received.code}"
        )
    return Unavailable(f"the server at {attached.url} hung up while this process registered: {error}")


def dialer(contract: Managed | Attached, identity: Callable[[], ProcessIdentity]) -> Callable[[], Link]:
    """Return what opens a connection; of several servers, to the first that answers."""
    if isinstance(contract, Managed):
        return lambda: UnixLink(contract)
    try:
        addresses = ServerAddresses(contract.url)
    except SpecError as error:
        return partial(_refuse, f"PENSTOCK_URL: {error}")
    return partial(_dial_one_of, addresses, contract, identity)


def _refuse(why: str) -> Link:
    raise PeerError(why)


def _dial_one_of(addresses: ServerAddresses, attached: Attached, identity: Callable[[], ProcessIdentity]) -> Link:
    """Open a connection to the server that is in use, else to the next that answers. Raises the last one's error."""
    while True:
        url = addresses.current
        try:
            link = WebsocketLink(replace(attached, url=url), identity())
        except Unavailable as error:
            if addresses.failed(url):
                raise
            _log.warning("%s; next: %s", error, addresses.current)
        else:
            addresses.succeeded()
            return link


def leaver(contract: Managed | Attached) -> Callable[[], Link] | None:
    """Return what takes the last frames where no connection can be opened; None where nothing does."""
    return (lambda: LeftLink(contract)) if isinstance(contract, Managed) else None
