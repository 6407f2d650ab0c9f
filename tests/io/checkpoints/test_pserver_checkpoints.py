"""Jobs with parameter servers go on from a checkpoint: to the same bits, and with other numbers of both roles."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.io.checkpoints.conftest import Process, Start
from tests.support.endpoints import free_endpoints

from penstock.io.checkpoints import server_parts
from penstock.io.checkpoints.reading import StoredCheckpoint, newest
from penstock.ps.durability.server_snapshots import ServerSnapshot

SCRIPT = Path(__file__).with_name("pserver_job.py")
pytestmark = [pytest.mark.slow]
Values = dict[str, np.ndarray]


class Job:
    """The processes of one."""

    def __init__(self, start: Start, folder: Path, servers: int, trainers: int, *options: object) -> None:
        endpoints = free_endpoints(servers)
        environ = {
            "PENSTOCK_JOB_ID": "j", "PENSTOCK_PS_START_S": "60", "PENSTOCK_PS_LEASE_S": "60",
            "PENSTOCK_PS_SAVE_DIRS": str(folder.parent),
        }  # fmt: skip
        told = ("--servers", ",".join(endpoints), "--trainers", trainers, "--checkpoints", folder, *options)
        self.servers = [start(SCRIPT, "pserver", index, *told, **environ) for index in range(servers)]
        self.trainers = [start(SCRIPT, "trainer", index, *told, **environ) for index in range(trainers)]

    @property
    def processes(self) -> list[Process]:
        """All."""
        return [*self.servers, *self.trainers]

    def ends_well(self) -> None:
        """Wait for the end of all."""
        assert [one.end() for one in self.processes] == [0] * len(self.processes), self.said

    def is_killed(self) -> None:
        """Trainer 0 kills itself, and then everybody is killed."""
        assert self.trainers[0].end() == -signal.SIGKILL, self.said
        for one in self.processes[:-1] if len(self.trainers) == 1 else self.processes:
            if one.status is None:
                one.kill()
                one.end()

    @property
    def said(self) -> str:
        """What they have written."""
        return "\n".join(f"== {one.status}\n{one.said}" for one in self.processes)


def left(folder: Path) -> tuple[StoredCheckpoint, Values]:
    """Return the newest checkpoint, and what servers wrote into it: whole variables, rows of tables by id."""
    found = newest(folder, strict=True, sets_aside=False)
    assert found is not None and found.record.servers is not None
    parts: dict[str, dict[int, np.ndarray]] = {}
    rows: dict[str, dict[int, bytes]] = {}
    for folder in server_parts.parts(found.path, found.record.servers):
        for item in ServerSnapshot(folder).items():
            name, _, part = item.name.partition("@")
            if item.is_part:
                pairs = zip(item.tensors["ids"].tolist(), item.tensors["rows"], strict=True)
                rows.setdefault(name, {}).update({i: row.numpy().tobytes() for i, row in pairs})
                continue
            for variable, tensor in item.tensors.items():
                at = int(part) if part.isdigit() and tensor.dim() and name in variable else 0
                parts.setdefault(variable, {})[at] = tensor.numpy().reshape(-1)
    values = {name: np.concatenate([found[at] for at in sorted(found)]) for name, found in parts.items()}
    for name, of in rows.items():
        values[name] = np.stack([np.frombuffer(of[i], np.float32) for i in sorted(of)])
    return found, values


def test_a_killed_job_resumes_to_the_same_bits_on_other_numbers(start: Start, tmp_path: Path) -> None:
    whole = Job(start, tmp_path / "whole", 2, 2)
    killed = Job(start, tmp_path / "killed", 2, 2, "--die", 5)
    whole.ends_well()
    killed.is_killed()
    found, _ = left(tmp_path / "killed")
    assert (found.record.step, found.record.kind, found.record.num_ranks) == (4, "pserver", 2)
    assert [state.position for state in found.ranks()] == [{"trainer": i, "batch": 4} for i in range(2)]

    for name in ("fewer", "more"):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
    others = {(1, 1): Job(start, tmp_path / "fewer", 1, 1), (3, 3): Job(start, tmp_path / "more", 3, 3)}
    again = Job(start, tmp_path / "killed", 2, 2)
    again.ends_well()
    assert all("Restored(" in one.said for one in again.servers)
    assert all(f"from 4 {{'trainer': {i}, 'batch': 4}}" in one.said for i, one in enumerate(again.trainers))
    wanted, expected = left(tmp_path / "whole")
    assert (wanted.record.step, len(expected) > 8) == (8, True), sorted(expected)
    got, values = left(tmp_path / "killed")
    assert got.record.step == 8
    assert {n: v.tobytes() for n, v in values.items()} == {n: v.tobytes() for n, v in expected.items()}
    for folder, (numbers, job) in zip(("fewer", "more"), others.items(), strict=True):
        job.ends_well()
        assert all("from 4 None" in one.said for one in job.trainers)
        got, values = left(tmp_path / folder)
        assert (got.record.step, got.record.num_ranks) == (8, numbers[1])
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            # The table's float32 sums round in another order, by 6e-8 of rows of 0.1, of which a rate of 0.02 is left.
            tolerance = 1e-9 if value.dtype == np.float64 else 1e-6
            assert np.abs(values[name] - value).max(initial=0) <= tolerance, (numbers, name)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_ended_trainer_keeps_its_place_in_later_checkpoints(mode: str, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    job = Job(start, folder, 1, 2, "--mode", mode, "--short", 3, "--steps", 60, "--every_steps", 20)
    job.ends_well()
    found, _ = left(folder)
    assert found.record.step == 60
    positions = [state.position for state in found.ranks()]
    assert positions == [{"trainer": 0, "batch": 60}, {"trainer": 1, "batch": 3}]
    assert not [path.name for path in folder.iterdir() if path.name.startswith("unfinished")]
