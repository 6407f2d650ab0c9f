"""The one door: a dependency of each router (`routers.guarded`), so of every HTTP route and websocket.

Deny by default: an endpoint that declares no scope is closed. A public one says so
with `@unauthenticated`; static files are such an endpoint. Nothing is decided by how a path looks.
A browser sends a cookie on its own, so a write or a websocket that rests on one must come from our own pages: every
browser that we support sends an Origin with those, so a missing one is refused.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from penstock.compat.uvicorn import PEER_CERTIFICATE
from penstock_server import acting
from penstock_server.auth.certificates import check_node
from penstock_server.auth.principal import ANY, OPEN, READ, Principal, is_by_project, scopes_of
from penstock_server.problems import NotFound, Problem
from penstock_server.runtime import Runtime

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def origin_allowed(origin: str | None, *, scheme: str, host: str | None, extra: Collection[str]) -> bool:
    """Whether `origin` is the server's own address as the request names it, or one that was configured."""
    if origin is None:
        return False
    own = {"ws": "http", "wss": "https"}.get(scheme, scheme)
    return origin in extra or (host is not None and origin == f"{own}://{host}")


def host_allowed(host: str | None, *, own: str, extra: Collection[str]) -> bool:
    """Whether a request that names `host` may be meant for this server.

    A page of another site can have its own name resolve to this machine, and then reads what the server answers: so a
    name has to be known. An address is no name, and programs that send no Host are no browsers.
    """
    if not host:
        return True
    name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        known = {"localhost", own, socket.gethostname(), *extra}
        return name in {one.lower() for one in known}
    return True


async def guard(conn: HTTPConnection) -> None:
    """Let the request pass, or raise a problem (401 who are you, 403 you may not)."""
    needed = scopes_of(conn.scope.get("endpoint"))
    runtime: Runtime = conn.app.state.runtime
    if OPEN in needed:
        _begin(conn, runtime, None)
        return
    principal = await _authenticate(conn, runtime)
    if principal is None:
        if "authorization" in conn.headers or runtime.tokens.cookie in conn.cookies:
            count_wrong(conn, runtime)
        raise Problem(
            401,
            "unauthenticated",
            "no valid token or session came with this request",
            hint="send 'Authorization: Bearer <token>'; the administrator's token lies in admin.token of the "
            "server's state folder. In a browser, log in with a code from `penstock login-link`.",
        )
    _count(conn, runtime, principal)
    if principal.by_cookie:
        _check_origin(conn, runtime)
    if principal.node_id is not None and runtime.settings.tls_client_ca is not None:
        check_node(certificate_of(conn), await runtime.nodes.name_of(principal.node_id))
    if not principal.may(needed):
        raise _lacks(principal, needed)
    if principal.projects is not None and ANY not in needed:
        await _check_project(conn, runtime, principal, needed)
    conn.state.principal = principal
    _begin(conn, runtime, principal)


def _count(conn: HTTPConnection, runtime: Runtime, principal: Principal) -> None:
    """Count a request by its token; raise a problem (429) for too many. A websocket is one, and not counted."""
    if conn.scope["type"] == "http" and runtime.rates.note(principal.token_id, runtime.clock.monotonic()):
        raise Problem(
            429,
            "too_many_requests",
            f"token {principal.name!r} sends more than {runtime.settings.requests_per_s:g} requests a second",
            hint="wait a second (Retry-After), and send fewer: 'wait' and websockets report changes without polling",
        )


def _lacks(principal: Principal, needed: Collection[str], where: str = "") -> Problem:
    wanted = " or ".join(sorted(needed)) or "none that can be given"
    return Problem(403, "forbidden", f"token {principal.name!r} lacks the scope that this needs{where}: {wanted}")


