"""Addresses for servers that a test starts, perhaps again after it has killed them.

Not those that the kernel would draw: it gives them to outgoing connections of other tests as soon as a server is down.
"""

from __future__ import annotations

from penstock.distributed.ports import free_ports


def free_endpoints(count: int, host: str = "127.0.0.1") -> list[str]:
    """Return addresses of this host at which nobody listens."""
    return [f"{host}:{port}" for port in free_ports(host, count)]


def free_endpoint() -> str:
    """Return one."""
    return free_endpoints(1)[0]
