"""The API server of Kubernetes over HTTP: the verbs that pilots need, as JSON.

A thin client of httpx, which the client of the server uses as well (docs/adr/0023-kubernetes-over-httpx.md). Answers
become errors by who must act: EngineAway for what a retry may help with, SpecError for what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from penstock.cluster.kubernetes.access import Access
from penstock.cluster.provisioner import EngineAway
from penstock.errors import SpecError, UserError

Object = dict[str, Any]
LIMIT_S = 30.0
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
"""Lists such as conditions are merged by their key."""


class Missing(UserError):
    """There is no such object."""

    code = "not_found"


class Exists(UserError):
    """There is such an object already, or it has changed meanwhile."""

    code = "conflict"


class Expired(EngineAway):
    """The resource version of a watch is too old; list again."""


class Api:
    """One API server, as one user. Thread-safe."""

    def __init__(self, access: Access) -> None:
        self._access = access
        is_local = httpx.URL(access.server).host in ("localhost", "127.0.0.1", "::1")  # no proxy leads there
        self._client = httpx.Client(base_url=access.server, verify=access.tls, timeout=LIMIT_S, trust_env=not is_local)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, **query: str) -> Object:
        """Return an object, or a list of them."""
        return self._call("GET", path, query=query)

    def create(self, path: str, body: Object) -> Object:
        """Create an object in a collection. Raises Exists."""
        return self._call("POST", path, body)

    def patch(self, path: str, body: Object, kind: str = MERGE) -> Object:
        """Change some fields."""
        return self._call("PATCH", path, body, kind=kind)

    def delete(self, path: str, propagation: str = "Background") -> None:
        """Delete an object, unless it is gone."""
        try:
            self._call("DELETE", path, {"propagationPolicy": propagation})
        except Missing:
            pass

    def watch(self, path: str, query: Mapping[str, str], limit_s: float) -> Iterator[Object]:
        """Yield the events of a collection until the server ends the watch, `limit_s` from now. Raises Expired."""
        asked = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": f"{limit_s:.0f}"}
        timeout = httpx.Timeout(LIMIT_S, read=limit_s + LIMIT_S)
        with _away(), self._client.stream("GET", path, params=asked, headers=self._headers(), timeout=timeout) as found:
            if found.is_error:
                found.read()
                raise refusal(found.status_code, _message(found))
            for line in found.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise refusal(event["object"].get("code", 500), event["object"].get("message", ""))
                yield event

    def _call(
        self, verb: str, path: str, body: Object | None = None, *, query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:  # fmt: skip
        headers = {**self._headers(), "Content-Type": kind}
        content = json.dumps(body).encode() if body is not None else None
        with _away():
            answer = self._client.request(verb, path, content=content, params=query, headers=headers)
        if answer.is_error:
            raise refusal(answer.status_code, f"{verb} {path}: {_message(answer)}")
        return dict(answer.json())

    def _headers(self) -> dict[str, str]:
        token = self._access.token()
        return {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}


@contextmanager
def _away() -> Generator[None]:
    """Turn errors of the connection into EngineAway."""
    try:
        yield
    except (httpx.TransportError, httpx.StreamError, json.JSONDecodeError) as error:
        raise EngineAway(f"the API server of Kubernetes cannot be reached: {error!r}") from error


def refusal(status: int, message: str) -> UserError | EngineAway:
    """Return the error of an HTTP status."""
    text = f"Kubernetes answers {status}: {message}"
    if status == 404:
        return Missing(text)
    if status == 409:
        return Exists(text)
    if status == 410:
        return Expired(text)
    return EngineAway(text) if status == 429 or status >= 500 else SpecError(text)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
