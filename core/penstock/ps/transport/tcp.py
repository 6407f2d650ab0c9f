"""Calls of one server from any host: gRPC over TCP, or shared memory where client and server are on one host.

One gRPC method, streamed both ways: the head of a message first, then its body in chunks of at most 2 MiB. No protobuf,
so no limit of its size. The job's token travels in the call's metadata and is checked before a byte of the message is
read. With `Tls` both the channel is encrypted and the server proves its identity; without, use it on networks that are
trusted. A `Route` is found at the first call, and again after `drop`: a server that was started again listens at
another socket.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.errors import PeerError, Unavailable
from penstock.logger import warn_once
from penstock.ps.transport.frames import MAX_BODY_BYTES, Connection, Line
from penstock.ps.transport.local import (
    DRAIN_S,
    Answered,
    Guarded,
    Handler,
    LocalClient,
    channel_of,
    host_id,
    keep_alive,
    refusal,
    refused,
)
from penstock.ps.transport.secure import SecureLine, Tls, client_context
from penstock.ps.wire import MAX_HEAD_BYTES, Message, WireError, announced_body, decode, encode

_log = logging.getLogger(__name__)
CHUNK_BYTES = 2 << 20
_SERVICE, _METHOD = "penstock.ps.Parameters", "Call"
# A chunk and its frame; nothing else is bounded by gRPC.
_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
    ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
]
# A connection that is cut in the middle of a wait is noticed within 20 s.
_ALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000)]
# A client made anew connects anew: by default clients share connections, and what is left of a broken one's waits.
_FRESH = [("grpc.use_local_subchannel_pool", 1)]
# Servers are reached directly: gRPC would send even calls of the loopback device to a proxy that is exported.
_DIRECT = [("grpc.enable_http_proxy", 0)]
_SERVER_ALIVE = [("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000), ("grpc.so_reuseport", 0)]


def chunks(message: Message) -> Iterator[bytes]:
    """Yield the head, then the body in chunks."""
    head, parts = encode(message)
    yield head
    for part in parts:
        view = memoryview(part)
        for first in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[first : first + CHUNK_BYTES])


def assembled(stream: Iterator[bytes]) -> Message:
    """Read one message. Raises WireError."""
    head = next(stream, b"")
    if len(head) > MAX_HEAD_BYTES + 8:
        raise WireError(f"a head of {len(head)} bytes is too long")
    length = announced_body(head)
    if length > MAX_BODY_BYTES:
        raise WireError(f"a body of {length} bytes is too long")
    body = bytearray()
    for chunk in stream:
        if len(body) + len(chunk) > length:
            raise WireError(f"the head announces {length} bytes, but more came")
        body += chunk
    return decode(head, memoryview(body))


class TcpServer:
    """Serves `handler` on a TCP port. `num_threads`: calls at once, those that wait included."""

    def __init__(
        self, handler: Handler, *, address: str, job: str, token: str, num_threads: int = 64, tls: Tls | None = None
    ) -> None:
        self._handler, self._job, self._token = handler, job, token
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ps-remote")
        self._server = grpc.server(self._pool, options=[*_OPTIONS, *_SERVER_ALIVE])
        method: Any = grpc.stream_stream_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),))
        try:
            if tls is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([tls.of_server()])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise Unavailable(f"the server cannot listen at {address}: {error}. Is the port in use?") from error
        self._server.start()

    def _call(self, stream: Iterator[bytes], context: Any) -> Iterator[bytes]:
        given = dict(context.invocation_metadata())
        right = hmac.compare_digest(str(given.get("authorization", "")), f"Bearer {self._token}")
        if not right or given.get("penstock-job") != self._job:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job or its token is wrong")
        try:
            request = assembled(stream)
        except WireError as error:
            yield from chunks(refusal(f"not a message: {error}"))
            return
        answer: Iterable[bytes] = ()
        try:
            answer = self._answer(request)
        except Unavailable as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Exception as error:  # noqa: BLE001  # sent to the client
            answer = chunks(refused(error))
        yield from answer

    def _answer(self, request: Message) -> Iterable[bytes]:
        answer = self._handler(request)
        if not isinstance(answer, Guarded):
            return chunks(answer)
        with answer.reading:
            return list(chunks(answer.message))

    def close(self) -> None:
        """Stop serving. Answers on their way are sent; calls that take longer than a second break."""
        self._server.stop(grace=DRAIN_S).wait()
        self._pool.shutdown()


class TcpClient:
    """Calls a TcpServer. Thread-safe."""

    def __init__(self, endpoint: str, *, job: str, token: str, tls: Tls | None = None) -> None:
        self._endpoint = endpoint
        options = [*_OPTIONS, *_ALIVE, *_FRESH, *_DIRECT]
        if tls is None:
            self._channel = grpc.insecure_channel(endpoint, options)
        else:
            named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
            self._channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(tls.root), [*options, *named])
        self._metadata = (("authorization", f"Bearer {token}"), ("penstock-job", job))
        self._method: Any = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")

    def call(self, message: Message, *, deadline_s: float) -> Answered:
        """Send a request and return its answer. Raises Unavailable, PeerError.

        After an error it is not known whether the request was carried out: retry, with the same key.
        """
        try:
            stream = self._method(chunks(message), timeout=deadline_s, metadata=self._metadata)
            return Answered(assembled(stream), lambda: None)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}:
                raise Unavailable(f"{self._endpoint}: {code.name.lower().replace('_', ' ')}: {details}") from error
            raise PeerError(f"{self._endpoint} refuses the call: {details}") from error
        except ValueError as error:  # raised by gRPC for a channel that was closed before the call
            raise Unavailable(f"{self._endpoint}: {error}") from error

    def close(self) -> None:
        """Close the channel; calls in progress break."""
        self._channel.close()


WHERE_S = 5.0  # for a server's answer to `where`

Client = LocalClient | TcpClient


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a server. `local`: whether shared memory may be used at all; `channels`: and another port."""

    endpoint: str
    job: str
    token: str = field(repr=False)
    tls: Tls | None = None
    local: bool = True
    channels: bool = True


