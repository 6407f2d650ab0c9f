"""Addresses for servers that a test starts, perhaps again after it has killed them.

Not those that the kernel would draw: it gives them to outgoing connections of other tests as soon as a server is down.
"""

from __future__ import annotations

import os
from collections import deque

from penstock.distributed.ports import free_ports

WORKERS = 8
"""Each worker of pytest draws from ports of its own, since another one's server may not listen yet."""
_given: deque[int] = deque(maxlen=200)  # of late: their servers may not listen yet either


def free_endpoints(count: int, host: str = "127.0.0.1") -> list[str]:
    """Return addresses of this host at which no process listens, and which were not returned lately."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    found: list[int] = []
    while len(found) < count:
        drawn = free_ports(host, WORKERS * 4)
        found += [port for port in drawn if port % WORKERS == worker and port not in (*_given, *found)]
    _given.extend(found[:count])
    return [f"{host}:{port}" for port in found[:count]]


def free_endpoint() -> str:
    """Return one."""
    return free_endpoints(1)[0]
