"""The demo's job is made as small as the node, and no smaller."""

from __future__ import annotations

from typing import Any

from penstock.command.demo import clamp, fits
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.rest import Node

GIB = 2**30


def node(cpus: int, memory_gib: int, gpus: int = 0) -> Node:
    return Node(
        id="n", name="n", host="h", state="READY", cpus=cpus, gpus=gpus, memory_bytes=memory_gib * GIB, cpus_used=0,
        last_seen_at=None, version="0", findings=[], address="", replicas=0, etag="1", clock=None,
        reason="", reason_detail="", drain_by=None, drain_left_s=None, labels={},
    )  # fmt: skip


def job(**fields: Any) -> JobSpec:
    trainers = {"cpus": 2, "memory": "2GiB", **fields.pop("trainers", {})}
    return JobSpec.model_validate({"name": "j", "entrypoint": ["a"], "trainers": trainers, **fields})


def test_a_job_that_fits_stays_as_it_is() -> None:
    spec = job(env={"CPU_NUM": "2"})
    assert clamp(spec, [node(2, 2)]) == (spec, [])


def test_one_core_and_one_gibibyte_lower_all_three_with_a_note() -> None:
    spec, said = clamp(job(env={"CPU_NUM": "2", "OTHER": "9"}), [node(1, 1)])
    assert (spec.trainers.cpus, spec.trainers.memory, spec.env) == (1, str(GIB), {"CPU_NUM": "1", "OTHER": "9"})
    assert said == [
        "this node has 1 CPU; trainers.cpus is lowered from 2",
        "this node has 1 GiB; trainers.memory is lowered from 2GiB",
        "CPU_NUM is lowered from 2 to 1",
    ]
    assert fits(spec, [node(1, 1)])


def test_a_job_that_clamping_cannot_help_does_not_fit() -> None:
    assert not fits(job(trainers={"gpus": 1}), [node(2, 2)])
    assert not fits(job(trainers={"count": 2}), [node(2, 9)])
    assert not fits(job(mode="pserver", pservers={"count": 1}), [node(2, 9)])
    assert not fits(job(), [])


def test_replicas_may_stand_on_several_nodes() -> None:
    assert fits(job(trainers={"count": 2}), [node(2, 2), node(2, 2)])
