"""Under which address each node of a job is reached by the others. Pure.

An agent reports which of its addresses leads to the server. On one machine that is the loopback, which is right while
every node of the job is there; a node beside others that are elsewhere is called by its host's name instead.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Site:
    """A node: the name of its host, and the address that its agent gave, '' if none."""

    node_id: str
    host: str
    address: str


def addresses(sites: Sequence[Site]) -> dict[str, str]:
    """Return an address for each node of one job."""
    if len({site.node_id for site in sites}) == 1:
        return {site.node_id: LOOPBACK for site in sites}
    here = all(is_loopback(site.address) for site in sites)
    return {site.node_id: _address(site, here) for site in sites}


def endpoint(address: str, port: int) -> str:
    """Return host:port, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address is one that only its own machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address(site: Site, here: bool) -> str:
    if not site.address or (is_loopback(site.address) and not here):
        return site.host
    return site.address
