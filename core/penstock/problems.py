"""Errors that answers of the REST API stand for (RFC 9457 problems), as `penstock.client` raises them. No torch."""

from __future__ import annotations

import httpx

from penstock.errors import PenstockError, SpecError, Unavailable, UserError
from penstock.tls import ClientCertificate, advice_on_silence


class AuthError(UserError):
    """The server does not accept the token, or the token lacks a scope."""

    code = "auth_error"


class NotFound(UserError):
    """There is no such job, node, replica or token."""

    code = "not_found"


class Conflict(UserError):
    """The call contradicts the present state of the thing."""

    code = "conflict"


def problem(answer: httpx.Response) -> PenstockError:
    """Return the error that an RFC 9457 answer stands for. Its text holds the server's detail, pointers and hint."""
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    text = str(body.get("detail") or body.get("title") or f"HTTP {answer.status_code} from {answer.request.url}")
    errors = [item for item in body.get("errors") or [] if isinstance(item, dict)]
    text += "".join(f"\n  {item.get('pointer') or '/'}: {item.get('message', '')}" for item in errors)
    if body.get("hint"):
        text += f"\n{body['hint']}"
    was_handled = body.get("code") != "no_leader"
    return _error_class(answer.status_code)(
        text, status=answer.status_code, errors=errors, **({} if was_handled else {"was_handled": False})
    )


def unreachable(url: str, error: httpx.TransportError, certificate: ClientCertificate | None) -> Unavailable:
    """Return the error of a request that got no answer."""
    was_handled = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):  # something is there
        silence = advice_on_silence(url, certificate)
        if silence:
            return Unavailable(f"{url} has closed the connection without an answer ({error}){silence}")
    text = f"no Penstock server answers at {url} ({error}); start one with 'penstock up', or give --url"
    return Unavailable(text, **({} if was_handled else {"was_handled": False}))


def may_be_repeated(error: Unavailable, method: str) -> bool:
    """Return whether a request can be sent to another server: no server has handled it, or it got no answer and reads.

    A 503 of a server that leads is its answer: another address would give the same.
    """
    is_answer = getattr(error, "status", None) is not None
    return not getattr(error, "was_handled", True) or (method == "GET" and not is_answer)


def _error_class(status: int) -> type[PenstockError]:
    known: dict[int, type[PenstockError]] = {
        401: AuthError,
        403: AuthError,
        404: NotFound,
        409: Conflict,
        412: Conflict,
    }
    if status in known:
        return known[status]
    if status == 429 or status >= 500:
        return Unavailable
    return SpecError
