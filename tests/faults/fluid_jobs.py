"""Jobs of real processes: servers and trainers that run `wide_and_deep.py`, what became of them, and what they left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.faults.wide_and_deep import FAR, STEPS
from tests.support.endpoints import free_endpoints
from tests.support.nursery import Forked, Nursery, said
from tests.support.waiting import until

from penstock.ps.durability.server_snapshots import newest

SCRIPT = Path(__file__).with_name("wide_and_deep.py")
QUICK = {
    "PENSTOCK_JOB_ID": "j", "PENSTOCK_PS_TOKEN": "t", "PENSTOCK_PS_LEASE_S": "6", "PENSTOCK_PS_DEADLINE_S": "100",
    "PENSTOCK_PS_START_S": "60", "PENSTOCK_PS_SNAPSHOT_S": "0.3", "OMP_NUM_THREADS": "1", "CPU_NUM": "1",
}  # fmt: skip
Environ = dict[str, str]


class Process(Forked):
    """One process of a job."""

    @property
    def losses(self) -> dict[int, str]:
        """The steps that were acknowledged so far, with their losses to the bit."""
        whole = [line.split() for line in self.output.splitlines(keepends=True) if line.endswith("\n")]
        return {int(line[0]): line[1] for line in whole if line != ["end"]}

    def reaches(self, steps: int) -> None:
        """Wait until so many steps are acknowledged; fail if it ends before."""
        until(lambda: len(self.losses) >= steps or self.has_ended(0), f"step {steps}")
        assert len(self.losses) >= steps, self.errors


class Job:
    """A job of two trainers. Servers are started by endpoint; a start after a kill is at the same one."""

    def __init__(
        self, nursery: Nursery, folder: Path, *, mode: str = "sync", servers: int = 1, host: str = "127.0.0.1",
        **environ: str,
    ) -> None:  # fmt: skip
        self._nursery, self.folder, self.mode = nursery, folder, mode
        self.environ: Environ = {**QUICK, "PENSTOCK_PS_STATE_DIR": str(folder / "state"), **environ}
        self.endpoints = free_endpoints(servers, host)
        self.processes: list[Process] = []
        self._numbers = itertools.count()
        folder.mkdir(exist_ok=True)

    def server(self, index: int = 0, *, limits: Any = None) -> Process:
        """Start a server."""
        endpoint = self.endpoints[index]
        return self._start(["pserver", endpoint, "--servers", ",".join(self.endpoints)], {}, limits)

    def trainer(
        self, number: int, *options: object, at: Sequence[str] = (), limits: Any = None, **environ: str
    ) -> Process:
        """Start a trainer. `at`: where it finds the servers, if not at their endpoints."""
        arguments = ["trainer", str(number), "--servers", ",".join(at or self.endpoints), *map(str, options)]
        return self._start(arguments, environ, limits)

    def pace(self, first: int) -> Path:
        """Have trainers that run with `--pace` of this file wait before a step, until the next call allows more."""
        path, written = self.folder / "pace", self.folder / "pace.written"
        written.write_text(str(first))
        return written.replace(path)

    def _start(self, arguments: list[str], environ: Environ, limits: Any) -> Process:
        name = self.folder / f"{next(self._numbers)}-{arguments[0]}"
        arguments += ["--mode", self.mode]
        argv = [str(SCRIPT), *arguments]
        self.processes.append(
            Process(self._nursery, name, argv, self.environ | environ, limits=limits, cwd=self.folder)
        )
        return self.processes[-1]

    def all_end_well(self) -> None:
        """Wait until all end with 0, but for those that have ended already."""
        for process in self.processes:
            assert process.status is not None or process.end() == 0, self.said

    @property
    def said(self) -> str:
        """What every process said on stderr."""
        return said(self.processes)

    def close(self) -> None:
        """End what runs."""
        for process in self.processes:
            process.close()


class Left:
    """What a job's servers left: values by parameter; rows by id of the tables that count steps."""

    def __init__(self, job: Job) -> None:
        parts: dict[str, dict[int, Any]] = {}
        self.far: dict[int, float] = {}
        for folder in sorted((job.folder / "state").iterdir()):
            found = newest(folder)
            assert found is not None
            assert found.cut.is_finished
            for item in found.items():
                name, _, part = item.name.partition("@")
                if item.is_part:
                    rows = item.tensors["rows"].numpy()
                    assert (rows[:, :1] == rows).all()
                    self.far |= dict(zip(item.tensors["ids"].tolist(), rows[:, 0].tolist(), strict=True))
                elif name in item.tensors:
                    parts.setdefault(name, {})[int(part)] = item.tensors[name].numpy()
        self.values = {n: np.concatenate([p[i] for i in sorted(p)]) for n, p in parts.items()}

    @property
    def wide(self) -> list[float]:
        """Twice the rounds; what both trainers added by themselves."""
        weights: list[float] = self.values["wide"].ravel().tolist()
        return weights

    def applied(self, trainer: int) -> dict[int, float]:
        """Return step -> how much it added, of the steps of a trainer that were applied; both tables say the same."""
        near = self.values["near"][trainer * STEPS : (trainer + 1) * STEPS]
        assert (near[:, :1] == near).all()
        counted = {int(step): float(near[step, 0]) for step in np.nonzero(near[:, 0])[0]}
        ids = {i: v for i, v in self.far.items() if trainer * FAR <= i < trainer * FAR + STEPS and v}
        assert {i - trainer * FAR: v for i, v in ids.items()} == counted
        return counted


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a sync job of two trainers comes to, of `steps` steps each, and how long it took."""

    losses: list[dict[int, str]]
    left: Left
    steps: int
    took_s: float

    @property
    def slack_s(self) -> float:
        """How late one may be on this machine, which may be busy with other things."""
        return 10.0 + 4.0 * self.took_s

    def has_counted(self, left: Left, share: float) -> None:
        """See that each step of both trainers was applied once, each with `share` of what its trainer sent / 2."""
        each = self.steps * share
        assert left.applied(0) == left.applied(1) == dict.fromkeys(range(self.steps), share)
        assert left.wide == [2 * each, each, each]

    def is_what_became_of(self, job: Job, trainers: Sequence[Process]) -> None:
        """See that a job of as many steps lost nothing, repeated nothing, and, in sync mode, is equal to the bit.

        An update in async mode is not divided by the number of trainers, and its order is not that of others.
        """
        left = Left(job)
        self.has_counted(left, 1.0 if job.mode == "sync" else 2.0)
        if job.mode == "sync":
            assert [t.losses for t in trainers] == self.losses
            assert bits(left) == bits(self.left)
            assert left.far == self.left.far


def bits(left: Left) -> dict[str, bytes]:
    """Return all dense values."""
    return {name: values.tobytes() for name, values in left.values.items()}
