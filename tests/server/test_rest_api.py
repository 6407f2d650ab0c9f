"""The REST API, on both databases: jobs and their pages, problems, idempotency, tokens, sessions, snapshots."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import httpx
import pytest
from sqlalchemy import delete
from tests.server.harness import Server
from tests.support.waiting import LIMIT_S, until_answer

from penstock.protocol.jobspec import JobSpec
from penstock_server.app import app_of
from penstock_server.tables import SnapshotRow

pytestmark = pytest.mark.asyncio

TARBALL = b"\x1f\x8b" + b"not really a tarball"


async def test_submitted_job_is_returned_as_listed_and_as_gotten(server: Server) -> None:
    job = await server.submit(name="ctr", entrypoint=["python", "train.py"])
    assert re.fullmatch(r"[0-9a-f-]{36}", job["id"])
    assert JobSpec.model_validate(job["spec"]).entrypoint == ["python", "train.py"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", job["created_at"])
    got = await until_answer(lambda: server.job(job["id"]), lambda j: j["why"] != job["why"])
    listed = (await server.http.get("/api/v1/jobs")).json()["items"]
    assert listed == [got]


async def test_pages_are_newest_first_complete_and_without_repetition(server: Server) -> None:
    made = [(await server.submit(name=f"job-{i}"))["id"] for i in range(5)]
    seen: list[str] = []
    token: str | None = None
    while True:
        parameters: dict[str, Any] = {"page_size": 2} | ({"page_token": token} if token else {})
        page = (await server.http.get("/api/v1/jobs", params=parameters)).json()
        seen += [job["id"] for job in page["items"]]
        token = page["next_page_token"]
        if token is None:
            break
        await server.submit(name="later")  # a job that comes in between shifts nothing
    assert seen == made[::-1]


async def test_jobs_are_filtered_by_state_and_name(server: Server) -> None:
    first, second = await server.submit(name="a"), await server.submit(name="b")
    await server.http.post(f"/api/v1/jobs/{first['id']}:cancel")

    async def ids(**parameters: str) -> list[str]:
        answer = await server.http.get("/api/v1/jobs", params=parameters)
        return [job["id"] for job in answer.json()["items"]]

    assert await ids(state="CANCELLED") == [first["id"]]
    assert await ids(name="b") == [second["id"]]
    assert (await server.http.get("/api/v1/jobs?state=SLEEPING")).status_code == 422


@pytest.mark.parametrize(
    ("spec", "pointer", "says"),
    [
        ({"name": "Bad Name", "entrypoint": ["x"]}, "/spec/name", "pattern"),
        ({"name": "x", "entrypoint": []}, "/spec/entrypoint", "at least 1"),
        ({"name": "x", "entrypoint": ["x"], "trainers": {"memory": "2 potatoes"}}, "/spec/trainers/memory", "2GiB"),
        ({"name": "x", "entrypoint": ["x"], "trainrs": {}}, "/spec/trainrs", "not permitted"),
        ({"name": "x", "entrypoint": ["x"], "mode": "pserver"}, "/spec", "at least one pserver"),
        ({"entrypoint": ["x"]}, "/spec/name", "required"),
        (
            {"name": "x", "entrypoint": ["x"], "env": {"PENSTOCK_EPOCH": "9"}},
            "/spec/env/PENSTOCK_EPOCH",
            "leave it out",
        ),
    ],
)
async def test_wrong_field_is_a_problem_with_its_pointer(
    sqlite_server: Server, spec: dict[str, Any], pointer: str, says: str
) -> None:
    answer = await sqlite_server.http.post("/api/v1/jobs", json={"spec": spec})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    problem = answer.json()
    assert problem["code"] == "invalid_request"
    [error] = problem["errors"]
    assert error["pointer"] == pointer
    assert says in error["message"]
    assert pointer in problem["detail"]


async def test_body_that_is_no_json_is_a_problem(sqlite_server: Server) -> None:
    answer = await sqlite_server.http.post(
        "/api/v1/jobs", content=b"{nope", headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert "no JSON" in answer.json()["detail"]


async def test_unknown_things_and_methods_are_problems(sqlite_server: Server) -> None:
    http = sqlite_server.http
    for method, path, status, code in (
        ("GET", "/api/v1/jobs/nope", 404, "job_not_found"),
        ("POST", "/api/v1/jobs/nope:cancel", 404, "job_not_found"),
        ("GET", "/api/v1/jobs/nope/logs", 404, "job_not_found"),
        ("GET", "/api/v1/jobs/nope/metrics", 404, "job_not_found"),
        ("GET", "/api/v1/jobs/nope/frames", 404, "job_not_found"),
        ("GET", f"/api/v1/graphs/{'0' * 64}", 404, "graph_not_found"),
        ("GET", f"/api/v1/snapshots/{'0' * 64}", 404, "snapshot_not_found"),
        ("POST", "/api/v1/nodes/nope:drain", 404, "node_not_found"),
        ("DELETE", "/api/v1/tokens/nope", 404, "token_not_found"),
        ("GET", "/api/v1/nope", 404, "not_found"),
        ("PUT", "/api/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/api/v1/jobs?page_token=***", 422, "invalid_page_token"),
        ("GET", "/api/v1/jobs?page_size=1000", 422, "invalid_request"),
    ):
        answer = await http.request(method, path)
        found = (answer.status_code, answer.json().get("code"), answer.headers["content-type"])
        assert found == (status, code, "application/problem+json"), (method, path, answer.text)
        assert answer.json()["request_id"] == answer.headers["x-request-id"]


async def test_an_unhandled_error_is_a_problem_with_only_a_request_id(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(job_id: str) -> None:
        raise ZeroDivisionError("secret inner detail")

    monkeypatch.setattr(sqlite_server.runtime.jobs, "get", broken)
    transport = httpx.ASGITransport(app_of(sqlite_server.runtime), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=sqlite_server.http.headers) as http:
        answer = await http.get("/api/v1/jobs/x", headers={"X-Request-Id": "my-id"})
    assert (answer.status_code, answer.json()["code"], answer.json()["request_id"]) == (500, "internal_error", "my-id")
    assert "secret" not in answer.text


async def test_idempotency_key_gives_the_same_job_and_refuses_another(server: Server) -> None:
    body = {"spec": {"name": "once", "entrypoint": ["x"]}}
    headers = {"Idempotency-Key": "k1"}
    first = await server.http.post("/api/v1/jobs", json=body, headers=headers)
    again = await server.http.post("/api/v1/jobs", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    body["spec"]["name"] = "other"
    conflict = await server.http.post("/api/v1/jobs", json=body, headers=headers)
    assert (conflict.status_code, conflict.json()["code"]) == (422, "idempotency_key_reused")
    assert len((await server.http.get("/api/v1/jobs")).json()["items"]) == 1


async def test_repeated_submission_outlives_its_snapshot(server: Server) -> None:
    snapshot = (await server.http.post("/api/v1/snapshots", content=TARBALL)).json()["sha256"]
    body = {"spec": {"name": "once", "entrypoint": ["x"], "snapshot": snapshot}}
    headers = {"Idempotency-Key": "k1"}
    first = await server.http.post("/api/v1/jobs", json=body, headers=headers)
    async with server.runtime.database.write() as tx:
        await tx.session.execute(delete(SnapshotRow))
    again = await server.http.post("/api/v1/jobs", json=body, headers=headers)
    assert (first.status_code, again.status_code, again.json()["id"]) == (201, 201, first.json()["id"])
    other = await server.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "k2"})
    assert (other.status_code, other.json()["code"]) == (409, "snapshot_not_found")


async def test_token_works_within_its_scopes_until_it_is_revoked(server: Server) -> None:
    made = (await server.http.post("/api/v1/tokens", json={"name": "reader", "scopes": ["read"]})).json()
    as_reader = {"Authorization": f"Bearer {made['token']}"}
    me = (await server.http.get("/api/v1/me", headers=as_reader)).json()
    assert me == {"name": "reader", "scopes": ["read"], "projects": None}
    assert (await server.http.get("/api/v1/jobs", headers=as_reader)).status_code == 200
    body = {"spec": {"name": "x", "entrypoint": ["x"]}}
    refused = await server.http.post("/api/v1/jobs", json=body, headers=as_reader)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert (await server.http.post("/api/v1/join-tokens", headers=as_reader)).status_code == 403
    listed = (await server.http.get("/api/v1/tokens")).json()["items"]
    assert made["token"] not in str(listed)
    assert {t["name"]: t["last_used_at"] is not None for t in listed} == {"admin": True, "reader": True}
    assert (await server.http.delete(f"/api/v1/tokens/{made['id']}")).status_code == 204
    assert (await server.http.get("/api/v1/jobs", headers=as_reader)).status_code == 401


async def test_expired_token_opens_nothing(server: Server) -> None:
    body = {"name": "brief", "scopes": ["read"], "expires_in_s": 0.001}
    made = (await server.http.post("/api/v1/tokens", json=body)).json()

    async def status() -> int:
        return (await server.http.get("/api/v1/me", headers={"Authorization": f"Bearer {made['token']}"})).status_code

    await until_answer(status, lambda code: code == 401)


async def test_a_join_token_works_once_and_a_node_token_for_agents(server: Server) -> None:
    token = (await server.http.post("/api/v1/join-tokens")).json()["token"]
    body = {"join_token": token, "name": "n", "host": "h", "cpus": 2, "memory_bytes": 1 << 30}
    joined = await server.http.post("/api/v1/nodes", json=body, headers={"Authorization": ""})
    assert joined.status_code == 201
    again = await server.http.post("/api/v1/nodes", json=body, headers={"Authorization": ""})
    assert (again.status_code, again.json()["code"]) == (401, "join_token_refused")
    as_node = {"Authorization": f"Bearer {joined.json()['node_token']}"}
    assert (await server.http.get("/api/v1/jobs", headers=as_node)).status_code == 403
    as_join = {"Authorization": f"Bearer {token}"}
    assert (await server.http.get("/api/v1/me", headers=as_join)).status_code == 401


async def test_a_rejoining_node_keeps_its_row_and_loses_its_old_token(server: Server) -> None:
    node_id, old_token = await server.join("n1")
    assert (await server.join("n1"))[0] == node_id
    old = {"Authorization": f"Bearer {old_token}"}
    assert (await server.http.get("/api/v1/me", headers=old)).status_code == 401
    assert len((await server.http.get("/api/v1/nodes")).json()["items"]) == 1


async def test_a_login_code_opens_one_session_for_same_origin_writes(server: Server) -> None:
    code = (await server.http.post("/api/v1/login-codes")).json()["code"]
    async with httpx.AsyncClient(timeout=LIMIT_S, base_url=server.url) as browser:
        foreign = await browser.post("/api/v1/session", json={"code": code}, headers={"Origin": "http://evil.test"})
        assert foreign.status_code == 403
        opened = await browser.post("/api/v1/session", json={"code": code}, headers={"Origin": server.url})
        assert opened.status_code == 204
        cookie = opened.headers["set-cookie"].lower()
        assert all(part in cookie for part in (f"{server.runtime.tokens.cookie}=", "httponly", "samesite=strict"))
        assert (await browser.get("/api/v1/me")).json()["scopes"] == ["admin", "read", "submit"]
        body = {"spec": {"name": "x", "entrypoint": ["x"]}}
        for origin, status in ((None, 403), ("http://evil.test", 403), (server.url, 201)):
            headers = {} if origin is None else {"Origin": origin}
            assert (await browser.post("/api/v1/jobs", json=body, headers=headers)).status_code == status
        again = await browser.post("/api/v1/session", json={"code": code}, headers={"Origin": server.url})
        assert (again.status_code, again.json()["code"]) == (401, "login_code_refused")
        assert (await browser.delete("/api/v1/session", headers={"Origin": server.url})).status_code == 204
    secret = opened.cookies[server.runtime.tokens.cookie]
    async with httpx.AsyncClient(
        timeout=LIMIT_S, base_url=server.url, cookies={server.runtime.tokens.cookie: secret}
    ) as browser:
        assert (await browser.get("/api/v1/me")).status_code == 401


async def test_snapshot_is_stored_under_its_hash_and_given_to_agents(server: Server) -> None:
    answer = await server.http.post("/api/v1/snapshots", content=TARBALL)
    sha256 = hashlib.sha256(TARBALL).hexdigest()
    assert (answer.status_code, answer.json()) == (201, {"sha256": sha256, "size_bytes": len(TARBALL)})
    assert (await server.http.post("/api/v1/snapshots", content=TARBALL)).json() == answer.json()
    as_agent = {"Authorization": f"Bearer {(await server.join())[1]}"}
    assert (await server.http.get(f"/api/v1/snapshots/{sha256}", headers=as_agent)).content == TARBALL
    assert (await server.submit(snapshot=sha256))["spec"]["snapshot"] == sha256
    body = {"spec": {"name": "x", "entrypoint": ["x"], "snapshot": "0" * 64}}
    missing = await server.http.post("/api/v1/jobs", json=body)
    assert (missing.status_code, missing.json()["code"]) == (409, "snapshot_not_found")
    assert (await server.http.post("/api/v1/snapshots", content=b"plain")).json()["code"] == "not_gzip"


async def test_body_beyond_its_limit_is_refused_declared_or_not(sqlite_server: Server) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield b'"' + b"x" * (1 << 16)

    for content in (b"x" * (2 << 20), endless()):
        answer = await sqlite_server.http.post(
            "/api/v1/jobs", content=content, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_every_answer_carries_security_headers(sqlite_server: Server) -> None:
    for path in ("/", "/api/v1/jobs", "/api/v1/nope", "/healthz"):
        headers = (await sqlite_server.http.get(path)).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


async def test_health_readiness_and_prometheus(server: Server) -> None:
    assert (await server.http.get("/healthz")).json()["status"] == "ok"
    assert (await server.http.get("/readyz")).status_code == 200
    job = await server.submit()

    async def text() -> str:
        return (await server.http.get("/metrics")).text

    found = await until_answer(text, lambda t: 'penstock_jobs{state="QUEUED"} 1.0' in t)
    assert 'penstock_http_requests_total{method="POST",route="/api/v1/jobs",status="201"} 1.0' in found
    assert job["id"] not in found


async def test_openapi_names_each_operation_once_and_its_problems(sqlite_server: Server) -> None:
    document = (await sqlite_server.http.get("/openapi.json")).json()
    operations = [op for path in document["paths"].values() for op in path.values()]
    ids = [op["operationId"] for op in operations]
    assert len(set(ids)) == len(ids)
    assert {"submitJob", "listJobs", "cancelJob", "listReplicas", "joinNode", "openSession"} <= set(ids)
    assert all(op["tags"] and "500" in op["responses"] for op in operations)
    assert {"Job", "Replica", "JobSpec", "ProblemBody"} <= set(document["components"]["schemas"])


async def test_pages_are_served_with_a_fallback_for_client_routes(sqlite_server: Server, tmp_path: Any) -> None:
    http = sqlite_server.http
    dist = tmp_path / "dist"
    sqlite_server.runtime.settings.static_dir = dist
    missing = await http.get("/")
    assert "make setup" in missing.text
    (dist / "assets").mkdir(parents=True)
    (dist / "index.html").write_text("<p>page</p>")
    (dist / "assets" / "app-1a2b.js").write_text("1")
    (tmp_path / "secret").write_text("hidden words")
    for path in ("/", "/jobs/123", "/login"):
        answer = await http.get(path, headers={"Authorization": ""})
        assert (answer.text, answer.headers["cache-control"]) == ("<p>page</p>", "no-cache")
    asset = await http.get("/assets/app-1a2b.js", headers={"Authorization": ""})
    assert "immutable" in asset.headers["cache-control"]
    assert (await http.get("/assets/gone.js")).status_code == 404
    for path in ("/../secret", "/%2e%2e/secret", "/..%2fsecret", "/assets/%2e%2e/%2e%2e/secret"):
        assert "hidden words" not in (await http.get(path)).text
