"""Principals, and what a scope opens. Pure.

A token has its scopes in all projects, or a role in each of those that it is for. The guard decides by project for
every call on one job; any other call is closed to a token of the second kind, unless its endpoint says `@by_project`:
then it shows and takes what is of the token's projects alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from penstock_server.auth.secrets import TokenKind

Scope = Literal["read", "submit", "admin", "attach", "agent"]
Role = Literal["viewer", "runner", "admin"]

SCOPE_OF: dict[Role, Scope] = {"viewer": "read", "runner": "submit", "admin": "admin"}
"""The scope that a role stands for."""
READ = frozenset({"read"})

#: What a scope brings with it. An administrator may do all that a person does, but is no agent.
_IMPLIED: dict[str, frozenset[str]] = {
    "admin": frozenset({"read", "submit", "attach"}),
    "submit": frozenset({"read"}),
}

ANY = "any"
OPEN = "open"

_ATTRIBUTE = "__penstock_scopes__"
_BY_PROJECT = "__penstock_by_project__"
E = TypeVar("E", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a token. `by_cookie`: it came from a browser, whose Origin has to be checked.

    `projects`: the only ones that it is for, with its role; None: all of them, by its scopes.
    """

    token_id: str
    kind: TokenKind
    name: str
    scopes: frozenset[str]
    node_id: str | None = None
    by_cookie: bool = False
    projects: Mapping[str, Role] | None = None

    def may(self, needed: Collection[str]) -> bool:
        """Whether one of the scopes that are needed is held, be it in one project (ANY: every principal may)."""
        return ANY in needed or _opens(self.scopes, needed)

    def may_in(self, project: str, needed: Collection[str]) -> bool:
        """Whether one of the scopes that are needed is held in a project."""
        if self.projects is None:
            return self.may(needed)
        role = self.projects.get(project)
        return role is not None and _opens({SCOPE_OF[role]}, needed)

    def projects_with(self, needed: Collection[str]) -> frozenset[str] | None:
        """Return the projects in which one of the scopes that are needed is held; None: not restricted to any."""
        if self.projects is None:
            return None
        return frozenset(name for name in self.projects if self.may_in(name, needed))


def _opens(scopes: Collection[str], needed: Collection[str]) -> bool:
    held = set(scopes).union(*(_IMPLIED.get(scope, frozenset()) for scope in scopes))
    return not held.isdisjoint(needed)


def scopes_of_roles(roles: Collection[Role]) -> list[str]:
    """Return the scopes that roles stand for, sorted."""
    return sorted({SCOPE_OF[role] for role in roles})


def by_project(endpoint: E) -> E:
    """Declare that an endpoint gives and takes what is of the token's projects alone. Without it, it needs all."""
    setattr(endpoint, _BY_PROJECT, True)
    return endpoint


def is_by_project(endpoint: object) -> bool:
    """Return whether an endpoint declared that it heeds the projects of a token."""
    return getattr(endpoint, _BY_PROJECT, False) is True


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
