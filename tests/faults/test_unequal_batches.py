"""Trainers with unequal data: who has less leaves, and the job goes on to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.faults.fluid_jobs import Job, Left, Undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_ten_batches_against_seven_end_cleanly(job: Callable[..., Job]) -> None:
    one = job(servers=2)
    for server in (0, 1):
        one.server(server)
    trainers = [one.trainer(t, "--steps", n) for t, n in ((0, 10), (1, 7))]
    one.all_end_well()
    assert [len(t.losses) for t in trainers] == [10, 7]
    left = Left(one)
    assert left.applied(1) == dict.fromkeys(range(7), 1.0)
    assert left.applied(0) == {**dict.fromkeys(range(7), 1.0), **dict.fromkeys(range(7, 10), 2.0)}
    assert left.wide == [20, 7 + 6, 7]


def test_what_nothing_happens_to(undisturbed: Undisturbed) -> None:
    assert [list(one) for one in undisturbed.losses] == [list(range(undisturbed.steps))] * 2
    undisturbed.has_counted(undisturbed.left, 1.0)
