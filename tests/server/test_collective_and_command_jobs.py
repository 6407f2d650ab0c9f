"""Jobs of ranks, and of any command, on a real server and a real agent: what they are told, figures, and the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.scripts import torchrun_ddp
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio

SCRIPTS = Path(__file__).parents[1] / "distributed" / "scripts"
SMALL = {"cpus": 0, "memory": "1MiB"}
SAYS_WHO_IT_IS = """
import json, os
listed = ("PADDLE", "MASTER", "FLAGS", "OMP", "RANK", "LOCAL", "GROUP", "WORLD")
print(json.dumps({n: v for n, v in os.environ.items() if n.startswith(listed)}))
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the data is gone")
time.sleep(600)
"""
REPORTS = """
import os
from penstock import telemetry
for step in range(3):
    telemetry.log(accuracy=0.25 * step, step=10 * step)
print("has reported", os.environ["PENSTOCK_INDEX"])
"""
RANKS_REPORT = """
import os
from penstock import telemetry
for step in range(2):
    telemetry.log(rank=int(os.environ["RANK"]), step=step)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


async def run(server: Server, mode: str, *argv: str, count: int = 2, state: str = "SUCCEEDED") -> dict[str, Any]:
    """Run a job to its end and return it."""
    job = await server.submit(
        mode=mode, entrypoint=[sys.executable, *argv], trainers={"count": count, **SMALL}, stop_grace_s=1
    )
    return await server.job_in(job["id"], state)


async def log_of(server: Server, job: dict[str, Any], index: int) -> str:
    """Return what a replica has written, once all of it is there."""
    replica = next(one for one in job["replicas"] if one["index"] == index)

    async def read() -> dict[str, Any]:
        answer = await server.http.get(f"/api/v1/jobs/{job['id']}/logs", params={"replica_id": replica["id"]})
        answer.raise_for_status()
        piece: dict[str, Any] = answer.json()
        return piece

    text: str = (await until_answer(read, lambda piece: bool(piece["eof"] and piece["text"])))["text"]
    return text


@pytest.mark.smoke
async def test_ranks_get_their_places_by_fluids_and_torchruns_names(sqlite_server: Server, node: Path) -> None:
    job = await run(sqlite_server, "collective", "-c", SAYS_WHO_IT_IS, count=3)
    told = [json.loads(await log_of(sqlite_server, job, index)) for index in range(3)]
    endpoints = [one["endpoint"] for one in sorted(job["replicas"], key=lambda one: one["index"])]
    ports = {one.rpartition(":")[2] for one in endpoints} | {told[0]["MASTER_PORT"]}
    assert len(ports) == 4, "every listener has a port of its own"
    for rank, mine in enumerate(told):
        assert mine["PADDLE_TRAINER_ENDPOINTS"] == ",".join(endpoints)
        assert mine["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank]
        assert mine["PADDLE_TRAINER_ID"] == mine["RANK"] == mine["LOCAL_RANK"] == str(rank)
        sizes = ("PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        assert [mine[name] for name in sizes] == ["3"] * 4
        assert (mine["MASTER_ADDR"], mine["MASTER_PORT"]) == ("127.0.0.1", told[0]["MASTER_PORT"])
        assert (mine["GROUP_RANK"], mine["OMP_NUM_THREADS"]) == ("0", "1")
        assert "FLAGS_selected_gpus" not in mine


async def test_ranks_on_two_nodes_have_local_numbers_and_addresses(sqlite_server: Server) -> None:
    first, second = await sqlite_server.join("n1", cpus=2), await sqlite_server.join("n2", cpus=1)
    async with sqlite_server.agent(first) as one, sqlite_server.agent(second) as other:
        await sqlite_server.submit(mode="collective", trainers={"count": 3, "cpus": 1, "memory": "1MiB"})
        orders = sorted([*await one.desired(2), *await other.desired(1)], key=lambda order: int(order["index"]))
    told = [order["collective_job"] for order in orders]
    assert sorted((job["node"], job["local_rank"], job["num_local"]) for job in told) in (
        [(0, 0, 1), (1, 0, 2), (1, 1, 2)],
        [(0, 0, 2), (0, 1, 2), (1, 0, 1)],
    )
    assert len({(job["master"], *job["endpoints"]) for job in told}) == 1
    assert [len(job["ports"]) for job in told] == [2, 1, 1]
    assert told[0]["master"].rpartition(":")[2] == str(told[0]["ports"][1])


async def test_a_hello_world_for_torchrun_runs_as_a_job(sqlite_server: Server, node: Path) -> None:
    job = await run(sqlite_server, "collective", str(SCRIPTS / "torchrun_hello.py"))
    for rank in range(2):
        assert await log_of(sqlite_server, job, rank) == f"hello from rank {rank} of 2: the sum is 3\n"


async def test_a_ddp_script_runs_as_a_job_and_its_metrics_are_stored(sqlite_server: Server, node: Path) -> None:
    job = await run(sqlite_server, "collective", str(SCRIPTS / "torchrun_ddp.py"))
    expected = torchrun_ddp.train(torchrun_ddp.model(), slice(0, 8))
    found = torch.tensor(json.loads(await log_of(sqlite_server, job, 0)), dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    series = await metrics(sqlite_server, job, 2)
    assert {name: one["step"] for name, one in series.items()} == {
        name: [0, 1, 2, 3, 4] for name in ("loss", "loss.trainer1")
    }


async def test_a_failed_rank_is_named_with_its_log_and_ends_the_others(sqlite_server: Server, node: Path) -> None:
    job = await run(sqlite_server, "collective", "-c", FAILS, state="FAILED")
    assert "trainer 1 on node" in job["why"] and "exited with code 1" in job["why"]
    assert job["why"].endswith("the data is gone")
    ends = {one["index"]: (one["state"], one["exit_code"]) for one in job["replicas"]}
    assert ends == {0: ("KILLED", None), 1: ("EXITED", 1)}


async def test_a_command_reports_figures_and_logs_and_no_graph(sqlite_server: Server, node: Path) -> None:
    job = await run(sqlite_server, "command", "-c", REPORTS)
    assert [await log_of(sqlite_server, job, index) for index in range(2)] == ["has reported 0\n", "has reported 1\n"]
    series = await metrics(sqlite_server, job, 2)
    for name in ("accuracy", "accuracy.trainer1"):
        assert (series[name]["step"], series[name]["value"]) == ([0, 10, 20], [0, 0.25, 0.5])
    assert not any(one["graph_hash"] for one in job["replicas"])


@pytest.mark.usefixtures("node")
async def test_a_launcher_runs_as_a_command_and_its_first_rank_reports(sqlite_server: Server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS_REPORT)
    job = await run(
        sqlite_server, "command", "-m", "penstock.distributed.launch", "--nproc_per_node", "2", str(script), count=1
    )
    log = (await log_of(sqlite_server, job, 0)).splitlines()
    assert "rank 0 of 2" in log and "rank 1 of 2" not in log
    series = await metrics(sqlite_server, job, 1)
    assert (series["rank"]["step"], series["rank"]["value"]) == ([0, 1], [0, 0])


async def metrics(server: Server, job: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a job's series, once there are `count`."""

    async def read() -> dict[str, Any]:
        answer = await server.http.get(f"/api/v1/jobs/{job['id']}/metrics")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["series"]
        return found

    return await until_answer(read, lambda found: len(found) == count)
