"""Flaws that were found in other control planes, each as a test that they are not here. SECURITY.md has the table."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from tests.server.harness import Server, settings_for
from tests.support.waiting import LIMIT_S, until_answer
from websockets.exceptions import InvalidStatus

from penstock.errors import Unavailable
from penstock_server.run import check_exposure

ROOT = Path(__file__).resolve().parents[2]
JOB = {"spec": {"name": "x", "entrypoint": ["true"]}}


def anonymous(server: Server) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S)


async def browser_of(server: Server) -> httpx.Cookies:
    """Cookies of a session of the administrator's."""
    code = (await server.http.post("/api/v1/login-codes")).json()["code"]
    async with anonymous(server) as client:
        opened = await client.post("/api/v1/session", json={"code": code}, headers={"Origin": server.url})
        return opened.cookies


def sources(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                yield str(path.relative_to(ROOT)), node


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.asyncio
async def test_cve_2023_48022_jobs_need_a_token(sqlite_server: Server) -> None:
    async with anonymous(sqlite_server) as client:
        assert (await client.post("/api/v1/jobs", json=JOB)).status_code == 401
    assert (await sqlite_server.http.get("/api/v1/jobs")).json()["items"] == []


def test_cve_2023_48022_no_plain_port_for_others(tmp_path: Path) -> None:
    assert settings_for(tmp_path).host == "127.0.0.1"
    with pytest.raises(Unavailable, match="without TLS"):
        check_exposure(settings_for(tmp_path, host="0.0.0.0"))


@pytest.mark.asyncio
async def test_cve_2026_7723_no_websocket_without_the_guard(sqlite_server: Server) -> None:
    for path in ("/api/v1/stream", "/api/v1/agent", "/api/v1/attach"):
        with pytest.raises(InvalidStatus) as refusal:
            await sqlite_server.connect(path, "")
        assert refusal.value.response.status_code == 401


@pytest.mark.asyncio
async def test_cve_2026_7722_open_paths_match_exactly(sqlite_server: Server) -> None:
    async with anonymous(sqlite_server) as client:
        assert (await client.get("/healthz")).status_code == 200
        for path in ("/api/v1/jobs/healthz", "/api/v1/jobs/readyz/logs", "/api/v1/graphs/healthz", "/metrics"):
            assert (await client.get(path)).status_code == 401, path


@pytest.mark.asyncio
async def test_cve_2026_27482_delete_checks_the_origin(sqlite_server: Server) -> None:
    cookies = await browser_of(sqlite_server)
    [token] = [one for one in (await sqlite_server.http.get("/api/v1/tokens")).json()["items"] if one["kind"] == "user"]
    paths = (("DELETE", f"/api/v1/tokens/{token['id']}"), ("PUT", "/api/v1/projects/a"), ("POST", "/api/v1/jobs:plan"))
    async with httpx.AsyncClient(base_url=sqlite_server.url, cookies=cookies, timeout=LIMIT_S) as client:
        assert (await client.get("/api/v1/me")).status_code == 200
        for method, path in paths:
            for headers in ({}, {"Origin": "http://evil.example"}):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin"), (method, headers)


@pytest.mark.asyncio
async def test_dns_rebinding_gets_no_answer(sqlite_server: Server) -> None:
    async with anonymous(sqlite_server) as client:
        answer = await client.get("/api/v1/jobs", headers={"Host": "rebound.example"})
    assert (answer.status_code, answer.json()["code"]) == (421, "unknown_host")


@pytest.mark.asyncio
async def test_cve_2023_1177_paths_leave_no_folder(sqlite_server: Server) -> None:
    secret = (sqlite_server.runtime.settings.state_dir / "admin.token").read_text().strip()
    job = await sqlite_server.submit()
    out = ("..", "%2e%2e", "%252e%252e", "..;", "..%5c", "..%00", "%c0%ae%c0%ae")
    bases = ("", "/api/v1/snapshots", "/api/v1/graphs", f"/api/v1/jobs/{job['id']}/logs?replica_id=")
    for base in bases:
        for up in out:
            answer = await sqlite_server.http.get(f"{base}/{up}%2f{up}/{up}/admin.token")
            assert secret not in answer.text
            assert answer.status_code < 500, (answer.url, answer.text)
            assert answer.status_code >= 400 or "text/html" in answer.headers["content-type"], answer.url


@pytest.mark.asyncio
async def test_cve_2024_24590_nothing_is_unpickled(sqlite_server: Server) -> None:
    unsafe = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for where, node in sources("server", "worker", "core/penstock/protocol", "core/penstock/command"):
        assert not unsafe & set(imported(node)), where
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "yaml.unsafe_load", "yaml.full_load"), where
            assert called != "yaml.load" or "_Yaml" in ast.unparse(node), where  # a SafeLoader of specfile's
    for path in ("/api/v1/jobs", "/api/v1/snapshots"):
        answer = await sqlite_server.http.post(
            path, content=pickle.dumps(JOB), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 422), answer.text


