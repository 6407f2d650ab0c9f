"""Which ports this node offers to pservers and ranks: some that are free now, drawn from a range of their own.

The range lies below what the kernel gives to outgoing connections, so that nothing takes an offered port by chance. The
server gives each to one process at a time; what else listens on this machine is seen by trying.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 29_999
NUM_OFFERED = 64


def offer(draw: random.Random, *, count: int = NUM_OFFERED) -> list[int]:
    """Return `count` free ports, fewer if most are taken. Drawn, so that two clusters on one machine rarely meet."""
    found: list[int] = []
    for port in draw.sample(range(FIRST, LAST + 1), 4 * count):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of this machine, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no listeners
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen()
        except OSError:
            return False
    return True