class Route:
    """Calls to one server. Thread-safe. `drop` breaks the calls in progress: they raise Unavailable."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False

    @property
    def is_local(self) -> bool:
        """Whether calls go through shared memory now."""
        return isinstance(self._client, LocalClient)

    def call(self, message: Message, *, deadline_s: float) -> Answered:
        """Send a request and return its answer. Raises Unavailable, PeerError. Not repeated.

        `deadline_s`: for all of it, finding the way too.
        """
        client = self._client
        if client is not None:
            return client.call(message, deadline_s=deadline_s)
        deadline = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            raise Unavailable(f"no way to {self.address.endpoint} was found within {deadline_s:.0f} s")
        try:
            if self._closed:
                raise Unavailable(f"the connection to {self.address.endpoint} is closed")
            client = self._client
            if client is None:
                client = self._client = self._connect(deadline)
        finally:
            self._lock.release()
        return client.call(message, deadline_s=_left(deadline))

    def open_channel(self, message: Message, *, deadline_s: float) -> tuple[Connection, list[str]]:
        """Return a connection that is a channel, and the server's blocks; see `LocalClient.open_channel`.

        Raises Unavailable, PeerError; PeerError too without `channels`, where the server has no port for it that can be
        reached, and with TLS where a certificate is not accepted, or this process has no TLS for channels.
        """
        client, to = self._client, self.address
        if client is None:
            raise Unavailable(f"{to.endpoint} is not connected")
        if isinstance(client, LocalClient):
            return client.open_channel(message, deadline_s=deadline_s)
        if not to.channels:
            raise PeerError("PENSTOCK_PS_TRANSPORT is grpc")
        context = None if to.tls is None else client_context(to.tls)
        deadline = time.monotonic() + deadline_s
        with client.call(Message("port", {}), deadline_s=deadline_s) as answer:
            port = int(answer.fields["port"]) if answer.kind == "listens" else 0
        if not port:
            raise PeerError("the server has no port for channels; its log says why")
        host = to.endpoint.rpartition(":")[0].strip("[]")
        try:
            connection = socket.create_connection((host, port), timeout=_left(deadline))
        except OSError as error:
            raise PeerError(f"port {port} of {host} cannot be reached: {error}") from error
        keep_alive(connection)
        hello = Message("hello", {"job": to.job, "token": to.token})
        if to.tls is None or context is None:
            return channel_of(Line(connection, shares=False), hello, message, deadline)
        line = SecureLine(connection, context, name=to.tls.server_name or host)
        return channel_of(line, hello, message, deadline)

    def _connect(self, deadline: float) -> Client:
        to = self.address
        remote = TcpClient(to.endpoint, job=to.job, token=to.token, tls=to.tls)
        try:
            local = self._local_client(remote, deadline) if to.local else None
        except BaseException:
            remote.close()
            raise
        if local is None:
            return remote
        remote.close()
        return local

    def _local_client(self, remote: TcpClient, deadline: float) -> LocalClient | None:
        with remote.call(Message("where", {}), deadline_s=min(_left(deadline), WHERE_S)) as here:
            if here.kind != "here" or here.fields["host"] != host_id() or not here.fields["address"]:
                return None
            local = LocalClient(str(here.fields["address"]), job=self.address.job, token=self.address.token)
        try:
            local.call(Message("where", {}), deadline_s=min(_left(deadline), WHERE_S)).release()
        except Unavailable as error:
            local.close()
            text = f"{self.address.endpoint} is on this host, but its socket cannot be reached ({error}); TCP is used"
            warn_once(_log, text, self, about="socket")
            return None
        except BaseException:
            local.close()
            raise
        return local

    def drop(self) -> None:
        """Forget the way: calls in progress break, and the next one finds another."""
        # Without the lock: its holder is connecting, with a deadline of its own.
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """End: calls in progress break, later ones are refused."""
        self._closed = True
        self.drop()


def _left(deadline: float) -> float:
    """Return the seconds until then; never none, which would be taken for no limit."""
    return max(deadline - time.monotonic(), 0.001)
