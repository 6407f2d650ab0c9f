"""Recording in full: while it is asked for every step is sent, with its mark, and sampling goes on afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.protocol import recording
from penstock.telemetry.sampling import Sampler

NONE = np.zeros(50, np.bool_)
SIZES = np.full(50, 100_000, np.int64)


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (recording.encode(105.0), True),
        (recording.encode(100.0), False),  # over
        (recording.encode(100.0 + recording.MAX_S + 1), False),  # of before the machine was booted
        (b"", False),
        (b"no deadline", False),
    ],
)
def test_a_request_holds_until_its_time(content: bytes, asked: bool) -> None:
    assert (recording.until(content, 100.0) > 0) is asked


def test_every_step_is_chosen_and_the_budget_holds_afterwards() -> None:
    sampler = Sampler(budget_bytes_per_s=50_000)
    for _ in range(50):
        sampler.choose(SIZES, NONE)
        sampler.observe(interval_s=0.1, cpu_s=0.0, sample_cpu_s=0.0)
    assert not sampler.choose(SIZES, NONE).all()
    sampler.in_full = True
    for _ in range(50):
        assert sampler.choose(SIZES, NONE).all()
        sampler.observe(interval_s=0.1, cpu_s=0.0, sample_cpu_s=0.0)
    sampler.in_full = False
    sent = 0
    for _ in range(100):
        sent += int(sampler.choose(SIZES, NONE).sum())
        sampler.observe(interval_s=0.1, cpu_s=0.0, sample_cpu_s=0.0)
    assert 1 <= sent <= 8  # 10 s of half a step a second, and the bucket
