"""Shared memory that cannot be had, and servers killed while they write snapshots."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.faults.fluid_jobs import Job, Process, Undisturbed
from tests.support.waiting import until

KILLS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def shares_memory(process: Process) -> bool:
    """Whether a process has a memory file of the local transport open."""
    open_files = Path(f"/proc/{process.pid}/fd")
    links = []
    for descriptor in os.listdir(open_files):
        try:
            links.append(str((open_files / descriptor).readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    return any("memfd:penstock-ps" in link for link in links)


def run(one: Job, limits: dict[str, int]) -> list[bool]:
    """Run a job of few steps; return which of its processes shared memory after some of them."""
    stop = one.folder / "stop"
    server = one.server(limits=limits)
    trainers = [one.trainer(t, "--until", stop, limits=limits) for t in (0, 1)]
    trainers[0].reaches(3)
    found = [shares_memory(p) for p in (server, *trainers)]
    stop.touch()
    one.all_end_well()
    assert trainers[0].losses.keys() <= trainers[1].losses.keys() | {len(trainers[0].losses) - 1}
    return found


def test_a_job_whose_processes_get_no_shared_memory_does_without(job: Callable[..., Job]) -> None:
    # A limit on the size of files holds for memory files, too, which are whole megabytes. It holds for the server's log
    # as well, which snapshots keep shorter.
    settings = {"PENSTOCK_PS_SNAPSHOT_S": "0.02"}
    assert run(job(**settings), {}) == [True, True, True], "what the limit prevents"
    assert run(job(**settings), {"RLIMIT_FSIZE": (1 << 20) - 1}) == [False, False, False]


def test_a_server_killed_while_it_writes_snapshots_loses_nothing(
    job: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    one = job(PENSTOCK_PS_SNAPSHOT_S="0.01", PENSTOCK_PS_LEASE_S="30")
    server, chance = one.server(), random.Random(4)
    pace = one.pace(0)
    trainers = [one.trainer(t, "--steps", undisturbed.steps, "--pace", pace) for t in (0, 1)]
    interrupted = 0
    for kill in range(KILLS):
        last = 25 * (kill + 1)  # of the steps that have begun when the server is killed
        one.pace(last)
        trainers[0].reaches(last - 15 + chance.randrange(10))
        until(partial(is_writing_or_idle, one, trainers[0], last), "a snapshot is being written")
        server.kill()
        interrupted += len(unfinished(one))
        server = one.server()
    one.pace(undisturbed.steps)
    assert interrupted > 0, "a kill hit a snapshot that was not whole"
    one.all_end_well()
    undisturbed.is_what_became_of(one, trainers)


def is_writing_or_idle(one: Job, trainer: Process, last: int) -> bool:
    """Whether a snapshot is being written, or none will be since all steps up to `last` are over."""
    return bool(unfinished(one)) or len(trainer.losses) >= last


def unfinished(one: Job) -> list[Path]:
    """Return the snapshots that are being written, or were when the server was killed."""
    return list((one.folder / "state").glob("*/unfinished.*"))