async def _check_project(conn: HTTPConnection, runtime: Runtime, principal: Principal, needed: Collection[str]) -> None:
    """Raise a problem if a token that is for some projects may not do this. A job of another project is not there."""
    job_id = conn.path_params.get("job_id")
    if job_id is not None:
        project = await runtime.jobs.project_of(job_id)
        if not principal.may_in(project, READ):
            raise NotFound("job", job_id)
        if not principal.may_in(project, needed):
            raise _lacks(principal, needed, f" in project {project!r}")
    elif not is_by_project(conn.scope.get("endpoint")):
        raise Problem(
            403,
            "restricted_token",
            f"token {principal.name!r} is for {_named(principal)} alone; this needs one for all projects",
            hint="ask an administrator: penstock token create NAME --scope …",
        )


def _named(principal: Principal) -> str:
    names = ", ".join(repr(name) for name in sorted(principal.projects or ()))
    return f"project {names}" if len(principal.projects or ()) == 1 else f"projects {names}"


def require_project(principal: Principal, project: str, needed: Collection[str]) -> None:
    """Raise a problem (403) unless one of the scopes that are needed is held in a project that the caller names."""
    if principal.may_in(project, needed):
        return
    allowed = ", ".join(sorted(principal.projects_with(needed) or ())) or "none"
    raise Problem(
        403,
        "foreign_project",
        f"token {principal.name!r} may not do this in project {project!r}",
        hint=f"name one that it may: {allowed} ('project' in a job's description)",
    )


def certificate_of(conn: HTTPConnection) -> Mapping[str, Any] | None:
    """Return the verified certificate that the peer of a connection has shown, if any."""
    found: Mapping[str, Any] | None = conn.scope.get("state", {}).get(PEER_CERTIFICATE)
    return found


def _begin(conn: HTTPConnection, runtime: Runtime, principal: Principal | None) -> None:
    """Have what the request changes recorded in the audit log. Only now: the use of a token is no change."""
    if conn.scope["type"] != "http" or conn.scope["method"] in SAFE_METHODS:
        return
    request = _described(conn, runtime, status=conn.scope["route"].status_code or 200)
    if principal is not None:
        request.token_id, request.token_name = principal.token_id, principal.name
    request.subject = next(iter(conn.path_params.values()), "")
    acting.begin(request)


def _described(conn: HTTPConnection, runtime: Runtime, *, status: int) -> acting.Request:
    return acting.Request(
        at=runtime.clock.now(),
        peer=_peer(conn),
        method=conn.scope.get("method", "GET"),  # a websocket begins as one
        route=conn.scope["route"].path_format,
        status=status,
        request_id=conn.scope["penstock.request_id"],
    )


def _peer(conn: HTTPConnection) -> str:
    return conn.client.host if conn.client else ""


def count_wrong(conn: HTTPConnection, runtime: Runtime) -> None:
    """Count a secret that opens nothing; raise a problem (429) for a peer that has sent too many."""
    if runtime.wrong.note(_peer(conn), runtime.clock.monotonic()):
        runtime.audit.refuse(_described(conn, runtime, status=429))
        raise Problem(429, "too_many_wrong_secrets", "too many wrong tokens or codes came from this address; wait")


async def _authenticate(conn: HTTPConnection, runtime: Runtime) -> Principal | None:
    header = conn.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        return await runtime.tokens.bearer(secret.strip()) if scheme.lower() == "bearer" else None
    cookie = conn.cookies.get(runtime.tokens.cookie)
    return await runtime.tokens.session(cookie) if cookie else None


def _check_origin(conn: HTTPConnection, runtime: Runtime) -> None:
    if conn.scope["type"] == "http" and conn.scope["method"] in SAFE_METHODS:
        return
    origin = conn.headers.get("origin")
    allowed = origin_allowed(
        origin,
        scheme=conn.url.scheme,
        host=conn.headers.get("host"),
        extra=runtime.settings.allowed_origins,
    )
    if not allowed:
        raise Problem(403, "foreign_origin", f"a browser at {origin or 'an unnamed origin'} may not do this")


def principal_of(conn: HTTPConnection) -> Principal:
    """Return the principal. Only for endpoints that the guard let pass with a token."""
    found = conn.state.principal
    assert isinstance(found, Principal)
    return found
