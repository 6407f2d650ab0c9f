"""The environment of an entrypoint: what a node gives to all jobs, then the job's own, then its place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol import contract
from penstock.protocol.agent import Desired
from penstock.protocol.environment import passes_from_node
from penstock.settings import CHECKPOINT_DIR, CHECKPOINT_EVERY_STEPS, CHECKPOINT_KEEP, PS_LEASE_S

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def entrypoint_environment(
    base: Mapping[str, str], desired: Desired, *, socket: str, interpreter: str, state_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
) -> dict[str, str]:  # fmt: skip
    """Return the variables of one replica. `state_dir`: of a pserver; `checkpoint_dir`: of a job with checkpoints.

    Of the agent's own variables those that `passes_from_node` allows come first: no secret, no place in a job, no
    setting. The job's `env`, which holds what its submitter exported, comes next and
    the contract last, so that a job cannot pose as another replica. PATH starts with the folder of the agent's
    interpreter, so that `python` in a job is the agent's. Output is unbuffered unless the job says otherwise.
    """
    environ = {name: value for name, value in base.items() if passes_from_node(name, value)}
    environ["PYTHONUNBUFFERED"] = "1"
    environ.update(desired.env)
    environ["PATH"] = os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH") or DEFAULT_PATH])
    managed = contract.Managed(
        job_id=desired.job_id,
        job_name=desired.job_name,
        replica_id=desired.replica_id,
        role=desired.role,
        index=desired.index,
        epoch=desired.epoch,
        stream=desired.stream,
        socket=socket,
    )
    environ.update(managed.environ())
    if desired.pserver_job is not None:
        folder = "" if state_dir is None else str(state_dir)
        environ.update(desired.pserver_job.environ(desired.role, desired.index, state_dir=folder))
        environ.setdefault(PS_LEASE_S.name, PS_LEASE_S.default_text)
    if desired.collective_job is not None:
        environ.update(desired.collective_job.environ(desired.index))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, desired.cpus)))  # ranks share the cores of their node
    if desired.checkpoint is not None and checkpoint_dir is not None:
        told = desired.checkpoint
        names = (CHECKPOINT_DIR.name, CHECKPOINT_EVERY_STEPS.name, CHECKPOINT_KEEP.name)
        for name, value in zip(names, (checkpoint_dir, told.every_steps, told.keep), strict=True):
            environ.setdefault(name, str(value))  # a job's `env` may name a folder that all nodes reach
    return environ
