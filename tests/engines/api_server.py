"""A stand-in for the API server of Kubernetes, over HTTP: objects, resource versions, label selectors, watches.

It speaks create, get, list, patch, delete and watch as the real one does for what pilots use: 401, 404, 409, 410 Gone,
422 for what the schema of the newest release refuses, optimistic history that can be compacted, foreground deletion.
What happens to objects then is the business of `cluster_stand_in`, whose `settle` runs under the lock of the store.
"""

from __future__ import annotations

import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate

Object = dict[str, Any]
TOKEN = "token of the tests"
CREATED = "2026-01-01T00:00:{:02}Z"


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Store:
    """All objects, and what happened to them. Every method needs `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.objects: dict[tuple[str, str], Object] = {}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version, self.oldest, self.is_closed = 1, 0, False
        self.settle: Callable[[], None] = lambda: None

    def of(self, plural: str) -> list[Object]:
        return [one for (kind, _), one in self.objects.items() if kind == plural]

    def get(self, plural: str, name: str) -> Object:
        if (plural, name) not in self.objects:
            raise Refused(404, f'{plural} "{name}" not found')
        return self.objects[plural, name]

    def add(self, plural: str, made: Object) -> Object:
        name = made["metadata"]["name"]
        if (plural, name) in self.objects:
            raise Refused(409, f'{plural} "{name}" already exists')
        made["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=CREATED.format(self.version % 60))
        self.objects[plural, name] = made
        self.note("ADDED", plural, made)
        return made

    def changed(self, plural: str, one: Object) -> None:
        self.note("MODIFIED", plural, one)

    def remove(self, plural: str, one: Object) -> None:
        del self.objects[plural, one["metadata"]["name"]]
        self.note("DELETED", plural, one)

    def note(self, event: str, plural: str, one: Object) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, plural, event, json.loads(json.dumps(one))))
        self.lock.notify_all()

    def wait_for_more(self, seen: int, limit_s: float) -> bool:
        """Wait for a change after a version; returns whether there was one before the time, or the server, ended."""
        self.lock.wait_for(lambda: self.version > seen or self.is_closed, limit_s)
        return self.version > seen

    def compact(self) -> None:
        """Forget the history: watches from before are answered with 410."""
        self.version += 1
        self.history.clear()
        self.oldest = self.version
        self.lock.notify_all()


class ApiServer:
    """The server on a free port of the loopback, over HTTPS if it has a context for that."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.store = Store()
        self.refused: list[tuple[str, str, int]] = []
        self.requests: list[str] = []
        outer = self

        class Handler(_Handler):
            owner = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True  # of idle connections
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def refuse_at(self, verb: str, plural: str, status: int) -> None:
        """Answer the next such request, that is no watch, with a status."""
        self.refused.append((verb, plural, status))

    def stop_watches(self) -> None:
        """End all watches, and answer further ones with 503."""
        with self.store.lock:
            self.store.is_closed = True
            self.store.lock.notify_all()

    def resume_watches(self) -> None:
        """Take watches again."""
        self.store.is_closed = False

    def __exit__(self, *_: object) -> None:
        self.stop_watches()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: ApiServer
    protocol_version = "HTTP/1.1"
    timeout = 1.0  # an idle connection does not hold up the end of a test

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        self.owner.requests.append(f"{self.command} {parts.path}{' watch' if 'watch' in query else ''}")
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized")
            plural, *rest = parts.path.partition("/namespaces/pilots/")[2].split("/")
            for one in self.owner.refused:
                if one[:2] == (self.command, plural) and "watch" not in query:
                    self.owner.refused.remove(one)
                    raise Refused(one[2], "refused by the test")
            if "watch" in query:
                if self.owner.store.is_closed:
                    raise Refused(503, "no watches now")
                return self._watch(plural, query)
            with self.owner.store.lock:
                answer = json.dumps(self._answer(plural, rest, query, body))
        except Refused as refused:
            status = {"kind": "Status", "code": refused.status, "message": refused.message}
            return self._send(refused.status, json.dumps(status))
        self._send(200, answer)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _answer(self, plural: str, rest: list[str], query: dict[str, str], body: Object) -> Object:
        store = self.owner.store
        if self.command == "POST":
            validate(body)
            made = store.add(plural, body)
            store.settle()
            return made
        if not rest:
            items = [one for one in store.of(plural) if _selects(query, one)]
            return {"metadata": {"resourceVersion": str(store.version)}, "items": items}
        one = store.get(plural, rest[0])
        if self.command == "PATCH":
            _patch(one, body, self.headers["Content-Type"])
            store.changed(plural, one)
        elif self.command == "DELETE":
            one["metadata"].setdefault("deletionTimestamp", CREATED.format(0))
            if body.get("propagationPolicy") == "Foreground":
                one["metadata"]["finalizers"] = ["foregroundDeletion"]
            store.changed(plural, one)
        store.settle()
        return one

    def _watch(self, plural: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self._events(plural, query):
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _events(self, plural: str, query: dict[str, str]) -> Iterator[Object]:
        store, seen = self.owner.store, int(query["resourceVersion"])
        waited = False
        while True:
            with store.lock:
                if seen < store.oldest:
                    gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {seen}"}
                    found: list[tuple[int, str, str, Object]] | None = None
                else:
                    found = [one for one in store.history if one[0] > seen]
                    if not found and not waited:
                        waited = not store.wait_for_more(seen, float(query["timeoutSeconds"]))
                        continue
                latest = store.version
            if found is None:
                yield {"type": "ERROR", "object": gone}
                return
            yield from (
                {"type": event, "object": one} for _, kind, event, one in found
                if kind == plural and _selects(query, one)
            )  # fmt: skip
            seen = latest
            if waited:
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(latest)}}}
                return

    def _send(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def validate(made: Object, release: str = "") -> None:
    """Refuse what the schema of a release of Kubernetes does not allow; of the newest one without a name."""
    try:
        kubernetes_validate.validate(made, release or kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(422, str(error)) from error


def _selects(query: dict[str, str], one: Object) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(labels.get(key) == value for key, _, value in wanted)


def _patch(one: Object, body: Object, kind: str) -> None:
    """Merge; in a strategic merge conditions are merged by their type."""
    for key, value in body.items():
        if isinstance(value, dict):
            _patch(one.setdefault(key, {}), value, kind)
        elif key == "conditions" and kind.startswith("application/strategic"):
            kept = {entry["type"]: entry for entry in [*one.get(key, []), *value]}
            one[key] = list(kept.values())
        else:
            one[key] = value
