"""Submissions that anybody may send: accepted, or refused as documented with the place of each fault; never a 500."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from datetime import date
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.harness import Server, running, settings_for
from tests.support.job_fields import FIELDS, JOBS, VALUES
from tests.support.waiting import LIMIT_S


def as_json(value: object) -> bytes:
    """Return JSON, and what is none in JSON as text."""
    return json.dumps(_plain(value)).encode()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, date | bytes) else value


BODIES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(as_json),
    VALUES.map(lambda value: as_json({"spec": value})),
    st.sampled_from(
        [
            b"[" * 100_000, b'{"spec":' * 5000, b'{"spec": {"name": "\\ud800"}}', b'{"spec": NaN}', b"\xff", b"",
            b'{"spec": {"name": "a", "entrypoint": ["x"], "priority": ' + b"9" * 5000 + b"}}",
            b'{"spec": {"name": "a", "entrypoint": ["x"], "priority": 1e400}}',
            b'{"spec": {"name": "a", "name": 1}}', b'{"spec": null, "spec": 1}', b'\xef\xbb\xbf{}',
        ]
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the administrator, of a server in another thread."""
    started: queue.SimpleQueue[Server] = queue.SimpleQueue()
    ended = threading.Event()

    async def serve() -> None:
        async with running(settings_for(tmp_path_factory.mktemp("server"))) as server:
            started.put(server)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        server = started.get(timeout=LIMIT_S)
        bearer = {"Authorization": f"Bearer {server.admin}"}
        with httpx.Client(base_url=server.url, headers=bearer, timeout=LIMIT_S) as made:
            yield made
    finally:
        ended.set()
        thread.join()


def post(client: httpx.Client, content: bytes) -> httpx.Response:
    return client.post("/api/v1/jobs", content=content, headers={"Content-Type": "application/json"})


def assert_refused(answer: httpx.Response, *statuses: int) -> None:
    """A problem with a sentence, and a JSON pointer for each fault (RFC 9457, RFC 6901)."""
    assert answer.status_code in statuses, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code and problem["title"]
    for fault in problem.get("errors", []):
        assert fault["pointer"] == "" or fault["pointer"].startswith("/")
        assert fault["message"]


@settings(max_examples=30)
@given(job=JOBS)
def test_submission_that_the_schema_allows_is_taken(client: httpx.Client, job: dict[str, Any]) -> None:
    answer = post(client, as_json({"spec": job}))
    if answer.status_code != 201:  # a folder of another machine, and a snapshot that was never uploaded
        assert "workdir" in job or "snapshot" in job
        assert_refused(answer, 404, 409, 422)
    else:
        assert answer.json()["spec"]["name"] == job["name"]
        assert client.post(f"/api/v1/jobs/{answer.json()['id']}:cancel").status_code == 202


@settings(max_examples=60)
@given(job=JOBS, field=st.sampled_from(FIELDS), value=VALUES)
def test_wrong_value_of_a_submission_has_a_pointer(
    client: httpx.Client, job: dict[str, Any], field: str, value: object
) -> None:
    answer = client.post("/api/v1/jobs:plan", content=as_json({"spec": {**job, field: value}}))
    if answer.status_code != 200:
        assert_refused(answer, 404, 409, 422)
        assert answer.json().get("errors") or answer.status_code != 422


@settings(max_examples=60)
@given(body=BODIES)
def test_any_body_of_a_submission_is_refused(client: httpx.Client, body: bytes) -> None:
    assert_refused(post(client, body), 400, 413, 422)
