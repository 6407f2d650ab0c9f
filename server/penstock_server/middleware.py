"""What every request passes, as pure ASGI: request id, security headers, body limits, counts."""

from __future__ import annotations

import re
import time
from urllib.parse import urlsplit

import structlog
from fastapi import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from penstock.version import __version__
from penstock_server.guard import host_allowed
from penstock_server.problems import response
from penstock_server.runtime import Runtime
from penstock_server.uuid7 import uuid7

PROBES = frozenset({"/healthz", "/readyz"})
"""What probes ask for, by whatever name they know: the answer says nothing that a foreign page may not read."""
SNAPSHOT_PATH = "/api/v1/snapshots"
_REQUEST_ID = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")
_SECURITY: tuple[tuple[bytes, bytes], ...] = (
    (
        b"content-security-policy",
        b"default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        b"connect-src 'self' ws: wss:; worker-src 'self' blob:; object-src 'none'; base-uri 'none'; "
        b"frame-ancestors 'none'; form-action 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


async def _misdirected(scope: Scope, receive: Receive, send: Send) -> None:
    answer = response(
        HTTPConnection(scope),
        421,
        "unknown_host",
        "the request names a host that is not this server's",
        hint="add the name to PENSTOCK_SERVER_ALLOWED_HOSTS, a JSON list",
    )
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await answer(scope, receive, send)


class Envelope:
    """The outermost layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.match(given) else uuid7()
        scope["penstock.request_id"] = request_id
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            if b"authorization" not in headers and not self._is_meant(scope, headers):
                await _misdirected(scope, receive, send)
            elif scope["type"] == "websocket":
                await self._app(scope, receive, send)
            else:
                await self._http(scope, receive, send, request_id)

    def _is_meant(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if scope["path"] in PROBES:
            return True
        settings = scope["app"].state.runtime.settings
        names = [urlsplit(origin).hostname or "" for origin in settings.allowed_origins]
        given = headers.get(b"host", b"").decode("latin-1")
        try:
            return host_allowed(given, own=settings.host, extra=[*settings.allowed_hosts, *names])
        except ValueError:  # brackets that are no address
            return False

    async def _http(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        status, started = 500, time.perf_counter()
        runtime: Runtime = scope["app"].state.runtime
        extra = [*_SECURITY, (b"x-request-id", request_id.encode()), (b"x-server-version", __version__.encode())]

        async def on_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        limit = runtime.settings.max_body_bytes
        if scope["path"] == SNAPSHOT_PATH:
            limit = runtime.settings.max_snapshot_bytes
        try:
            if scope["path"].startswith("/api/") and ("\0" in scope["path"] or b"%00" in scope["query_string"]):
                answer = response(HTTPConnection(scope), 400, "bad_request", "the address holds a NUL character")
                await answer(scope, receive, on_send)
                return
            await self._limited(scope, receive, on_send, limit)
        finally:
            route = getattr(scope.get("route"), "path_format", "(none)")
            runtime.meters.requests.labels(scope["method"], route, str(status)).inc()
            runtime.meters.request_s.labels(route).observe(time.perf_counter() - started)

    async def _limited(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        detail = f"the body is larger than {limit} bytes"
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            answer = response(HTTPConnection(scope), 413, "body_too_large", detail)
            await answer(scope, receive, send)
            return
        taken = 0

        async def on_receive() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > limit:
                    raise HTTPException(413, detail)  # the framework lets only its own kind through here
            return message

        await self._app(scope, on_receive, send)
