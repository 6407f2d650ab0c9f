"""What a sparse table counts of its traffic, and the ids that it finds to be pushed most."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.ps.test_sparse_table import table_of

from penstock.ps.table import SparseTable


def _push(table: SparseTable, ids: np.ndarray) -> None:
    table.push_sgd(ids, np.zeros((len(ids), 3), np.float32), lr=0.1)


def test_pulls_and_pushes_are_counted_in_ids() -> None:
    table = table_of()
    ids = np.array([5, 6, 5], np.int64)
    table.pull(ids)
    table.pull(ids)
    _push(table, np.array([5, 7], np.int64))
    table.update(np.array([5, 9], np.int64), np.ones((2, 3), np.float32), lambda rows, gradients: None)
    sums = table.sums()
    assert (sums.pulled, sums.absent, sums.pushed, sums.rows) == (6, 3, 4, 4)


def test_reads_without_a_row_count_as_absent_each_time() -> None:
    table = table_of()
    for _ in range(2):
        table.pull(np.array([1, 2], np.int64), create=False)
    assert (table.sums().absent, table.sums().rows) == (4, 0)


@pytest.mark.parametrize("capacity", [1000, 4_000_000])  # one shard; many
def test_the_ids_pushed_most_are_found_with_their_shares(capacity: int) -> None:
    random = np.random.default_rng(7)
    table = table_of(capacity=capacity)
    hot = {-(2**63): 0.20, 2**63 - 1: 0.10, 0: 0.05}
    rest = np.arange(10, 10 + min(capacity // 2, 100_000), dtype=np.int64)
    for _ in range(100):
        draws = random.random(10_000)
        ids = random.choice(rest, 10_000)
        at = 0.0
        for id_, share in hot.items():
            ids[(draws >= at) & (draws < at + share)] = id_
            at += share
        _push(table, ids)
    sums = table.sums()
    found = {id_: pushes / sums.sampled for id_, pushes in sums.hot[:3]}
    assert list(found) == list(hot)
    # 15,600 samples: a share's standard error is 0.003 at most; what may be missed comes on top.
    for id_, share in hot.items():
        assert share - 0.015 - sums.missed / sums.sampled <= found[id_] <= share + 0.015
    assert sums.sampled == pytest.approx(1_000_000, rel=0.05)


def test_a_period_of_the_batches_does_not_show() -> None:
    table = table_of(capacity=1000)  # one shard: ids are sampled in the order of the batch
    batch = np.tile(np.arange(64, dtype=np.int64), 100)
    for _ in range(100):
        _push(table, batch)
    counts = dict(table.sums(most_hot=256).hot)
    assert set(counts) == set(range(64))
    assert max(counts.values()) < 2 * min(counts.values())


def test_what_was_pushed_long_ago_fades() -> None:
    table = table_of()
    old, new = np.full(1 << 16, 1, np.int64), np.full(1 << 16, 2, np.int64)
    for _ in range(256):  # 16 million, as many as are remembered
        _push(table, old)
    for _ in range(512):
        _push(table, new)
    assert [id_ for id_, _ in table.sums().hot] == [2, 1]


def test_threads_push_and_others_read_the_sums() -> None:
    table = table_of()
    ids = np.random.default_rng(1).integers(0, 1000, 20_000)

    def push() -> None:
        for _ in range(20):
            _push(table, ids)

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(table.sums().hot) <= 16
    for thread in threads:
        thread.join()
    assert table.sums().pushed == 3 * 20 * len(ids)
