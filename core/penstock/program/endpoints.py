"""Lists of endpoints as Fluid's arguments and variables write them: "ip:port,ip:port". Pure."""

from __future__ import annotations

from penstock.errors import SpecError


def checked_endpoints(text: str, what: str) -> tuple[str, ...]:
    """Return the endpoints of a list. `what` named them. Raises SpecError for one that is none, or there twice."""
    found = tuple(part.strip() for part in text.split(","))
    for endpoint in found:
        host, _, port = endpoint.rpartition(":")
        if not host or " " in endpoint or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SpecError(f"{what} names {endpoint!r}; expected ip:port, with a port from 1 to 65535", got=endpoint)
        if found.count(endpoint) > 1:
            raise SpecError(f"{what} names {endpoint!r} twice; each process has an endpoint of its own", got=endpoint)
    return found
