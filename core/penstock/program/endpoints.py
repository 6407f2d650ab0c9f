"""Lists of endpoints as Fluid's arguments and variables write them: "ip:port,ip:port". Pure."""

from __future__ import annotations

from collections.abc import Sequence

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


def endpoints_problem(endpoints: Sequence[str]) -> str:
    """Return what is wrong with a list of endpoints, or an empty text."""
    for endpoint in endpoints:
        host, colon, port = endpoint.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            return f"{endpoint!r} is no host:port with a port from 1 to 65535"
    twice = sorted({e for e in endpoints if list(endpoints).count(e) > 1})
    return f"{twice[0]!r} stands there twice" if twice else ""
