"""Rows 32, 33, 39 and 40 of the parity table: when temporaries are cleared, and how much memory they take."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.trainers import MODES, Trainers, persistables
from tests.property.networks import conv_net, ctr_dnn
from tests.property.oracle import copy_of, same_bits, started

import penstock as fluid


def held(executor: fluid.ParallelExecutor) -> int:
    """How many temporaries hold memory between runs."""
    return int(executor.statistics()["temporaries"])


@pytest.mark.parametrize("every", [1, 3])
def test_row_32_temporaries_are_cleared_every_so_many_runs(
    every: int, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without garbage collection (FLAGS_eager_delete_tensor_gb below 0), which clears them within a run."""
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    network = ctr_dnn()
    executor = trainers(network, num_iteration_per_drop_scope=every)
    counts = []
    for run in range(2 * every + 1):
        executor.run([], network.feed(6, run))
        counts.append(held(executor))
    cleared = [count == 0 for count in counts]
    assert cleared == [(run + 1) % every == 0 for run in range(2 * every + 1)]
    assert every == 1 or max(counts) > 20


def test_row_33_a_run_that_fetches_clears_temporaries_at_its_end(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    network = ctr_dnn()
    executor = trainers(network, num_iteration_per_drop_scope=100)
    executor.run([], network.feed(6, 0))
    assert held(executor) > 20
    (loss,) = executor.run([network.loss], network.feed(6, 1))
    assert held(executor) == 0
    assert loss.shape == (2,)


def trained(trainers: Trainers, start: Any, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the convolution for four steps; return what is kept, and the statistics of its plan."""
    network = conv_net()
    scope = copy_of(start)
    executor = trainers(network, scope, **fields)
    for step in range(4):
        executor.run([], network.feed(6, step))
    (plan,) = executor.statistics()["plans"]
    return persistables(network.main, scope), plan


@pytest.mark.parametrize("mode", MODES)
def test_row_39_memory_optimize_lowers_the_peak_bit_for_bit(mode: str, trainers: Trainers) -> None:
    start = started(conv_net().startup)
    by_field = {on: trained(trainers, start, mode=mode, memory_optimize=on) for on in (None, True, False)}
    assert fluid.BuildStrategy().memory_optimize is None
    for kept, _ in by_field.values():
        assert all(same_bits(kept[name], by_field[None][0][name]) for name in kept)
    reused, apart = by_field[True][1]["arena_bytes"], by_field[False][1]["arena_bytes"]
    assert 0 < reused < 0.8 * apart
    assert by_field[None][1]["arena_bytes"] == reused


def test_row_40_in_place_and_collection_are_on_and_lower_peaks(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = started(conv_net().startup)
    kept, plan = trained(trainers, start)
    without, apart = trained(trainers, start, enable_inplace=False)
    assert fluid.BuildStrategy().enable_inplace is True
    assert plan["in_place"] > 0 == apart["in_place"]
    assert plan["arena_bytes"] <= apart["arena_bytes"]
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    uncollected, whole = trained(trainers, start, num_iteration_per_drop_scope=100)
    assert plan["live_bytes"] < whole["live_bytes"]
    for other in (without, uncollected):
        assert all(same_bits(kept[name], other[name]) for name in kept)
