"""Ports of this host for servers that are about to be started."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.errors import SpecError


def free_ports(host: str, count: int) -> list[int]:
    """Return ports that nobody listens at now. Another process may take one before its server does; it then says so."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def check_free(endpoints: Sequence[str]) -> None:
    """Raise SpecError naming the endpoint at which no server could listen."""
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: a closed one is no obstacle
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                raise SpecError(
                    f"no server can listen at {endpoint}: {error.strerror}. Choose other ports with --started_port or "
                    "--endpoints, or leave both out to get free ones",
                    pointer=endpoint,
                ) from error
