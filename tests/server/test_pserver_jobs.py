"""Jobs with parameter servers on a real server and a real agent: environment, ports, restarts in place, the end.

The processes are small scripts that write what they were told to a folder of the test; nothing trains.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio

SCRIPT = Path(__file__).with_name("pserver_script.py")
Told = dict[str, Any]


class Group:
    """A submitted job, and what its processes have said."""

    def __init__(self, server: Server, job: dict[str, Any], folder: Path) -> None:
        self.server, self.id, self.folder = server, job["id"], folder

    async def told(self) -> list[Told]:
        found = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda one: (one["role"], one["index"], one["incarnation"]))

    async def all_told(self, count: int) -> list[Told]:
        return await until_answer(self.told, lambda found: len(found) == count)

    def release(self, role: str, index: int = 0, code: int = 0) -> None:
        """Let a process of this role end, now and whenever it is started again."""
        part = self.folder / f"{role}-{index}.code"
        part.write_text(str(code))
        part.replace(part.with_suffix(".end"))

    async def state(self, *states: str) -> dict[str, Any]:
        return await self.server.job_in(self.id, *states)


async def submit(server: Server, folder: Path, **spec: Any) -> Group:
    os.mkdir(folder)
    given = {"trainers": {"count": 2, "memory": "1MiB"}, "pservers": {"count": 2, "memory": "1MiB"}, **spec}
    env = {"SAY_TO": str(folder), **given.pop("env", {})}
    entrypoint = [sys.executable, str(SCRIPT)]
    job = await server.submit(mode="pserver", entrypoint=entrypoint, env=env, stop_grace_s=1, **given)
    return Group(server, job, folder)


def newest(told: list[Told], role: str, index: int) -> Told:
    return [one for one in told if (one["role"], one["index"]) == (role, index)][-1]


def release_all(group: Group) -> None:
    for role in ("TRAINER", "PSERVER"):
        for index in range(2):
            group.release(role, index)


@pytest.mark.smoke
async def test_processes_read_what_fluid_scripts_read(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    group = await submit(sqlite_server, tmp_path / "said", env={"PENSTOCK_PS_SNAPSHOT_S": "7"})
    first, second, *trainers = await group.all_told(4)
    endpoints = first["env"]["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    assert len(set(endpoints)) == 2
    for index, pserver in enumerate((first, second)):
        env = pserver["env"]
        assert f"{env['POD_IP']}:{env['PADDLE_PORT']}" == endpoints[index] == env["PADDLE_CURRENT_ENDPOINT"]
        assert (env["POD_IP"], env["TRAINING_ROLE"], env["PADDLE_PSERVER_ID"]) == ("127.0.0.1", "PSERVER", str(index))
        state_dir = env["PENSTOCK_PS_STATE_DIR"]
        assert Path(state_dir).is_relative_to(node)
        assert os.access(state_dir, os.W_OK)
    for index, trainer in enumerate(trainers):
        env = trainer["env"]
        assert (env["TRAINING_ROLE"], env["PADDLE_TRAINER_ID"]) == ("TRAINER", str(index))
        assert "PADDLE_PORT" not in env and "PENSTOCK_PS_STATE_DIR" not in env
    for env in (one["env"] for one in (first, second, *trainers)):
        assert env["PADDLE_PSERVERS_IP_PORT_LIST"] == ",".join(endpoints)
        assert (env["PADDLE_TRAINERS_NUM"], env["PENSTOCK_JOB_ID"]) == ("2", group.id)
        assert (env["PENSTOCK_PS_LEASE_S"], env["PENSTOCK_PS_SNAPSHOT_S"]) == ("20", "7")
    assert len({one["env"]["PENSTOCK_PS_TOKEN"] for one in (first, second, *trainers)}) == 1
    assert len(first["env"]["PENSTOCK_PS_TOKEN"]) >= 32
    job = await group.state("RUNNING")
    assert [r["endpoint"] for r in job["replicas"] if r["role"] == "pserver"] == endpoints
    release_all(group)
    await group.state("SUCCEEDED")


async def test_secret_of_an_attempt_is_shown_nowhere(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    group = await submit(sqlite_server, tmp_path / "said")
    secret = (await group.all_told(4))[0]["env"]["PENSTOCK_PS_TOKEN"]
    calls = (f"/jobs/{group.id}", f"/jobs/{group.id}/events", f"/replicas?job_id={group.id}", "/nodes", "/jobs")
    for path in calls:
        answer = await sqlite_server.http.get(f"/api/v1{path}")
        assert answer.status_code == 200
        assert secret not in answer.text
    release_all(group)
    await group.state("SUCCEEDED")


async def test_killed_pserver_comes_back_on_its_port_with_its_state(
    sqlite_server: Server, node: Path, tmp_path: Path
) -> None:
    group = await submit(sqlite_server, tmp_path / "said", restart={"max_restarts": 2})
    before = await group.all_told(4)
    victim = newest(before, "PSERVER", 1)
    (Path(victim["env"]["PENSTOCK_PS_STATE_DIR"]) / "log").write_text("acknowledged")
    os.kill(victim["pid"], signal.SIGKILL)
    again = newest(await group.all_told(5), "PSERVER", 1)
    assert again["pid"] != victim["pid"]
    same = ("PADDLE_PORT", "PENSTOCK_PS_STATE_DIR", "PENSTOCK_PS_TOKEN", "PENSTOCK_EPOCH")
    assert [again["env"][name] for name in same] == [victim["env"][name] for name in same]
    assert (Path(again["env"]["PENSTOCK_PS_STATE_DIR"]) / "log").read_text() == "acknowledged"
    job = await group.state("RUNNING")
    assert (job["attempt"], len(job["replicas"])) == (1, 5)
    for one in before:
        if one is not victim:
            os.kill(one["pid"], 0)  # the others went on
    release_all(group)
    job = await group.state("SUCCEEDED")
    assert job["attempt"] == 1


async def test_killed_trainer_comes_back_with_a_higher_epoch(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    group = await submit(sqlite_server, tmp_path / "said", restart={"max_restarts": 2})
    victim = newest(await group.all_told(4), "TRAINER", 0)
    os.kill(victim["pid"], signal.SIGKILL)
    again = newest(await group.all_told(5), "TRAINER", 0)
    assert int(again["env"]["PENSTOCK_EPOCH"]) > int(victim["env"]["PENSTOCK_EPOCH"])
    assert again["env"]["PENSTOCK_REPLICA_ID"] != victim["env"]["PENSTOCK_REPLICA_ID"]
    release_all(group)
    await group.state("SUCCEEDED")


async def test_killed_process_ends_a_job_that_may_not_restart(
    sqlite_server: Server, node: Path, tmp_path: Path
) -> None:
    group = await submit(sqlite_server, tmp_path / "said", restart={"max_restarts": 0})
    victim = newest(await group.all_told(4), "PSERVER", 0)
    os.kill(victim["pid"], signal.SIGKILL)
    job = await group.state("FAILED")
    assert "pserver 0 on node 'n1' was ended by signal 9 (SIGKILL)" in job["why"]


async def test_crashed_trainer_ends_the_job_and_is_named(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    group = await submit(sqlite_server, tmp_path / "said", restart={"max_restarts": 2})
    await group.all_told(4)
    group.release("TRAINER", 1, code=3)
    job = await group.state("FAILED")
    assert "trainer 1 on node 'n1' exited with code 3" in job["why"]


async def test_lasting_pservers_are_stopped_and_their_state_removed(
    sqlite_server: Server, node: Path, tmp_path: Path
) -> None:
    group = await submit(sqlite_server, tmp_path / "said")
    told = await group.all_told(4)
    for index in range(2):
        group.release("TRAINER", index)
    job = await group.state("SUCCEEDED")
    assert {r["state"] for r in job["replicas"] if r["role"] == "pserver"} == {"KILLED"}
    folder = Path(newest(told, "PSERVER", 0)["env"]["PENSTOCK_PS_STATE_DIR"])

    async def kept() -> bool:
        return os.access(folder, os.F_OK)

    await until_answer(kept, lambda there: not there)


@pytest.mark.parametrize("sqlite_server", [{"pserver_grace_s": 60.0}], indirect=True)
async def test_a_pserver_crash_after_its_trainers_shows_its_log(
    sqlite_server: Server, node: Path, tmp_path: Path
) -> None:
    group = await submit(sqlite_server, tmp_path / "said")
    await group.all_told(4)
    for index in range(2):
        group.release("TRAINER", index)
    await group.state("STOPPING")
    group.release("PSERVER", 1, code=3)
    group.release("PSERVER", 0)
    job = await group.state("FAILED")
    assert job["reason"] == "replica_failed"
    said = "every trainer ended with exit code 0, but then pserver 1 on node 'n1' exited with code 3"
    assert (job["why"].splitlines()[0], job["reason_detail"]) == (said, said)
    assert "pserver ends with code 3" in job["why"]


async def test_counters_of_all_processes_come_together(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    group = await submit(sqlite_server, tmp_path / "said", env={"TELL_EXCHANGE": "1"})

    async def cells() -> list[dict[str, Any]]:
        found = (await sqlite_server.http.get(f"/api/v1/jobs/{group.id}/exchange")).json()
        return [cell for cell in found["cells"] if cell["calls"] and cell["staleness"]]

    complete = await until_answer(cells, lambda found: len(found) == 4)
    assert {(c["trainer"], c["pserver"], c["block"], c["sent_bytes"], c["staleness"]) for c in complete} == {
        (t, p, "w.block0", 64, 3) for t in range(2) for p in range(2)
    }
    assert [c["calls"] for c in complete] == [1, 1, 2, 2]
    release_all(group)
    await group.state("SUCCEEDED")
    assert await cells() == complete


async def test_two_jobs_never_share_a_port(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    one_each = {"trainers": {"memory": "1MiB"}, "pservers": {"count": 1, "memory": "1MiB"}}
    groups = [await submit(sqlite_server, tmp_path / name, **one_each) for name in ("a", "b")]
    first, second = [(await group.all_told(2))[0] for group in groups]
    assert first["env"]["PADDLE_PORT"] != second["env"]["PADDLE_PORT"]
    for group in groups:
        release_all(group)
        await group.state("SUCCEEDED")
