"""Text that a database, or UTF-8, cannot hold is refused before anything is stored, and named by a JSON pointer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.harness import Server

pytestmark = pytest.mark.asyncio

BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"entrypoint": ["python", "\ud800"]}, "/spec/entrypoint/1"),
    ({"entrypoint": ["a\0b"]}, "/spec/entrypoint/0"),
    ({"env": {"K": "\udfff"}}, "/spec/env/K"),
    ({"env": {"K": "a\0b"}}, "/spec/env/K"),
    ({"env": {"a\0b": "x"}}, "/spec/env/a\0b/[key]"),
    ({"workdir": "\ud83d"}, "/spec/workdir"),
    ({"name": "\ud800"}, "/spec/name"),
]


def whole(spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": "job", "entrypoint": ["true"], **spec}


async def post(server: Server, what: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps(body)  # ASCII: the client's own JSON cannot write half a surrogate pair
    return await server.http.post(f"/api/v1/{what}", content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("spec", "pointer"), BAD_SPECS)
async def test_spec_with_unstorable_text_is_refused_and_not_stored(
    sqlite_server: Server, spec: dict[str, Any], pointer: str
) -> None:
    answer = await post(sqlite_server, "jobs", {"spec": whole(spec)})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
    assert answer.json()["errors"][0]["pointer"] == pointer
    assert (await sqlite_server.http.get("/api/v1/jobs")).json()["items"] == []


async def test_surrogate_in_a_key_is_answered_and_not_stored(sqlite_server: Server) -> None:
    for spec in ({"env": {"\ud800": "x"}}, {"\ud800": 1}):
        answer = await post(sqlite_server, "jobs", {"spec": whole(spec)})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
    assert (await sqlite_server.http.get("/api/v1/jobs")).json()["items"] == []


async def test_names_of_tokens_and_nodes_are_checked_too(server: Server) -> None:
    for name in ("a\0b", "\ud800"):
        answer = await post(server, "tokens", {"name": name, "scopes": ["read"]})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/name"), answer.text
        node = {"join_token": "x", "name": name, "host": "h", "cpus": 1, "gpus": 0, "memory_bytes": 1, "version": ""}
        answer = await post(server, "nodes", node)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/name"), answer.text


async def test_text_beyond_the_basic_plane_is_kept_as_it_is(server: Server) -> None:
    job = await server.submit(entrypoint=["echo", "\U0001f6b0"], env={"K": "zwölf"})
    assert job["spec"]["entrypoint"] == ["echo", "\U0001f6b0"]
