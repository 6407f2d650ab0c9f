"""Frames over TLS, for channels between hosts: the same certificates, authority and names as gRPC's connections.

A server shows a certificate, and a trainer knows it by its authority and by its name; a trainer is known by the job's
token, which is sent encrypted. Bodies follow on the connection: memory is not shared over it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import PeerError, SpecError
from penstock.machine.capability import capability
from penstock.native.openssl import CHANNELS_TLS, SecureSocket, TlsContext
from penstock.ps.transport.frames import Line


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts. A server needs `key` and `certificate`; a client `root`, and the name on the server's certificate."""

    root: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    server_name: str = ""

    def of_server(self) -> tuple[bytes, bytes]:
        """Return (key, certificate). Raises SpecError without."""
        if self.key is None or self.certificate is None:
            raise SpecError("a server needs tls.key and tls.certificate")
        return self.key, self.certificate


def server_context(tls: Tls) -> TlsContext:
    """Return how a server answers handshakes. Raises PeerError where this process has no TLS for channels."""
    _check_present()
    return TlsContext.of_server(*tls.of_server())


def client_context(tls: Tls) -> TlsContext:
    """Return how a client begins handshakes. Raises PeerError where this process has no TLS for channels."""
    _check_present()
    if tls.root is None:
        raise PeerError("channels with TLS need the authority of the servers' certificates (PENSTOCK_PS_TLS_CA)")
    return TlsContext.of_client(tls.root)


def _check_present() -> None:
    found = capability(CHANNELS_TLS)
    if not found.present:
        raise PeerError(f"no TLS for channels: {found.detail}")


class SecureLine(Line):
    """A line over TLS. `name`: of the server, for the side that connects. `open` does the handshake."""

    def __init__(self, connection: socket.socket, context: TlsContext, *, name: str = "") -> None:
        super().__init__(connection, shares=False)
        self._stream, self._is_detached = SecureSocket(context, connection.detach(), name=name), False

    def open(self, deadline: float) -> None:
        """Raises Unavailable (in time, or closed), PeerError (refused, or no TLS)."""
        self._stream.handshake(deadline)

    def _write(
        self, start: bytes, parts: Sequence[memoryview | bytes], descriptors: Sequence[int], deadline: float
    ) -> None:
        self._stream.send([start, *parts], deadline)

    def _start(self, deadline: float) -> tuple[bytes, list[int]]:
        room = bytearray(1 << 14)  # a record
        count = self._stream.receive_into(room, deadline)
        return bytes(room[:count]), []

    def _read_into(self, to: memoryview, deadline: float) -> int:
        return self._stream.receive_into(to, deadline)

    def stop_receiving(self) -> None:
        self._stream.stop_receiving()

    def shut_down(self) -> None:
        self._stream.shut_down()

    def detach(self) -> SecureSocket:
        """Return the connection, which is the caller's now."""
        self._is_detached = True
        return self._stream

    def close(self) -> None:
        if not self._is_detached:
            self._stream.shut_down()  # its descriptor is closed with its last reference
