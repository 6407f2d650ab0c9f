"""Errors as RFC 9457 problems. The mapping of exception classes to HTTP statuses stands here, once."""

from __future__ import annotations

import errno
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from penstock.errors import Bug, PeerError, PenstockError, Unavailable, UserError
from penstock.protocol.jobspec import pointer

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"


class FieldError(BaseModel):
    """One wrong field. `pointer`: RFC 6901, into the request's body."""

    pointer: str
    message: str


class ProblemBody(BaseModel):
    """What the server answers when it cannot do what was asked."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str | None = None
    errors: list[FieldError] | None = None
    request_id: str | None = None


class Problem(Exception):
    """An answer that is a problem. Raised by services and routers; becomes the response."""

    def __init__(self, status: int, code: str, detail: str, *, hint: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.hint = status, code, detail, hint


class NotFound(Problem):
    """There is no such thing."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(404, f"{kind}_not_found", f"there is no {kind} {name!r}")


class Conflict(Problem):
    """The state of the thing does not allow it."""

    def __init__(self, code: str, detail: str, *, hint: str | None = None) -> None:
        super().__init__(409, code, detail, hint=hint)


_STATUS: tuple[tuple[type[PenstockError], int], ...] = (
    (UserError, 422),
    (PeerError, 400),
    (Unavailable, 503),
    (Bug, 500),
)


def status_of(error: PenstockError) -> int:
    """Return the HTTP status of an error of the tree."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def response(
    conn: HTTPConnection,
    status: int,
    code: str,
    detail: str,
    *,
    hint: str | None = None,
    errors: list[FieldError] | None = None,
) -> JSONResponse:
    """Compose the response of a problem."""
    for item in errors or ():
        item.pointer, item.message = _printable(item.pointer), _printable(item.message)
    body = ProblemBody(
        type="about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=_printable(detail),
        code=code,
        hint=None if hint is None else _printable(hint),
        errors=errors,
        request_id=conn.scope.get("penstock.request_id"),
    )
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}.get(status)
    return JSONResponse(body.model_dump(exclude_none=True), status, headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem, on HTTP and (before the handshake) on websockets."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(OSError, _on_os_error)
    app.add_exception_handler(Exception, _on_unhandled)


def _printable(text: str) -> str:
    """Spell out what UTF-8 cannot hold, so that what was wrong in a request can be quoted in the answer."""
    return text.encode(errors="backslashreplace").decode()


async def _answer(conn: HTTPConnection, answer: JSONResponse) -> JSONResponse:
    if isinstance(conn, WebSocket):
        await conn.send_denial_response(answer)
    return answer


async def _on_problem(conn: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return await _answer(conn, response(conn, error.status, error.code, error.detail, hint=error.hint))


async def _on_penstock_error(conn: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError)
    return await _answer(conn, response(conn, status_of(error), error.code, str(error)))


async def _on_validation_error(conn: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [_field_error(item) for item in error.errors()]
    first = errors[0]
    detail = f"{first.pointer or 'the request'}: {first.message}"
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more)"
    return await _answer(conn, response(conn, 422, "invalid_request", detail, errors=errors))


def _field_error(item: dict[str, Any]) -> FieldError:
    where, *rest = item["loc"]
    # A model validator reports its model; JSON that cannot be read reports a byte offset, which is no field.
    if where == "body" and item["type"] == "json_invalid":
        return FieldError(pointer="", message=f"the body is no JSON: {item['ctx']['error']} at byte {rest[0]}")
    at = pointer(tuple(rest)) if where == "body" else f"{where}:{'.'.join(map(str, rest))}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] not in ("missing", "value_error") and isinstance(item.get("input"), str | int | float | None):
        message += f"; got {str(item.get('input'))[:100]!r}"
    return FieldError(pointer=at, message=message)


async def _on_http_exception(conn: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return await _answer(conn, _not_allowed(conn))
    code = {404: "not_found", 413: "body_too_large"}.get(error.status_code, "http_error")
    detail = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"{conn.scope.get('method', 'GET')} {conn.url.path}: {detail}"
    answer = response(conn, error.status_code, code, detail)
    answer.headers.update(error.headers or {})
    return await _answer(conn, answer)


def _not_allowed(conn: HTTPConnection) -> JSONResponse:
    """Compose a 405 with what is allowed, by all routes of the path: the framework names one route's. Or a 404."""
    method, path = conn.scope["method"], conn.url.path
    allowed = conn.app.state.methods_of(path)
    if not allowed and path.startswith("/api/"):
        return response(conn, 404, "not_found", f"{method} {path}: there is no such call; /openapi.json lists them all")
    names = ", ".join(allowed or ("GET", "HEAD"))  # else it is the dashboard's
    answer = response(conn, 405, "method_not_allowed", f"{method} {path}: only {names} can be used here")
    answer.headers["Allow"] = names
    return answer


async def _on_os_error(conn: Any, error: Exception) -> JSONResponse:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        log.warning("disk full", path=conn.url.path, error=str(error))
        return await _answer(conn, response(conn, 503, "storage_full", f"the server's disk is full: {error.strerror}"))
    return await _on_unhandled(conn, error)


async def _on_unhandled(conn: Any, error: Exception) -> JSONResponse:
    log.error("unhandled error", path=conn.url.path, exc_info=error)
    detail = "the server failed on this request; its log holds the cause under this request id"
    return response(conn, 500, "internal_error", detail, hint="report it with the request id")
