"""A trainer's waits over a slow link: the time in which its gradients leave counts, as does that until the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from tests.ps.channel_jobs import OPS, Job, Start, jobs
from tests.ps.torch_storage import TorchStorage
from tests.support.slow_link import slow_link

from penstock.ps.communicator import remotes

ROWS, COLUMNS = 1024, 512
BYTES = ROWS * COLUMNS * 4
RATE = 40e6


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:
        yield begin


def exchanged(job: Job, *, ahead: bool) -> tuple[float, float]:
    """Push a gradient of 2 MiB and read one row of it; return wall time and counted waits, in seconds."""
    spec = '{"dense": [["w", ["w.block0"], [0], 1]], "sparse": [], "of": "' + job.remotes[0] + '"}'
    gradient = torch.ones(ROWS, COLUMNS)
    client = job.clients[0]

    def waited() -> int:
        return sum(row.wait_ns for row in client.counters.rows().values())

    before, began = waited(), time.perf_counter_ns()
    sent_ahead = [OPS.send_ahead([gradient], job.remotes[0], ["w.block0"], [0])] if ahead else []
    OPS.send_step([gradient], [], [], sent_ahead, job.remotes[0], spec)
    return (time.perf_counter_ns() - began) / 1e9, (waited() - before) / 1e9


@pytest.mark.parametrize("ahead", [True, False])
def test_bytes_that_leave_slowly_are_waited_for(start: Start, *, ahead: bool) -> None:
    stored = [TorchStorage({"w.block0": (ROWS, COLUMNS)}, {}, sync=True)]
    job = start("sync", stored=stored, shared_memory=False)
    with slow_link(job.endpoints[0], RATE):
        remotes.get(job.remotes[0])
        exchanged(job, ahead=False)  # Python's: it learns the layout
        wall_s, waited_s = exchanged(job, ahead=ahead)
    assert 0.9 * BYTES / RATE < waited_s <= wall_s
