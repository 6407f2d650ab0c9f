"""Ports of this host for servers that are about to be started."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.errors import SpecError

FIRST, LAST = 20_000, 29_999
"""Below what the kernel gives to outgoing connections: nothing takes, by chance, the port of a server that is down."""


def free_ports(host: str, count: int) -> list[int]:
    """Return ports that no process listens at now. Another one may take a port before its server does; that then fails.

    Raises OSError for a host that is not this one, or when all are taken.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.SystemRandom().sample(range(FIRST, LAST + 1), LAST + 1 - FIRST):
            if len(found) == count:
                return found
            one = stack.enter_context(socket.socket())
            try:
                one.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
    raise OSError(errno.EADDRINUSE, f"{count} free ports from {FIRST} to {LAST} were not found", host)


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
