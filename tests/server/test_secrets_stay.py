"""Secrets of jobs and of the server: who reads them back, and from where."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Server
from tests.server.test_server_process import refuse, serving

ENV = {"EPOCHS": "3", "HF_TOKEN": "hf_secret", "URL": "https://me:word@example.org"}


def test_a_state_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    (state / "penstock.db").touch(mode=0o644)
    with serving(state):
        for path in (state, *state.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_folder_of_other_things_is_no_state_folder(tmp_path: Path) -> None:
    (tmp_path / "letter").touch()
    tmp_path.chmod(0o755)
    assert "chmod 700" in refuse(tmp_path, "--port", "0")


async def shown(server: Server, job_id: str, token: str) -> list[dict[str, Any]]:
    """Return the env of a job as each call and each message shows it to the holder of a token."""
    headers = {"Authorization": f"Bearer {token}"}
    one = (await server.http.get(f"/api/v1/jobs/{job_id}", headers=headers)).json()
    [listed] = (await server.http.get("/api/v1/jobs", headers=headers)).json()["items"]
    async with server.browser(token) as browser:
        jobs = (await browser.subscribe(1, topic="jobs"))["jobs"]
        job = (await browser.subscribe(2, topic="job", job_id=job_id))["job"]
        async with server.runtime.database.write() as tx:
            tx.effects.jobs.add(job_id)
        changes = await browser.of("job")
    return [one["spec"]["env"], listed["spec"]["env"], jobs[0]["spec"]["env"], job["spec"]["env"]] + [
        message["job"]["spec"]["env"] for message in changes
    ]


@pytest.mark.asyncio
async def test_env_is_not_for_those_who_may_only_read(sqlite_server: Server) -> None:
    job = await sqlite_server.submit(env=ENV)
    for env in await shown(sqlite_server, job["id"], await sqlite_server.token("read")):
        assert env == dict.fromkeys(ENV, "***")


@pytest.mark.asyncio
async def test_what_looks_like_a_secret_nobody_gets_back(sqlite_server: Server) -> None:
    job = await sqlite_server.submit(env=ENV)
    for env in [job["spec"]["env"], *await shown(sqlite_server, job["id"], await sqlite_server.token("submit"))]:
        assert env == {"EPOCHS": "3", "HF_TOKEN": "***", "URL": "***"}
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        assert (await agent.desired(1))[0]["env"] == ENV  # the job does
