"""A backup that is made while the server runs is a server again elsewhere, and nothing passes for something newer."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from tests.server.harness import Server, running, settings_for

from penstock_server.backup import DATABASE, EPOCHS, EXIT_FAILED, EXIT_OK, STREAMS, main


async def worked(server: Server) -> str:
    """Run a job that has a log, a metric and a snapshot beside it; return its id."""
    job = await server.submit(env={"NAME": "value"})
    await server.http.post(
        "/api/v1/snapshots", content=b"\x1f\x8bnot really", headers={"Content-Type": "application/gzip"}
    )
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await agent.log(replica, 0, b"hello\n")
        await agent.report(replica, "EXITED", exit_code=0)
        await server.job_in(job["id"], "SUCCEEDED")
    return str(job["id"])


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.asyncio
async def test_a_backup_of_a_running_server_becomes_a_server(tmp_path: Path) -> None:
    file = tmp_path / "backup.tar.gz"
    async with running(settings_for(tmp_path)) as server:
        job_id = await worked(server)
        state = str(server.runtime.settings.state_dir)
        assert await asyncio.to_thread(main, ["backup", str(file), "--state-dir", state]) == EXIT_OK
        before = await server.job(job_id)
        admin = server.admin
        await server.submit(name="later")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hidden(tmp_path) == []
    elsewhere = tmp_path / "elsewhere"
    assert main(["restore", str(file), "--state-dir", str(elsewhere / "state")]) == EXIT_OK
    async with running(settings_for(elsewhere)) as server:
        assert server.admin == admin
        after = await server.job(job_id)
        assert {**after, "epoch": after["epoch"] - EPOCHS} == before
        assert (await server.http.get(f"/api/v1/jobs/{job_id}/logs")).json()["text"] == "hello\n"
        [only] = (await server.http.get("/api/v1/jobs")).json()["items"]
        assert only["id"] == job_id
        await server.submit(name="next")
        async with server.agent(await server.join(name="n2")) as agent:
            assert (await agent.desired(1))[0]["stream"] > STREAMS
    assert len(list((elsewhere / "state" / "snapshots").iterdir())) == 1


def test_a_folder_in_use_and_a_wrong_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "junk").write_bytes(b"junk")
    for arguments, said in (
        (["restore", str(tmp_path / "junk"), "--state-dir", str(tmp_path / "used")], "not empty"),
        (["restore", str(tmp_path / "junk"), "--state-dir", str(tmp_path / "new")], "no backup"),
        (["restore", str(tmp_path / "none"), "--state-dir", str(tmp_path / "new")], "No such file"),
        (["backup", str(tmp_path / "made"), "--state-dir", str(tmp_path / "used")], "pg_dump"),
    ):
        assert main(arguments) == EXIT_FAILED
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junk", "used"]


def test_a_damaged_database_is_not_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with closing(sqlite3.connect(state / DATABASE)) as connection:
        connection.execute("CREATE TABLE jobs (epoch INTEGER)")
        connection.execute("CREATE TABLE counters (name TEXT, value INTEGER)")
        connection.executemany("INSERT INTO jobs VALUES (?)", [(n,) for n in range(5000)])
        connection.commit()
    assert main(["backup", str(tmp_path / "good"), "--state-dir", str(state)]) == EXIT_OK
    content = bytearray((state / DATABASE).read_bytes())
    content[4096 * 3 : 4096 * 5] = bytes(8192)
    (state / DATABASE).write_bytes(content)
    assert main(["backup", str(tmp_path / "bad"), "--state-dir", str(state)]) == EXIT_OK  # page by page, as they are
    assert main(["restore", str(tmp_path / "bad"), "--state-dir", str(tmp_path / "new")]) == EXIT_FAILED
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["restore", str(tmp_path / "good"), "--state-dir", str(tmp_path / "new")]) == EXIT_OK
