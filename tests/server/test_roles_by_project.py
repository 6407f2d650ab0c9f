"""Tokens with a role in some projects: what is of other projects is not there for them, whichever way they ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.server.graph_sample import sample_graph
from tests.server.harness import NO_TLS, Server
from tests.server.test_access_walk import http_routes, websocket_routes
from tests.support.waiting import LIMIT_S, until_answer
from websockets.exceptions import InvalidStatus

from penstock.protocol.frames import Kind
from penstock.protocol.graphdoc import graph_hash
from penstock_server.auth.principal import Principal, is_by_project
from penstock_server.secrecy import Sight
from penstock_server.streams.hub import Hub, Subscription
from penstock_server.streams.live import LiveJob
from penstock_server.streams.queue import BrowserQueue

pytestmark = pytest.mark.asyncio

BY_PROJECT = {
    "submit_job", "plan_job", "list_jobs", "count_jobs", "list_replicas", "get_graph", "list_projects", "list_nodes",
    "list_conditions",
    "list_pilots",
    "upload_snapshot", "get_openapi", "create_token", "list_tokens", "revoke_token", "list_audit", "create_login_code",
    "stream", "get_node", "get_project", "get_token", "create_webhook", "list_webhooks", "remove_webhook",
    "enable_webhook", "send_test", "list_deliveries", "list_node_loads",
}  # fmt: skip
"""Every call without a job in its path that a restricted token may make. One that is added belongs into a test here."""
NO_PROJECT = {"get_me", "close_session"}


def spec(project: str, **fields: Any) -> dict[str, Any]:
    return {"spec": {"name": f"{project}-job", "entrypoint": ["true"], "project": project, **fields}}


async def token_for(server: Server, **projects: str) -> dict[str, Any]:
    answer = await server.http.post("/api/v1/tokens", json={"name": "restricted", "projects": projects})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


@asynccontextmanager
async def client_of(server: Server, secret: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=LIMIT_S, verify=NO_TLS) as client:
        yield client


@asynccontextmanager
async def restricted(server: Server, **projects: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server, (await token_for(server, **projects))["token"]) as client:
        yield client


async def items(client: httpx.AsyncClient, path: str, **params: Any) -> list[dict[str, Any]]:
    answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def test_a_job_of_another_project_is_not_there_for_any_call(sqlite_server: Server) -> None:
    foreign = await sqlite_server.submit(project="a")
    walked = 0
    async with restricted(sqlite_server, b="admin") as client:
        for method, route in http_routes():
            if "{job_id" not in route.path:
                continue
            answers = [
                await client.request(method, route.path_format.replace("{job_id}", job_id))
                for job_id in (foreign["id"], "unknown")
            ]
            for answer, job_id in zip(answers, (foreign["id"], "unknown"), strict=True):
                assert answer.status_code == 404, (method, route.path, answer.text)
                assert answer.json()["detail"] == f"there is no job {job_id!r}"
            walked += 1
    assert walked >= 12
    assert (await sqlite_server.job(foreign["id"]))["state"] == "QUEUED"


async def test_calls_that_heed_no_project_need_a_token_for_all(sqlite_server: Server) -> None:
    async with restricted(sqlite_server, b="admin") as client:
        for method, route in http_routes():
            name = route.endpoint.__name__
            is_open = "{job_id" in route.path or "open" in getattr(route.endpoint, "__penstock_scopes__", ())
            if is_open or name in BY_PROJECT | NO_PROJECT:
                continue
            answer = await client.request(method, route.path_format.replace("{", "").replace("}", ""))
            assert answer.status_code == 403, (method, route.path, answer.text)
    marked = {route.endpoint.__name__ for _, route in http_routes() if is_by_project(route.endpoint)}
    sockets = {route.endpoint.__name__ for route in websocket_routes() if is_by_project(route.endpoint)}
    assert marked | sockets == BY_PROJECT


async def test_websockets_of_processes_are_closed_to_restricted_tokens(sqlite_server: Server) -> None:
    secret = (await token_for(sqlite_server, b="admin"))["token"]
    for path in ("/api/v1/agent", "/api/v1/attach"):
        with pytest.raises(InvalidStatus) as refusal:
            await sqlite_server.connect(path, secret)
        assert refusal.value.response.status_code == 403


async def test_lists_and_searches_show_own_projects_alone(server: Server) -> None:
    node = await server.join()
    async with server.agent(node) as agent, restricted(server, b="viewer", c="viewer") as client:
        jobs = {name: await server.submit(project=name, name=f"{name}-job") for name in "abc"}
        await agent.desired(3)
        found = await items(client, "/api/v1/jobs")
        assert [job["spec"]["project"] for job in found] == ["c", "b"]
        first = (await client.get("/api/v1/jobs", params={"page_size": 1})).json()
        rest = await client.get("/api/v1/jobs", params={"page_size": 1, "page_token": first["next_page_token"]})
        assert [job["id"] for job in rest.json()["items"]] == [jobs["b"]["id"]]
        assert rest.json()["next_page_token"] is None
        for params in ({"search": "a"}, {"name": "a-job"}):
            assert await items(client, "/api/v1/jobs", **params) == []
        assert {one["job_id"] for one in await items(client, "/api/v1/replicas")} == {jobs["b"]["id"], jobs["c"]["id"]}
        assert await items(client, "/api/v1/replicas", job_id=jobs["a"]["id"]) == []
        assert [one["name"] for one in await items(client, "/api/v1/projects")] == ["b", "c"]
        assert len(await items(client, "/api/v1/nodes")) == 1
        assert await items(client, "/api/v1/conditions") == []
        assert await items(client, "/api/v1/node-loads") == await items(server.http, "/api/v1/node-loads")
        assert (await client.get("/metrics")).status_code == 403


async def test_a_graph_is_there_if_an_own_job_used_it(sqlite_server: Server) -> None:
    document = sample_graph()
    used = graph_hash(document)
    node = await sqlite_server.join()
    async with sqlite_server.agent(node) as agent:
        job = await sqlite_server.submit(project="a")
        [order] = await agent.desired(1)
        await agent.start(order)
        await agent.frame(order, Kind.GRAPH, seq=0, body=document.model_dump(mode="json"))
        await agent.frame(order, Kind.GRAPH_USED, seq=1, body={"hash": used})

        async def stored() -> bool:
            return bool(await items(sqlite_server.http, f"/api/v1/jobs/{job['id']}/graphs"))

        await until_answer(stored, bool)
        async with restricted(sqlite_server, b="admin") as client:
            assert (await client.get(f"/api/v1/graphs/{used}")).status_code == 404
        async with restricted(sqlite_server, a="viewer") as client:
            assert (await client.get(f"/api/v1/graphs/{used}")).status_code == 200


async def test_a_browser_gets_jobs_of_own_projects_alone(sqlite_server: Server) -> None:
    before = {name: await sqlite_server.submit(project=name) for name in "ab"}
    secret = (await token_for(sqlite_server, b="viewer"))["token"]
    async with sqlite_server.browser(secret) as browser:
        snapshot = await browser.subscribe(1, topic="jobs")
        assert [job["id"] for job in snapshot["jobs"]] == [before["b"]["id"]]
        assert (snapshot["total"], snapshot["more"]) == (1, False)
        await sqlite_server.submit(project="a")
        last = await sqlite_server.submit(project="b", env={"COLOUR": "blue"})
        [shown] = await browser.of("job", lambda message: message["job"]["id"] == last["id"])
        assert shown["job"]["spec"]["env"] == {"COLOUR": "***"}, "a viewer sees no values"
        seen = {message["job"]["spec"]["project"] for message in await browser.of("job")}
        assert seen == {"b"}
        own = await browser.subscribe(2, topic="job", job_id=before["b"]["id"])
        assert own["job"]["id"] == before["b"]["id"]
        await browser.ws.send(f'{{"type":"subscribe","id":3,"topic":"job","job_id":"{before["a"]["id"]}"}}')
        await browser.ws.wait_closed()
        assert "there is no job" in (browser.ws.close_reason or "")
        assert not any(message.get("id") == 3 for message in browser.messages)


async def test_figures_of_foreign_jobs_are_not_pushed() -> None:
    hub = Hub()
    sight = Sight.of(Principal("t", "user", "t", frozenset({"read"}), projects={"b": "viewer"}))
    queue = BrowserQueue(1 << 20, 1 << 22, 5.0, lambda: 0.0, lambda: None)
    subscription = Subscription(1, None, frozenset({"state"}), queue, sight=sight)
    hub.add(subscription)
    subscription.shown = {"own"}
    subscription.begin({"type": "snapshot", "id": 1, "jobs": [], "nodes": [], "total": 0, "more": False})
    queue.take()
    live = LiveJob(latest={"loss": 0.5}).figures()
    hub.publish_figures({"foreign": live})
    assert queue.take() is None
    hub.publish_figures({"foreign": live, "own": live})
    taken = queue.take()
    assert taken is not None
    [message] = taken.messages
    text = str(message)
    assert "own" in text
    assert "foreign" not in text


async def test_viewer_reads_runner_submits_and_cancels(sqlite_server: Server) -> None:
    job = await sqlite_server.submit(project="b", env={"COLOUR": "blue"})
    async with restricted(sqlite_server, b="viewer") as viewer:
        seen = (await viewer.get(f"/api/v1/jobs/{job['id']}")).json()
        assert seen["spec"]["env"] == {"COLOUR": "***"}
        for path in ("events", "metrics", "graphs", "exchange", "tables", "operators", "frames"):
            assert (await viewer.get(f"/api/v1/jobs/{job['id']}/{path}")).status_code == 200, path
        refused = [
            await viewer.post(f"/api/v1/jobs/{job['id']}:cancel"),
            await viewer.post("/api/v1/jobs", json=spec("b")),
        ]
        assert [answer.status_code for answer in refused] == [403, 403]
    async with restricted(sqlite_server, b="runner", a="viewer") as runner:
        assert (await runner.get(f"/api/v1/jobs/{job['id']}")).json()["spec"]["env"] == {"COLOUR": "blue"}
        assert (await runner.post("/api/v1/jobs", json=spec("b"))).status_code == 201
        for call in ("/api/v1/jobs", "/api/v1/jobs:plan"):
            for project in "ac":
                answer = await runner.post(call, json=spec(project))
                assert (answer.status_code, answer.json()["code"]) == (403, "foreign_project")
                assert "name one that it may: b" in answer.json()["hint"]
        assert (await runner.post(f"/api/v1/jobs/{job['id']}:cancel")).status_code == 202
        assert (await runner.get("/api/v1/tokens")).status_code == 403
        other = await sqlite_server.submit(project="a")
        refusal = await runner.post(f"/api/v1/jobs/{other['id']}:cancel")
        assert (refusal.status_code, "in project 'a'" in refusal.json()["detail"]) == (403, True)


async def test_values_of_env_follow_the_role_in_each_project(sqlite_server: Server) -> None:
    for project in "ab":
        await sqlite_server.submit(project=project, env={"COLOUR": "blue"})
    async with restricted(sqlite_server, a="viewer", b="runner") as client:
        shown = {job["spec"]["project"]: job["spec"]["env"]["COLOUR"] for job in await items(client, "/api/v1/jobs")}
    assert shown == {"a": "***", "b": "blue"}


async def test_admin_of_a_project_manages_its_tokens_alone(sqlite_server: Server) -> None:
    foreign = await token_for(sqlite_server, a="viewer")
    both = await token_for(sqlite_server, a="viewer", b="viewer")
    async with restricted(sqlite_server, b="admin", c="viewer") as admin:
        made = await admin.post("/api/v1/tokens", json={"name": "ci", "projects": {"b": "runner"}})
        assert made.status_code == 201, made.text
        for body in ({"projects": {"a": "viewer"}}, {"projects": {"b": "viewer", "c": "viewer"}}, {"role": "viewer"}):
            assert (await admin.post("/api/v1/tokens", json={"name": "x", **body})).status_code == 403, body
        assert [one["name"] for one in await items(admin, "/api/v1/tokens")] == ["ci"]
        for other in (foreign, both):
            assert (await admin.delete(f"/api/v1/tokens/{other['id']}")).status_code == 404
        assert (await admin.delete(f"/api/v1/tokens/{made.json()['id']}")).status_code == 204
    async with client_of(sqlite_server, made.json()["token"]) as revoked:
        assert (await revoked.get("/api/v1/me")).status_code == 401


async def test_audit_shows_what_was_done_to_own_projects(server: Server) -> None:
    await server.submit(project="a")
    own = await server.submit(project="b")
    await server.http.put("/api/v1/projects/b", json={"share": 2.0})
    await server.http.put("/api/v1/projects/a", json={"share": 2.0})
    known = await token_for(server, b="viewer")
    await token_for(server, a="viewer")
    async with restricted(server, b="admin") as admin:
        me = next(one for one in await items(admin, "/api/v1/tokens") if one["projects"] == {"b": "admin"})
        subjects = [entry["subject"] for entry in await items(admin, "/api/v1/audit")]
    assert subjects == [me["id"], known["id"], "b", own["id"]]


async def test_a_session_may_what_its_token_may_and_ends_with_it(sqlite_server: Server) -> None:
    foreign = await sqlite_server.submit(project="a")
    own = await sqlite_server.submit(project="b")
    made = await token_for(sqlite_server, b="runner")
    async with client_of(sqlite_server, made["token"]) as runner:
        code = (await runner.post("/api/v1/login-codes")).json()["code"]
    async with httpx.AsyncClient(base_url=sqlite_server.url, timeout=LIMIT_S, verify=NO_TLS) as browser:
        assert (await browser.post("/api/v1/session", json={"code": code})).status_code == 204
        assert (await browser.get("/api/v1/me")).json()["projects"] == {"b": "runner"}
        assert (await browser.get(f"/api/v1/jobs/{foreign['id']}")).status_code == 404
        assert (await browser.get(f"/api/v1/jobs/{own['id']}")).status_code == 200
        assert (await browser.get("/api/v1/tokens")).status_code == 403
        await sqlite_server.http.delete(f"/api/v1/tokens/{made['id']}")
        assert (await browser.get("/api/v1/me")).status_code == 401


async def test_a_code_of_a_revoked_token_opens_nothing(sqlite_server: Server) -> None:
    made = await token_for(sqlite_server, b="viewer")
    async with client_of(sqlite_server, made["token"]) as viewer:
        code = (await viewer.post("/api/v1/login-codes")).json()["code"]
    await sqlite_server.http.delete(f"/api/v1/tokens/{made['id']}")
    answer = await sqlite_server.http.post("/api/v1/session", json={"code": code}, headers={"Authorization": ""})
    assert answer.status_code == 401


async def test_an_admin_of_projects_is_not_the_last_administrator(sqlite_server: Server) -> None:
    await token_for(sqlite_server, b="admin")
    admin = next(one for one in await items(sqlite_server.http, "/api/v1/tokens") if one["name"] == "admin")
    assert (await sqlite_server.http.delete(f"/api/v1/tokens/{admin['id']}")).json()["code"] == "last_admin_token"


async def test_a_role_in_all_projects_stands_for_its_scope(sqlite_server: Server) -> None:
    for role, scopes in (("viewer", ["read"]), ("runner", ["submit"]), ("admin", ["admin"])):
        made = (await sqlite_server.http.post("/api/v1/tokens", json={"name": role, "role": role})).json()
        assert (made["scopes"], made["projects"]) == (scopes, None)
    wrong: list[dict[str, Any]] = [
        {},
        {"role": "viewer", "scopes": ["read"]},
        {"projects": {}},
        {"projects": {"b": "owner"}},
    ]
    for body in wrong:
        assert (await sqlite_server.http.post("/api/v1/tokens", json={"name": "x", **body})).status_code == 422, body


async def test_quota_of_its_project_binds_a_token(server: Server) -> None:
    node = await server.join(cpus=8)
    await server.http.put("/api/v1/projects/b", json={"max_jobs": 1})
    async with server.agent(node), restricted(server, b="runner") as runner:
        jobs = [(await runner.post("/api/v1/jobs", json=spec("b"))).json() for _ in range(2)]
        await server.job_in(jobs[0]["id"], "STARTING")

        async def why() -> str:
            return str((await runner.get(f"/api/v1/jobs/{jobs[1]['id']}")).json()["why"])

        assert "quota of project 'b'" in await until_answer(why, lambda text: "quota" in text)
        assert (await runner.post("/api/v1/jobs", json=spec("default"))).status_code == 403, "no way around it"
        assert (await runner.put("/api/v1/projects/b", json={"max_jobs": 9})).status_code == 403
    async with restricted(server, b="admin") as admin:
        assert (await admin.put("/api/v1/projects/b", json={"max_jobs": 9})).status_code == 403
