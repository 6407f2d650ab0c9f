"""What the REST client makes of a server's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import uvicorn

from penstock.client import AuthError, Client, Conflict, NotFound, is_loopback
from penstock.command.exits import Exit, TimedOut, exit_of
from penstock.connections import LIMITS
from penstock.errors import Bug, PeerError, PenstockError, SpecError, Unavailable


class Answers(HTTPServer):
    """Answers what it was told to, in order; repeats the last."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, bytes]] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def then(self, status: int, body: Any) -> None:
        self.queue.append((status, body if isinstance(body, bytes) else json.dumps(body).encode()))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Answers)
        self.server.paths.append(self.path)
        status, body = self.server.queue.pop(0) if len(self.server.queue) > 1 else self.server.queue[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def answers() -> Iterator[Answers]:
    server = Answers()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(answers: Answers) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{answers.server_address[1]}/", token="secret") as made:
        yield made


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, AuthError, Exit.AUTH),
        (403, AuthError, Exit.AUTH),
        (404, NotFound, Exit.NOT_FOUND),
        (409, Conflict, Exit.CONFLICT),
        (422, SpecError, Exit.USAGE),
        (429, Unavailable, Exit.UNAVAILABLE),
        (503, Unavailable, Exit.UNAVAILABLE),
    ],
)
def test_each_status_has_its_error_and_exit_code(
    answers: Answers, client: Client, status: int, kind: type[PenstockError], code: Exit
) -> None:
    answers.then(status, {"detail": "this is why", "hint": "do that"})
    with pytest.raises(kind, match="this is why\ndo that") as caught:
        client.job("j1")
    assert type(caught.value) is kind
    assert exit_of(caught.value) is code


def test_the_servers_json_pointers_are_shown(answers: Answers, client: Client) -> None:
    errors = [{"pointer": "/spec/trainers/count", "message": "Input should be at least 0"}]
    answers.then(422, {"detail": "the job is not valid", "errors": errors})
    with pytest.raises(SpecError, match="\n  /spec/trainers/count: Input should be at least 0"):
        client.submit({"name": "x"})


def test_submit_is_retried_only_with_an_idempotency_key(answers: Answers, client: Client) -> None:
    answers.then(503, {"detail": "busy"})
    answers.then(201, {"id": "j1"})
    assert client.submit({"name": "x"}, key="k")["id"] == "j1"
    answers.queue = [(503, b"{}")]
    with pytest.raises(Unavailable):
        client.submit({"name": "x"})
    assert len(answers.paths) == 3


def test_an_answer_without_problem_document_names_its_origin(answers: Answers, client: Client) -> None:
    answers.then(502, b"<html>bad gateway</html>")
    with pytest.raises(Unavailable, match="HTTP 502 from http://127"):
        client.job("j1")


def test_another_kind_of_server_is_recognised(answers: Answers, client: Client) -> None:
    answers.then(200, b"<html>hello</html>")
    with pytest.raises(PeerError, match=r"is .* a Penstock server"):
        client.job("j1")


def test_drain_deadline_that_an_older_server_ignores_is_an_error(answers: Answers, client: Client) -> None:
    answers.then(202, {"id": "n1", "state": "DRAINING"})
    with pytest.raises(PeerError, match=r"n1 drains without the deadline of 60 s: .* is older and waits") as caught:
        client.want_node("n1", "drain", deadline_s=60)
    assert exit_of(caught.value) is Exit.UNAVAILABLE
    assert client.want_node("n1", "drain")["state"] == "DRAINING"
    answers.queue = [(202, json.dumps({"id": "n1", "drain_by": None}).encode())]
    assert client.want_node("n1", "drain", deadline_s=0)["id"] == "n1"


def test_pages_are_followed_to_the_last(answers: Answers, client: Client) -> None:
    answers.then(200, {"items": [{"id": "1"}, {"id": "2"}], "next_page_token": "more"})
    answers.then(200, {"items": [{"id": "3"}], "next_page_token": None})
    assert [job["id"] for job in client.jobs(state="RUNNING")] == ["1", "2", "3"]
    assert answers.paths == ["/api/v1/jobs?state=RUNNING", "/api/v1/jobs?state=RUNNING&page_token=more"]


def test_an_id_cannot_leave_its_path(client: Client) -> None:
    for bad in ("../nodes", "a/b", "", "a?b"):
        with pytest.raises(NotFound):
            client.job(bad)


def test_a_url_without_scheme_is_refused() -> None:
    with pytest.raises(SpecError, match="expected http"):
        Client("localhost:7080", token=None)


def test_this_machine_is_never_reached_through_a_proxy() -> None:
    assert [is_loopback(f"http://{host}:1") for host in ("127.0.0.1", "[::1]", "localhost", "example.org")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_exit_status_defaults_to_usage_and_timeouts_have_theirs() -> None:
    assert exit_of(TimedOut("x")) is Exit.TIMEOUT
    assert exit_of(SpecError("x")) is Exit.USAGE
    assert exit_of(Bug("x")) is Exit.USAGE


def test_exchange_cells_are_read_despite_unknown_fields(answers: Answers, client: Client) -> None:
    cell = {
        "trainer": 1, "pserver": 0, "block": "w", "calls": 2, "sent_bytes": 3, "received_bytes": 4, "wait_ns": 5,
        "retries": 6, "staleness": 7, "merges": 8, "joined": 9,
    }  # fmt: skip
    job = {"job_id": "j", "attempt": 1, "pservers": [], "steps": {}}
    answers.then(200, {**job, "cells": [{**cell, "later": 10}]})
    assert [asdict(found) for found in client.exchange("j")["cells"]] == [cell]
    del cell["joined"]
    answers.queue.clear()
    answers.then(200, {**job, "cells": [cell]})
    with pytest.raises(PeerError, match="has no 'joined'"):
        client.exchange("j")


def test_idle_connections_are_given_up_before_servers_close_them() -> None:
    idle_s = LIMITS.keepalive_expiry
    assert idle_s is not None
    assert idle_s < uvicorn.Config("app").timeout_keep_alive - 2
