"""Gradients copied into the memory shared with a server before their step: it sends what they are when it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from tests.ps.channel_jobs import OPS, Job, Start, jobs
from tests.ps.torch_storage import TorchStorage
from torch import Tensor

from penstock.ps.communicator import remotes
from penstock.ps.remote import PsMode

SHAPES = [(300, 256), (280, 256)]
"""Of blocks that fill more than what one thread copies."""
BLOCKS = ["w.block0", "w.block1"]


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:

        def begun(mode: PsMode, *, by_python: bool = False) -> Job:
            sync = mode == "sync"
            stored = [TorchStorage({BLOCKS[i]: shape}, {"ids": (2, 1000)}, sync=sync) for i, shape in enumerate(SHAPES)]
            job = begin(mode, stored=stored, by_python=by_python)
            layout = {"dense": [["w", BLOCKS, [0, 1], 2]], "sparse": [["ids", ["ids"], [0, 1], []]]}
            job.spec = json.dumps({**layout, "of": job.remotes[0]})  # one that nobody knows yet
            remotes.get(job.remotes[0])  # before another job takes its place as the opener
            return job

        yield begun


def of_seed(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def copied(job: Job, dense: list[Tensor]) -> list[Tensor]:
    return [OPS.send_ahead(dense[at : at + 1], job.remotes[0], [BLOCKS[at]], [at]) for at in (1, 0)]


def pushed(job: Job, dense: list[Tensor], ahead: list[Tensor], *, num_rows: int = 7) -> list[Tensor]:
    """Push, and return what is read then."""
    ids = torch.arange(num_rows) % 5
    sent = OPS.send_step(dense, [ids], [torch.ones(num_rows, 2)], ahead, job.remotes[0], job.spec)
    out = [torch.empty(shape) for shape in SHAPES]
    OPS.recv_step(out, [sent], job.remotes[0], ["w", "w"], BLOCKS, [0, 1])
    return out


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_are_those_of_messages_to_the_bit(start: Start, mode: PsMode) -> None:
    found = []
    for by_python in (True, False):
        job = start(mode, by_python=by_python)
        read, numbers = [], []
        for seed in range(5):
            dense = of_seed(seed)
            ahead = copied(job, dense)
            numbers.append([int(one) > 0 for one in ahead])
            read.append(pushed(job, dense, ahead, num_rows=4 + 3 * seed))
        found.append((job.everything(), [[t.tolist() for t in of] for of in read]))
        if not by_python:
            assert job.steps[0] == 1, "the first step learns how a step is laid out"
            assert numbers == [[False] * 2] * 2 + [[True] * 2] * 3, "the second one where its gradients lie"
    assert found[0] == found[1]


@pytest.mark.parametrize("breaks", ["given up", "given up in part", "not copied again", "another tensor"])
def test_a_step_sends_what_its_gradients_are_then(start: Start, breaks: str) -> None:
    expected, job = start("sync", by_python=True), start("sync")
    for seed in range(3):
        for each in (expected, job):
            pushed(each, of_seed(seed), [])
    dense = of_seed(3)
    ahead = copied(job, dense)
    assert all(int(one) > 0 for one in ahead)
    if breaks == "given up":  # its memory is that of the next one's
        ahead = []
    elif breaks == "given up in part":  # nothing tells its step of what was copied
        few = torch.ones(3, 7).t()
        assert not few.is_contiguous()
        OPS.send_ahead([dense[0], few], job.remotes[0], BLOCKS, [0, 1])
        ahead = []
    elif breaks == "not copied again":
        pushed(job, dense, ahead)
        pushed(expected, of_seed(3), [])
        ahead = []
    else:
        dense = [t.clone() for t in dense]
    for t in dense:
        t.mul_(-2)
    pushed(job, dense, ahead)
    pushed(expected, dense, [])
    assert job.everything() == expected.everything()
    assert job.steps[0] == 1, "copies of no step do not close the channels"


@pytest.mark.parametrize("how", ["memory that is outgrown", "another channel"])
def test_copies_end_with_the_memory_that_they_lie_in(start: Start, how: str) -> None:
    expected, job = start("sync", by_python=True), start("sync")
    for seed in range(6):
        dense, num_rows = of_seed(seed), 200_000 if how == "memory that is outgrown" and seed == 3 else 7
        pushed(expected, dense, [], num_rows=num_rows)
        ahead = copied(job, dense)
        if how == "another channel" and seed == 3:
            job.clients[0]._session.disarm(0)
        pushed(job, dense, ahead, num_rows=num_rows)
    assert job.everything() == expected.everything()
    assert all(int(one) > 0 for one in ahead)
