"""Principals, and what a scope opens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, TypeVar

from penstock_server.auth.secrets import TokenKind

Scope = Literal["read", "submit", "admin", "attach", "agent"]

#: What a scope brings with it. An administrator may do all that a person does, but is no agent.
_IMPLIED: dict[str, frozenset[str]] = {
    "admin": frozenset({"read", "submit", "attach"}),
    "submit": frozenset({"read"}),
}

ANY = "any"
OPEN = "open"

_ATTRIBUTE = "__penstock_scopes__"
E = TypeVar("E", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a token. `by_cookie`: it came from a browser, whose Origin has to be checked."""

    token_id: str
    kind: TokenKind
    name: str
    scopes: frozenset[str]
    node_id: str | None = None
    by_cookie: bool = False

    def may(self, needed: Collection[str]) -> bool:
        """Whether one of the scopes that are needed is held (ANY: every principal may)."""
        if ANY in needed:
            return True
        held = set(self.scopes).union(*(_IMPLIED.get(scope, frozenset()) for scope in self.scopes))
        return not held.isdisjoint(needed)


def scoped(*scopes: Scope) -> Callable[[E], E]:
    """Declare that an endpoint is open to holders of one of `scopes`. Without it, it is closed."""
    return _mark(frozenset(scopes))


def authenticated(endpoint: E) -> E:
    """Declare that an endpoint is open to every holder of a valid token."""
    return _mark(frozenset({ANY}))(endpoint)


def unauthenticated(endpoint: E) -> E:
    """Declare that an endpoint is public. The route walk in the tests holds the whole list."""
    return _mark(frozenset({OPEN}))(endpoint)


def scopes_of(endpoint: object) -> frozenset[str]:
    """Return what an endpoint declared; empty if it declared nothing."""
    found: frozenset[str] = getattr(endpoint, _ATTRIBUTE, frozenset())
    return found


def _mark(scopes: frozenset[str]) -> Callable[[E], E]:
    def mark(endpoint: E) -> E:
        setattr(endpoint, _ATTRIBUTE, scopes)
        return endpoint

    return mark
