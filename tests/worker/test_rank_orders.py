"""What a rank of a collective job is told besides, and orders of ranks that cannot be."""

from __future__ import annotations

import json
from typing import Any

from penstock.protocol.agent import Desired, DesiredSet
from penstock_worker import messages
from penstock_worker.replica import entrypoint_environment


def order(**fields: Any) -> dict[str, Any]:
    told = {"endpoints": ["[fd00::1]:7001", "[fd00::1]:7002", "h:7001"], "master": "[fd00::1]:7003", "local_rank": 1,
            "num_local": 2, "node": 0, "gpus": [2, 3], "ports": [7002]}  # fmt: skip
    return {"replica_id": "r", "job_id": "j", "job_name": "n", "role": "trainer", "index": 1, "epoch": 1, "stream": 1,
            "entrypoint": ["true"], "cpus": 3, "collective_job": {**told, **fields}}  # fmt: skip


def environment(base: dict[str, str], **env: str) -> dict[str, str]:
    desired = Desired.model_validate({**order(), "env": env})
    return entrypoint_environment(base, desired, socket="s", interpreter="/bin/python")


def test_rank_with_gpus_is_told_which_of_its_node_are_its_own() -> None:
    found = environment({})
    assert (found["FLAGS_selected_gpus"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2,3", "1", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("fd00::1", "7003"), (
        "torch takes an address without brackets"
    )


def test_threads_of_a_rank_are_its_cores_unless_its_job_sets_any() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "3"
    assert environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "3", "the agent's shell does not count"
    assert environment({}, OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_job_cannot_pose_as_another_rank() -> None:
    assert environment({}, RANK="0", PADDLE_TRAINER_ID="0")["RANK"] == "1"


def test_a_rank_order_without_an_endpoint_is_refused() -> None:
    found = messages.parse(json.dumps({"type": "desired", "replicas": [order(endpoints=["h:1"])]}))
    assert isinstance(found, DesiredSet)
    assert [one.detail for one in found.refused] == [
        "this node cannot read its order: trainer 1 is none of the 1 endpoints of its job"
    ]
