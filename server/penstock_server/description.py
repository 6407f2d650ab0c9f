"""The OpenAPI document: what FastAPI derives from the endpoints, with every problem and who may call what.

Each operation lists each status that it may answer, never a range: those that follow from its parameters, its body and
its scopes are added here, others (409, a refused code) stand at its route, as `problems(…)`. Every error is
`application/problem+json`. Also the methods of each path, from which a 405 says what is allowed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor

from penstock_server.auth.principal import OPEN, scopes_of
from penstock_server.problems import MEDIA_TYPE

BEARER, SESSION = "bearer", "session"
SESSION_COOKIE = "penstock_session"
_SCHEMES = {
    BEARER: {"type": "http", "scheme": "bearer", "description": "a token of a person (psu_…) or of a node (psn_…)"},
    SESSION: {
        "type": "apiKey",
        "in": "cookie",
        "name": SESSION_COOKIE,
        "description": "a browser's session; with it, a write has to come from the server's own Origin",
    },
}
_PROBLEM = {"$ref": "#/components/schemas/ProblemBody"}


class _Identifier(Convertor[str]):
    """A segment of a path without a colon: what follows one is a verb, and `x:cancel` is no job."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _Identifier())


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declare problems that an endpoint answers besides those that follow from its declaration."""
    return {status: {"description": HTTPStatus(status).phrase} for status in statuses}


def complete(document: dict[str, Any], routers: Sequence[APIRouter], *, cookie: str = SESSION_COOKIE) -> dict[str, Any]:
    """Add problems and security to what FastAPI describes, in place. `cookie`: the name of the session's."""
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which are never sent
        schemas.pop(name, None)
    document["components"]["securitySchemes"] = {**_SCHEMES, SESSION: {**_SCHEMES[SESSION], "name": cookie}}
    answers: dict[str, Any] = document["components"].setdefault("responses", {})
    scopes = {route.operation_id: scopes_of(route.endpoint) for route in _routes(routers)}
    for path, item in document["paths"].items():
        for operation in item.values():
            needed = scopes[operation["operationId"]]
            operation["security"] = [] if OPEN in needed else [{BEARER: []}, {SESSION: []}]
            if OPEN not in needed:
                operation["description"] = f"{operation.get('description', '')}\n\nScopes: {', '.join(sorted(needed))}."
            found = operation["responses"]
            found.pop("422", None)  # as FastAPI describes it
            declared = {int(status) for status in found if int(status) >= 400}
            for status in declared | set(_statuses(path, operation, needed)):
                found[str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}
                answers.setdefault(_name(status), _response(status))
            operation["responses"] = dict(sorted(found.items()))
    return document


def _name(status: int) -> str:
    return HTTPStatus(status).phrase.replace(" ", "")


def _statuses(path: str, operation: dict[str, Any], needed: frozenset[str]) -> Iterator[int]:
    """Give the statuses of problems that follow from an operation's declaration."""
    yield from (400, 421, 500, 503)
    if OPEN not in needed:
        yield from (401, 403, 429)
    if "{" in path:
        yield 404
    if "requestBody" in operation:
        yield 413
    if "requestBody" in operation or any(one["in"] != "path" for one in operation.get("parameters", ())):
        yield 422


def _response(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
    }
    if status == HTTPStatus.UNAUTHORIZED:
        described["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        described["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "seconds"}}
    return described


def methods_of(path: str, routers: Sequence[APIRouter]) -> list[str]:
    """Return the methods that the described calls at `path` take; none if there is no such path."""
    found = (route.methods or set() for route in _routes(routers) if route.path_regex.match(path))
    return sorted(set().union(*found))


def _routes(routers: Sequence[APIRouter]) -> Iterator[APIRoute]:
    """Give every HTTP route that is a call: not those that serve the dashboard's files."""
    for router in routers:
        if router.include_in_schema:
            yield from (route for route in router.routes if isinstance(route, APIRoute))
