"""Make a job as small as the machine that shall run it: the demo must also run where there is one core. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes

if TYPE_CHECKING:
    from penstock.protocol.rest import Node

THREADS = "CPU_NUM"  # how many places a ParallelExecutor takes


def clamp(spec: JobSpec, nodes: Sequence[Node]) -> tuple[JobSpec, list[str]]:
    """Return the job with no trainer larger than the largest node, and a sentence for each figure that was lowered."""
    if not nodes:
        return spec, []
    cpus, memory = max(node["cpus"] for node in nodes), max(node["memory_bytes"] for node in nodes)
    trainers, env = spec.trainers, dict(spec.env)
    said = []
    if trainers.cpus > cpus:
        said.append(f"this node has {cpus} CPU{'s' * (cpus != 1)}; trainers.cpus is lowered from {trainers.cpus}")
        trainers = trainers.model_copy(update={"cpus": cpus})
    if memory_bytes(trainers.memory) > memory:
        said.append(f"this node has {memory / 2**30:.3g} GiB; trainers.memory is lowered from {trainers.memory}")
        trainers = trainers.model_copy(update={"memory": str(memory)})
    threads = env.get(THREADS, "")
    most = trainers.cpus or cpus
    if threads.isdecimal() and int(threads) > most:
        said.append(f"{THREADS} is lowered from {threads} to {most}")
        env[THREADS] = str(most)
    return spec.model_copy(update={"trainers": trainers, "env": env}), said


def fits(spec: JobSpec, nodes: Sequence[Node]) -> bool:
    """True if the nodes that are there could hold the job. It may be placed or not; False: never, however it waits."""
    roles = [role for role in (spec.trainers, spec.pservers) if role.count]
    return all(any(_holds(node, role) for node in nodes) for role in roles) and _hold_together(roles, nodes)


def _holds(node: Node, role: Resources) -> bool:
    return role.cpus <= node["cpus"] and role.gpus <= node["gpus"] and memory_bytes(role.memory) <= node["memory_bytes"]


def _hold_together(roles: Sequence[Resources], nodes: Sequence[Node]) -> bool:
    return (
        sum(role.count * role.cpus for role in roles) <= sum(node["cpus"] for node in nodes)
        and sum(role.count * role.gpus for role in roles) <= sum(node["gpus"] for node in nodes)
        and sum(role.count * memory_bytes(role.memory) for role in roles) <= sum(n["memory_bytes"] for n in nodes)
    )