def test_ssrf_only_webhooks_make_requests() -> None:
    clients = ("httpx", "httpcore", "requests", "urllib.request", "http.client", "aiohttp", "websockets.client")
    found = [(where, name) for where, node in sources("server") for name in imported(node) if name.startswith(clients)]
    assert sorted(found) == [
        ("server/penstock_server/healthcheck.py", "urllib.request"),  # of its own process: asks the server beside it
        ("server/penstock_server/webhooksender.py", "httpcore"),  # checks addresses: test_webhook_addresses.py
    ]


def test_command_injection_no_shell_reads_a_job() -> None:
    for where, node in sources("server", "worker"):
        if isinstance(node, ast.Call):
            assert not any(word.arg == "shell" for word in node.keywords), where
            assert ast.unparse(node.func) not in ("os.system", "os.popen", "asyncio.create_subprocess_shell"), where


@pytest.mark.asyncio
async def test_stolen_node_token_changes_no_other_node(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.agent(await sqlite_server.join("right")) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await sqlite_server.job_in(job["id"], "RUNNING")
        thief = await sqlite_server.join("thief")
        async with sqlite_server.agent(thief) as other:
            await other.report(replica, "EXITED", exit_code=0)
            await other.send(type="beat")  # answered after the report
            await until_answer(other.count_leases, bool)
        assert (await sqlite_server.job(job["id"]))["state"] == "RUNNING"
        for method, path in (("GET", "/api/v1/jobs"), ("POST", "/api/v1/jobs"), ("GET", "/api/v1/tokens")):
            as_node = {"Authorization": f"Bearer {thief[1]}"}
            assert (await sqlite_server.http.request(method, path, headers=as_node)).status_code == 403


@pytest.mark.asyncio
async def test_leaked_environment_shows_no_secret(sqlite_server: Server) -> None:
    job = await sqlite_server.submit(env={"API_TOKEN": "hunter2hunter2", "PLAIN": "visible"})
    reader = {"Authorization": f"Bearer {await sqlite_server.token('read')}"}
    for headers, plain in ((reader, False), ({}, True)):
        for path in ("/api/v1/jobs", f"/api/v1/jobs/{job['id']}", f"/api/v1/jobs/{job['id']}/events"):
            text = (await sqlite_server.http.get(path, headers=headers)).text
            assert "hunter2" not in text
            assert plain or "visible" not in text


@pytest.mark.asyncio
async def test_open_cors_gives_other_sites_nothing(sqlite_server: Server) -> None:
    foreign = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        answer = await sqlite_server.http.request(method, "/api/v1/jobs", headers=foreign)
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    policy = (await sqlite_server.http.get("/")).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "script-src 'self';" in policy


@pytest.mark.asyncio
async def test_unlimited_guesses_and_bodies_are_refused(sqlite_server: Server) -> None:
    deep = b'{"spec":' + b"[" * 100_000
    answer = await sqlite_server.http.post("/api/v1/jobs", content=deep, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    large = await sqlite_server.http.post("/api/v1/jobs", content=b"x" * (2 << 20))
    assert large.status_code == 413
    async with anonymous(sqlite_server) as client:
        statuses = [
            (await client.get("/api/v1/me", headers={"Authorization": f"Bearer psu_{i}"})).status_code
            for i in range(24)
        ]
    assert statuses[:20] == [401] * 20 and 429 in statuses
    assert (await sqlite_server.http.get("/api/v1/me")).status_code == 200
