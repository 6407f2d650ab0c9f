"""What an agent sets for an entrypoint is what a job's `env` may not set: the contract and the refusal agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.protocol.agent import Desired
from penstock.protocol.contract import CollectiveJob, Mode, PserverJob, reserved
from penstock_worker.replica import entrypoint_environment

PSERVER = PserverJob(endpoints=("127.0.0.1:1",), num_trainers=1, token="secret", address="127.0.0.1", port=1)
COLLECTIVE = CollectiveJob(
    endpoints=("127.0.0.1:1",), master="127.0.0.1:2", local_rank=0, num_local=1, node=0, gpus=(0,), ports=(1, 2)
)
OF_EVERYBODY = {"PYTHONUNBUFFERED", "PATH", "PENSTOCK_PS_LEASE_S", "OMP_NUM_THREADS"}
"""What an agent only sets, or only adds to, where a job says nothing."""


def environment(mode: Mode, role: Literal["trainer", "pserver"], env: dict[str, str]) -> dict[str, str]:
    groups: dict[Mode, dict[str, Any]] = {
        "pserver": {"pserver_job": PSERVER},
        "collective": {"collective_job": COLLECTIVE},
    }
    desired = Desired(
        replica_id="r", job_id="j", job_name="n", role=role, index=0, epoch=1, stream=7, entrypoint=["true"], env=env,
        **groups.get(mode, {}),
    )  # fmt: skip
    return entrypoint_environment({}, desired, socket="/s", interpreter="/bin/python", state_dir=Path("/state"))


@pytest.mark.parametrize("mode", ["local", "command", "pserver", "collective"])
def test_what_an_agent_sets_is_what_a_job_may_not(mode: Mode) -> None:
    names = reserved(mode, gpus=1)
    said = dict.fromkeys([*names, *(OF_EVERYBODY - {"PATH"}), "OTHER"], "the job's")
    roles: tuple[Literal["trainer", "pserver"], ...] = ("trainer", "pserver") if mode == "pserver" else ("trainer",)
    overridden = set()
    for role in roles:
        assert environment(mode, role, {}).keys() - OF_EVERYBODY <= names
        given = environment(mode, role, said)
        overridden |= {name for name in said if given[name] != "the job's"}
    assert overridden == names


def test_gpus_are_told_only_to_ranks_that_have_any() -> None:
    assert "FLAGS_selected_gpus" not in reserved("collective")
    assert "FLAGS_selected_gpus" in reserved("collective", gpus=2)


def test_a_node_gives_what_its_machine_needs_and_nothing_else() -> None:
    passing = {"PENSTOCK_CACHE": "/cache", "CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/lib"}
    held = {
        "PENSTOCK_JOIN_TOKEN": "t",
        "PENSTOCK_MATRIX_KERNELS": "torch",
        "CPU_NUM": "4",
        "HF_TOKEN": "t",
        "DATABASE_URL": "postgresql://app:hidden@db/app",
        "RANK": "3",
        "PADDLE_X": "1",
    }
    desired = Desired(
        replica_id="r", job_id="j", job_name="n", role="trainer", index=0, epoch=1, stream=7, entrypoint=["true"],
    )  # fmt: skip
    found = entrypoint_environment({**passing, **held}, desired, socket="/s", interpreter="/bin/python")
    assert {name: found.get(name) for name in passing} == passing
    assert not found.keys() & held.keys()


def test_a_job_s_own_variables_are_over_those_of_its_node() -> None:
    desired = Desired(
        replica_id="r", job_id="j", job_name="n", role="trainer", index=0, epoch=1, stream=7, entrypoint=["true"],
        env={"CPU_NUM": "2", "PENSTOCK_CACHE": "/mine", "HF_TOKEN": "named"},
    )  # fmt: skip
    base = {"CPU_NUM": "4", "PENSTOCK_CACHE": "/cache", "HF_TOKEN": "of the node"}
    found = entrypoint_environment(base, desired, socket="/s", interpreter="/bin/python")
    assert {name: found[name] for name in base} == {"CPU_NUM": "2", "PENSTOCK_CACHE": "/mine", "HF_TOKEN": "named"}
