"""Sampling keeps within its budget, uses it, and adapts; slow steps are found; metric rows are merged without loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.frames import Column
from penstock.telemetry.metrics import LOSS_WAIT_S, ROW, Rows, Thinner
from penstock.telemetry.sampling import MIN_RATE_SHARE, Sampler, SlowSteps

BUDGET = 100_000.0
TICK_S = 0.1


def drive(
    sampler: Sampler,
    *,
    seconds: float,
    steps_per_s: int,
    step_bytes: int,
    cpu_per_byte_s: float = 0.0,
    slow_share: int = 0,
) -> float:
    """Run the sampler at a constant load; return the bytes a second that it let through."""
    sent, done = 0.0, 0.0
    for _ in range(round(seconds / TICK_S)):
        done += steps_per_s * TICK_S
        count = int(done)
        done -= count
        sizes = np.full(count, step_bytes, np.int64)
        slow = np.arange(count) < slow_share
        now = float(sizes[sampler.choose(sizes, slow)].sum())
        sampler.observe(interval_s=TICK_S, cpu_s=now * cpu_per_byte_s, sample_cpu_s=now * cpu_per_byte_s)
        sent += now
    return sent / seconds


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(80, 200_000), st.integers(0, 3))
def test_bytes_keep_within_the_budget_and_use_it(steps_per_s: int, step_bytes: int, slow_share: int) -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    drive(sampler, seconds=10, steps_per_s=steps_per_s, step_bytes=step_bytes, slow_share=slow_share)
    seconds = 40
    rate = drive(sampler, seconds=seconds, steps_per_s=steps_per_s, step_bytes=step_bytes, slow_share=slow_share)
    offered = steps_per_s * step_bytes
    # Over a window the bucket lends one second's budget, and the last step may overdraw it by its own size.
    assert rate <= BUDGET + (BUDGET + step_bytes) / seconds
    # From below: 1 in N with N rounded up gives at least half of the regular share; whole steps round down once more.
    assert rate >= min(offered, 0.75 * BUDGET) / 2 - step_bytes / seconds


def test_samples_stay_evenly_spaced_while_n_wavers() -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    drive(sampler, seconds=10, steps_per_s=177, step_bytes=99_749)  # 17 or 18 steps an interval: N is 234 to 238
    assert drive(sampler, seconds=60, steps_per_s=177, step_bytes=99_749) == pytest.approx(75_000, rel=0.03)


def test_every_step_is_sent_while_all_fit_the_budget() -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    assert drive(sampler, seconds=20, steps_per_s=50, step_bytes=1000) == pytest.approx(50_000)
    assert sampler.every == 1


def test_one_in_n_follows_the_load_up_and_down() -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    drive(sampler, seconds=10, steps_per_s=1000, step_bytes=3000)
    assert sampler.every == 40  # 3 MB/s offered, 75 kB/s for regular samples
    drive(sampler, seconds=15, steps_per_s=50, step_bytes=1000)
    assert sampler.every == 1


def test_processor_time_limits_what_bytes_alone_would_allow() -> None:
    cost_s = 1e-6  # a byte: 10 kB/s would use the 1 %
    sampler = Sampler(budget_bytes_per_s=BUDGET, cpu_budget=0.01)
    drive(sampler, seconds=20, steps_per_s=100, step_bytes=1000, cpu_per_byte_s=cost_s)
    rate = drive(sampler, seconds=40, steps_per_s=100, step_bytes=1000, cpu_per_byte_s=cost_s)
    assert 4_000 < rate < 12_000


def test_sampling_continues_even_if_draining_uses_all_cpu_time() -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    for _ in range(300):
        sampler.observe(interval_s=TICK_S, cpu_s=TICK_S, sample_cpu_s=0.0)
    rate = drive(sampler, seconds=40, steps_per_s=100, step_bytes=1000, cpu_per_byte_s=1.0)
    assert rate >= BUDGET * MIN_RATE_SHARE / 2


def test_a_slow_step_is_sent_though_it_is_not_its_turn() -> None:
    sampler = Sampler(budget_bytes_per_s=BUDGET)
    drive(sampler, seconds=10, steps_per_s=1000, step_bytes=3000)
    slow = np.zeros(100, np.bool_)
    slow[63] = True
    assert sampler.choose(np.full(100, 3000, np.int64), slow)[63]


def test_slow_steps_are_the_slowest_hundredth() -> None:
    steps = SlowSteps()
    assert not steps.classify(np.arange(1, 101) * 1000).any()  # too few are known
    slow = steps.classify(np.array([500, 99_000, 99_001, 5_000_000]))
    assert slow.tolist() == [False, False, True, True]


def rows(*items: tuple[int, float]) -> Rows:
    return np.array([(step, step * 10**6, loss, 100, 2_000, 64, 30) for step, loss in items], ROW)


def test_a_row_ends_at_the_newest_known_loss_and_the_rest_waits() -> None:
    thinner = Thinner()
    got = thinner.add(rows((1, math.nan), (2, 0.5), (3, 0.4), (4, math.nan)), interval_s=TICK_S)
    assert got is not None
    assert (got[Column.STEP].tolist(), got[Column.LOSS].tolist(), got[Column.TIME_NS].tolist()) == (
        [3],
        [0.4],
        [3_000_000],
    )
    rest = thinner.flush()
    assert rest is not None
    assert rest[Column.STEP].tolist() == [4]
    assert math.isnan(rest[Column.LOSS][0])


def test_a_row_holds_means_so_that_rates_ignore_thinning() -> None:
    mixed = rows((1, math.nan), (2, 0.5))
    mixed["samples"], mixed["step_ns"] = [100, 300], [1000, 3000]
    got = Thinner().add(mixed, interval_s=TICK_S)
    assert got is not None
    assert (got[Column.SAMPLES].tolist(), got[Column.STEP_NS].tolist()) == ([200], [2000])
    assert (got[Column.SYNC_BYTES].tolist(), got[Column.SYNC_NS].tolist()) == ([64], [30])


def test_rows_without_a_loss_wait_for_one_but_not_for_long() -> None:
    thinner = Thinner()
    waited = 0
    while thinner.add(rows((waited, math.nan)), interval_s=TICK_S) is None:
        waited += 1
    assert waited == math.ceil(LOSS_WAIT_S / TICK_S) - 1


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=40))
def test_every_interval_gives_at_most_one_row_and_loses_no_step(ticks: list[list[bool]]) -> None:
    thinner, step, last = Thinner(), 0, 0
    for tick in ticks:
        given_rows = [(step + i + 1, 0.5 if known else math.nan) for i, known in enumerate(tick)]
        step += len(tick)
        got = thinner.add(rows(*given_rows), interval_s=TICK_S)
        if got is not None:
            assert len(got[Column.STEP]) == 1
            last = int(got[Column.STEP][0])
    rest = thinner.flush()
    assert (int(rest[Column.STEP][0]) if rest is not None else last) == step
