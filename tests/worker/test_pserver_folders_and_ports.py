"""What an agent keeps for pservers: folders that go when their job is over, ports that are free."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from pathlib import Path

import pytest

from penstock.errors import PeerError
from penstock.protocol.agent import CheckpointOrder, Desired, DesiredSet
from penstock_worker import messages, ports, statedirs
from penstock_worker.replica import NEVER_STARTED, Replica, entrypoint_environment
from penstock_worker.snapshots import SnapshotCache


def order(job_id: str = "j1", role: str = "pserver", attempt: int = 1) -> Desired:
    fields = {"replica_id": "r1", "job_id": job_id, "job_name": "job", "role": role, "index": 2, "epoch": 5}
    return Desired.model_validate({**fields, "attempt": attempt, "stream": 1, "entrypoint": ["true"]})


def test_folders_are_by_job_attempt_and_index_for_pservers_only(tmp_path: Path) -> None:
    found = statedirs.state_dir(tmp_path, order())
    assert found == tmp_path / "pservers" / "j1" / "attempt-1" / "pserver-2"
    assert statedirs.state_dir(tmp_path, order(attempt=2)) != found
    assert statedirs.state_dir(tmp_path, order(role="trainer")) is None


@pytest.mark.parametrize("job_id", ["..", "a/b", "", "x" * 65])
def test_job_id_that_leads_elsewhere_is_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(PeerError, match="folder"):
        statedirs.state_dir(tmp_path, order(job_id))


def test_only_folders_of_ended_jobs_without_process_are_deleted(tmp_path: Path) -> None:
    for name in ("over", "goes-on", "still-here"):
        (tmp_path / "pservers" / name).mkdir(parents=True)
    assert statedirs.over(tmp_path, ["goes-on"], ["still-here"]) == [tmp_path / "pservers" / "over"]
    assert statedirs.over(tmp_path / "nowhere", [], []) == []


def test_checkpoints_outlive_attempts_and_env_may_set_the_folder(tmp_path: Path) -> None:
    asked = order().model_copy(update={"checkpoint": CheckpointOrder(every_steps=7, keep=2)})
    folder = statedirs.checkpoint_dir(tmp_path, asked)
    assert folder == tmp_path / "checkpoints" / "j1"
    assert statedirs.checkpoint_dir(tmp_path, asked.model_copy(update={"attempt": 2})) == folder
    assert statedirs.checkpoint_dir(tmp_path, order()) is None
    with pytest.raises(PeerError, match="folder"):
        statedirs.checkpoint_dir(tmp_path, asked.model_copy(update={"job_id": ".."}))

    def told(job: Desired) -> dict[str, str]:
        environ = entrypoint_environment({}, job, socket="/s", interpreter="/bin/python", checkpoint_dir=folder)
        return {name: value for name, value in environ.items() if "CHECKPOINT" in name}

    expected = {"DIR": str(folder), "EVERY_STEPS": "7", "KEEP": "2"}
    assert told(asked) == {f"PENSTOCK_CHECKPOINT_{name}": value for name, value in expected.items()}
    shared = asked.model_copy(update={"env": {"PENSTOCK_CHECKPOINT_DIR": "/shared"}})
    assert told(shared)["PENSTOCK_CHECKPOINT_DIR"] == "/shared"
    assert told(order()) == {}
    folder.mkdir(parents=True)
    assert statedirs.over(tmp_path, ["j1"], []) == []
    assert statedirs.over(tmp_path, [], []) == [folder]


def test_older_server_that_does_not_say_keeps_everything() -> None:
    told = messages.parse('{"type":"desired","replicas":[]}')
    assert isinstance(told, DesiredSet)
    assert told.keep_state is None
    said = messages.parse('{"type":"desired","replicas":[],"keep_state":["j1"]}')
    assert isinstance(said, DesiredSet)
    assert said.keep_state == ["j1"]


def test_offered_ports_are_free_and_of_their_range() -> None:
    offered = ports.offer(random.Random(1), count=8)
    assert len(set(offered)) == 8
    assert all(ports.FIRST <= port <= ports.LAST for port in offered)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", offered[0]))
        listener.listen()
        assert not ports.is_free(offered[0])
    assert ports.is_free(offered[1])


@pytest.mark.asyncio
async def test_a_pserver_stopped_while_its_port_is_taken_ends_at_once(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        endpoints = [f"127.0.0.1:{port}"] * (order().index + 1)
        told = {"endpoints": endpoints, "num_trainers": 1, "token": "t", "address": "h", "port": port}
        desired = Desired.model_validate({**order().model_dump(), "pserver_job": told})
        replica = Replica(desired, tmp_path / "replicas" / "r", changed=lambda: None, wake=lambda: None)
        cache = SnapshotCache(tmp_path / "snapshots", lambda sha256, path: None)
        replica.stop()
        await replica.run(cache, tmp_path / "lease.json", 0.0)
        await asyncio.sleep(0)  # its telemetry socket closes in the loop's next turn
    assert (replica.report.state, replica.report.detail) == ("KILLED", NEVER_STARTED)


def test_a_pserver_order_without_an_endpoint_is_refused() -> None:
    told = {"endpoints": [], "num_trainers": 1, "token": "t", "address": "h", "port": 1}
    fields = {**order().model_dump(), "pserver_job": told}
    found = messages.parse(json.dumps({"type": "desired", "replicas": [fields]}))
    assert isinstance(found, DesiredSet)
    assert [one.detail for one in found.refused] == [
        f"this node cannot read its order: pserver {order().index} is none of the 0 endpoints of its job"
    ]


def test_secret_of_an_order_is_not_in_its_text() -> None:
    told = {"endpoints": ["h:1"] * 3, "num_trainers": 1, "token": "s3cret", "address": "h", "port": 1}
    fields = {**order().model_dump(), "pserver_job": told}
    assert "s3cret" not in repr(Desired.model_validate(fields))
