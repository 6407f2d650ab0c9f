"""The sparse table beside a dictionary: any ids, any order, duplicates, growth, snapshots, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.native import ops as _operators  # noqa: F401 - registers torch.ops.penstock
from penstock.ps.table import FirstValues, SparseTable, TableFull, TableSettings

Array = npt.NDArray[Any]
INT64 = st.integers(-(2**63), 2**63 - 1)


def table_of(**changes: Any) -> SparseTable:
    """Return a table of rows of three values."""
    given: dict[str, Any] = {"name": "emb", "width": 3, "capacity": 1_000_000, **changes}
    return SparseTable(TableSettings(**given))


def some_ids(number: int, seed: int) -> Array:
    """Return ids from the whole range of int64, some of them twice."""
    random = np.random.default_rng(seed)
    ids = random.integers(-(2**63), 2**63 - 1, number)
    ids[:: max(1, number // 5)] = ids[0]
    return ids


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(st.one_of(INT64, st.integers(-3, 3)), min_size=1, max_size=40), max_size=8))
def test_sgd_equals_a_dictionary(batches: list[list[int]]) -> None:
    table = table_of(first_values=FirstValues("constant", 0.5))
    known: dict[int, Array] = {}
    random = np.random.default_rng(len(batches))
    for batch in batches:
        ids = np.array(batch, np.int64)
        gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
        table.push_sgd(ids, gradients, lr=0.25)
        sums: dict[int, Array] = {}
        for one, gradient in zip(batch, gradients, strict=True):
            sums[one] = sums[one] + gradient if one in sums else gradient
        for one, total in sums.items():
            known[one] = known.get(one, np.full(3, 0.5, np.float32)) - np.float32(0.25) * total
    for batch in batches:
        expected = np.array([known[i] for i in batch], np.float32)
        assert np.array_equal(table.pull(np.array(batch, np.int64)), expected)
    assert len(table) == len(known)


def test_two_million_rows_survive_growth_at_small_overhead() -> None:
    table = table_of(width=8, capacity=4_000_000, first_values=FirstValues("uniform", -0.1, 0.1), seed=3)
    ids = np.random.default_rng(1).permutation(np.arange(2_000_000, dtype=np.int64) * 2_654_435_761)
    first = np.concatenate([table.pull(part) for part in np.array_split(ids, 50)])
    assert len(table) == len(ids)
    assert np.array_equal(table.pull(ids, create=False), first)
    assert -0.1 <= first.min() < -0.0999
    assert 0.0999 < first.max() < 0.1
    assert abs(float(first.mean())) < 1e-4
    assert table.overhead_bytes / len(table) < 17.5


def test_first_values_depend_on_seed_and_id_alone() -> None:
    ids = some_ids(500, 1)
    normal = FirstValues("normal", 0.0, 0.05)
    one, other = table_of(first_values=normal, seed=7), table_of(first_values=normal, seed=7, capacity=600)
    assert np.array_equal(one.pull(ids), other.pull(ids[::-1].copy())[::-1])
    assert np.array_equal(one.pull(ids), table_of(first_values=normal, seed=7).pull(ids, create=False))
    assert not np.array_equal(one.pull(ids), table_of(first_values=normal, seed=8).pull(ids))


def test_a_pull_without_create_makes_no_row() -> None:
    table = table_of(first_values=FirstValues("uniform", 1.0, 2.0))
    assert (table.pull(np.array([5, -5]), create=False) >= 1.0).all()
    assert len(table) == 0


@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_updates_equal_those_of_the_local_operators(kind: str) -> None:
    states = {"adam": {"moment1": 0.0, "moment2": 0.0}, "adagrad": {"moment": 0.0}}[kind]
    table = table_of(width=4, states=states, first_values=FirstValues("uniform", -1.0, 1.0))
    ids = np.arange(50)
    param = torch.from_numpy(table.pull(ids).copy())
    kept = [torch.zeros_like(param) for _ in states]
    random = np.random.default_rng(0)
    for step in range(1, 6):
        rows = random.integers(0, 50, 30)
        gradients = random.normal(size=(30, 4)).astype(np.float32)
        local = (torch.from_numpy(rows), torch.from_numpy(gradients), torch.tensor(0.01))
        if kind == "adam":
            table.push_adam(rows, gradients, lr=0.01, step=step)
            torch.ops.penstock.sparse_adam_(param, *kept, torch.tensor(float(step)), *local, 0.9, 0.999, 1e-8)
        else:
            table.push_adagrad(rows, gradients, lr=0.01, epsilon=1e-6)
            torch.ops.penstock.sparse_adagrad_(param, *kept, *local, 1e-6)
    assert np.allclose(table.pull(ids), param.numpy(), rtol=0, atol=1e-6)


def test_any_rule_can_update_merged_rows() -> None:
    table = table_of(states={"velocity": 0.0})

    def momentum(rows: Array, gradients: Array) -> None:
        rows[:, 3:] = 0.9 * rows[:, 3:] + gradients
        rows[:, :3] -= 0.1 * rows[:, 3:]

    ids, ones = np.array([4, 9, 4]), np.ones((3, 3), np.float32)
    for _ in range(2):
        table.update(ids, ones, momentum)
    expected = -0.1 * (2.0 + (0.9 * 2.0 + 2.0))
    assert np.allclose(table.pull(np.array([4])), expected)
    assert np.allclose(table.pull(np.array([9])), expected / 2)


def test_one_id_too_many_is_an_error_that_says_what_to_do() -> None:
    table = table_of(capacity=3)
    table.pull(np.array([2**62, -5, 0]))
    table.pull(np.array([2**62, -5, 0]))
    with pytest.raises(TableFull, match=r"table 'emb': the table is full: it has 3 rows.*id 77 is new.*dict_size"):
        table.pull(np.array([0, 77]))
    with pytest.raises(TableFull):
        table.push_sgd(np.array([78]), np.ones((1, 3), np.float32), lr=1.0)
    assert len(table) == 3
    assert table.pull(np.array([77]), create=False).shape == (1, 3)


def test_room_is_checked_before_anything_changes() -> None:
    table = table_of(capacity=4, padding_idx=0)
    table.pull(np.array([1, 2]))
    table.check_room(np.array([1, 2, 0, 0, 2, 77, 78, 77]))
    full = r"table 'emb': the table is full: an update needs 3 new rows, but 2 of 4 are taken.*dict_size"
    with pytest.raises(TableFull, match=full):
        table.check_room(np.array([1, 77, 78, 79]))
    assert len(table) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), min_size=1, max_size=20), st.integers(0, 3))
def test_room_is_asked_for_the_rows_that_a_push_then_makes(pushes: list[list[int]], admit_after: int) -> None:
    table = table_of(capacity=20, admit_after=admit_after, width=1)
    for ids in pushes:
        pushed, before = np.array(ids), len(table)
        made = table._table.rows_to_make(pushed)
        try:
            table.check_room(pushed)
        except TableFull:
            assert before + made > 20
            continue
        table.push_sgd(pushed, np.ones((len(ids), 1), np.float32), lr=1.0)
        assert len(table) - before == made


def test_the_padding_id_reads_as_zeros_and_is_never_updated() -> None:
    table = table_of(padding_idx=0, first_values=FirstValues("constant", 1.0))
    table.push_sgd(np.array([0, 1]), np.ones((2, 3), np.float32), lr=0.5)
    assert table.pull(np.array([0, 1, 0])).tolist() == [[0.0] * 3, [0.5] * 3, [0.0] * 3]


def test_rows_not_used_for_long_are_dropped_and_begin_anew() -> None:
    table = table_of(keeps_last_use=True, first_values=FirstValues("constant", 1.0))
    ids = np.arange(1000)
    table.push_sgd(ids, np.ones((1000, 3), np.float32), lr=1.0, now=1)
    table.pull(ids[:400], now=5)
    assert table.expire(5) == 600
    assert len(table) == 400
    got = table.pull(ids, now=6)
    assert (got[:400] == 0.0).all()
    assert (got[400:] == 1.0).all()
    assert len(table) == 1000
    with pytest.raises(SpecError, match="keeps_last_use=True"):
        table_of().expire(1)


def test_rows_are_made_by_the_push_that_admits_their_ids() -> None:
    table = table_of(admit_after=3, first_values=FirstValues("constant", 1.0))
    ids, ones = np.array([7, -7, 7]), np.ones((3, 3), np.float32)
    for _ in range(2):
        table.push_sgd(ids, ones, lr=0.25)
        assert (table.pull(ids) == 1.0).all()
    assert len(table) == 0
    table.push_sgd(ids, ones, lr=0.25)
    assert table.pull(ids)[:, 0].tolist() == [0.5, 0.75, 0.5]
    assert len(table) == 2
    table.push_sgd(ids, ones, lr=0.25)
    assert table.pull(ids)[:, 0].tolist() == [0.0, 0.5, 0.0], "an id that has its row needs no more sightings"


def test_any_rule_meets_admitted_rows_alone() -> None:
    table = table_of(admit_after=2)
    seen: list[int] = []

    def rule(rows: Array, gradients: Array) -> None:
        seen.append(len(rows))
        rows -= gradients

    for ids in ([1, 2], [2, 3], [2, 2, 9]):
        table.update(np.array(ids), np.ones((len(ids), 3), np.float32), rule)
    assert seen == [0, 1, 1]
    assert table.pull(np.array([1, 2, 3]))[:, 0].tolist() == [0.0, -3.0, 0.0]


def test_ids_seen_once_are_rarely_admitted_and_frequent_always() -> None:
    table = table_of(admit_after=2, width=1)
    rare = np.arange(100_000) * 7 + 1
    table.push_sgd(rare, np.ones((len(rare), 1), np.float32), lr=1.0)
    assert len(table) < 100
    table.push_sgd(rare, np.ones((len(rare), 1), np.float32), lr=1.0)
    assert len(table) == len(rare)


def test_counts_of_admission_go_on_in_another_table() -> None:
    table, again, smaller = table_of(admit_after=3), table_of(admit_after=3), table_of(admit_after=3, capacity=9)
    ids, ones = np.array([7, -7]), np.ones((2, 3), np.float32)
    for _ in range(2):
        table.push_sgd(ids, ones, lr=1.0)
    assert again.restore_counts(table.counts())
    again.push_sgd(ids, ones, lr=1.0)
    assert again.pull(ids)[:, 0].tolist() == [-1.0, -1.0]
    assert not smaller.restore_counts(table.counts()), "it has fewer shards"
    assert len(table_of().counts()) == 0


def test_counts_of_admission_have_a_limit() -> None:
    with pytest.raises(SpecError, match="admits ids after 256 pushes; they are counted up to 255"):
        table_of(admit_after=256)


def test_dropped_rows_leave_the_others_where_they_can_be_found() -> None:
    table = table_of(keeps_last_use=True, width=1, capacity=400_000)
    ids = some_ids(120_000, 4)
    ids = np.unique(ids)
    random = np.random.default_rng(0)
    table.restore(ids, ids.astype(np.float32)[:, None])
    for now in range(1, 6):
        kept = random.random(len(ids)) < 0.5
        table.pull(ids[kept], now=now)
        assert table.expire(now) == len(ids) - kept.sum()
        ids = ids[kept]
        fresh = random.integers(-(2**63), 2**63 - 1, 60_000)
        fresh = np.setdiff1d(fresh, ids)
        table.restore(fresh, fresh.astype(np.float32)[:, None])
        ids = np.concatenate([ids, fresh])
        assert len(table) == len(ids)
        assert np.array_equal(table.pull(ids, create=False)[:, 0], ids.astype(np.float32))


def id_of_key(key: int) -> int:
    """Return the id whose hash in a table with seed 0 is `key`: the inverse of SplitMix64's finaliser."""
    mask = 2**64 - 1
    key = (key ^ key >> 31 ^ key >> 62) * 0x319642B2D24D8EC3 & mask
    key = (key ^ key >> 27 ^ key >> 54) * 0x96DE1B173F119089 & mask
    key = ((key ^ key >> 30 ^ key >> 60) - 0x9E3779B97F4A7C15) & mask
    return key - 2**64 if key >= 2**63 else key


@pytest.mark.parametrize("capacity", [1000, 10_000_000])
def test_hashes_that_differ_in_any_one_bit_are_told_apart(capacity: int) -> None:
    for base in (0, 2**64 - 1, 0x9E3779B97F4A7C15):
        for bit in range(64):
            mine, theirs = (np.array([id_of_key(key)], np.int64) for key in (base, base ^ 1 << bit))
            table = table_of(width=1, capacity=capacity)
            table.restore(mine, np.array([[1.0]], np.float32))
            assert table.pull(theirs, create=False).item() == 0.0, "a neighbour's row is not theirs"
            table.restore(theirs, np.array([[2.0]], np.float32))
            assert table.pull(mine, create=False).item() == 1.0
            copied = {
                int(i): float(r.item()) for part, rows in table.snapshot() for i, r in zip(part, rows, strict=True)
            }
            assert copied == {int(mine.item()): 1.0, int(theirs.item()): 2.0}


def test_hashes_that_crowd_into_one_bucket_are_found_and_dropped() -> None:
    # The same home in any small index, and the same tag for all: seven are at home, the others in their second bucket.
    ids = np.array([id_of_key(0xABCD << 48 | i << 40 | 0x77) for i in range(13)], np.int64)
    table = table_of(width=1, capacity=1000, keeps_last_use=True)
    for n, one in enumerate(ids):
        table.restore(np.array([one]), np.array([[n]], np.float32), now=n)
        assert table.pull(ids[: n + 1], create=False, now=n)[:, 0].tolist() == list(range(n + 1))
        for m in range(n + 1):
            table.pull(ids[m : m + 1], now=m)
    for n in range(len(ids)):
        assert table.expire(n + 1) == 1
        assert table.pull(ids, create=False, now=99 if n == 12 else 0)[: n + 1].tolist() == [[0.0]] * (n + 1)
        for m in range(n + 1, len(ids)):
            assert table.pull(ids[m : m + 1], create=False, now=m).tolist() == [[float(m)]]


def test_rows_with_states_come_back_whole_after_expiry() -> None:
    table = table_of(width=5, states={"a": 1.0, "b": 2.0}, keeps_last_use=True, capacity=200_000)
    ids = np.arange(40_000)
    rows = np.random.default_rng(3).normal(size=(len(ids), 15)).astype(np.float32)
    table.restore(ids, rows, now=1)
    table.pull(ids[::2], now=2)
    assert table.expire(2) == len(ids) // 2
    table.restore(ids[1::2] + 1_000_000, rows[1::2], now=2)
    parts = list(table.snapshot())
    got, copied = np.concatenate([p for p, _ in parts]), np.concatenate([r for _, r in parts])
    order = np.argsort(got)
    assert np.array_equal(got[order], np.sort(np.concatenate([ids[::2], ids[1::2] + 1_000_000])))
    assert np.array_equal(copied[order], np.concatenate([rows[::2], rows[1::2]]))


def test_values_are_pulled_into_the_memory_that_is_given() -> None:
    table, out = table_of(first_values=FirstValues("constant", 2.0)), np.zeros((2, 3), np.float32)
    assert table.pull(np.array([1, 1]), out=out) is out
    assert (out == 2.0).all()
    with pytest.raises(ValueError, match=r"pulled values have the shape \[3, 3\]"):
        table.pull(np.array([1, 2, 3]), out=out)


@pytest.mark.parametrize("width", [1, 4, 8, 10, 16, 17, 32, 64, 100])
def test_rows_of_every_width_are_copied_whole(width: int) -> None:
    table = table_of(width=width, states={"moment": 0.0}, capacity=100_000)
    ids = some_ids(5000, width)
    rows = np.random.default_rng(width).normal(size=(len(ids), 2 * width)).astype(np.float32)
    rows[ids == ids[0]] = rows[0]
    table.restore(ids, rows)
    assert np.array_equal(table.pull(ids), rows[:, :width])


def test_a_snapshot_restores_into_other_tables() -> None:
    table = table_of(states={"moment": 0.25}, capacity=200_000, first_values=FirstValues("normal", 0.0, 1.0))
    ids = some_ids(50_000, 2)
    table.push_adagrad(ids, np.ones((len(ids), 3), np.float32), lr=0.1)
    halves = [table_of(states={"moment": 0.25}), table_of(states={"moment": 0.25})]
    for part, rows in table.snapshot():
        for number, half in enumerate(halves):
            mine = part % 2 == number
            half.restore(part[mine], rows[mine])
    assert sum(map(len, halves)) == len(table)
    for number, half in enumerate(halves):
        mine = ids[ids % 2 == number]
        assert np.array_equal(half.pull(mine, create=False), table.pull(mine))
        half.push_adagrad(mine, np.ones((len(mine), 3), np.float32), lr=0.1)
    table.push_adagrad(ids, np.ones((len(ids), 3), np.float32), lr=0.1)
    assert np.array_equal(halves[0].pull(ids[ids % 2 == 0]), table.pull(ids[ids % 2 == 0]))


def test_pushes_of_several_threads_are_all_applied() -> None:
    table = table_of(capacity=100_000)
    ids, ones = np.arange(20_000), np.ones((20_000, 3), np.float32)

    def work() -> None:
        for _ in range(10):
            table.push_sgd(ids, ones, lr=-1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    parts = [rows for _, rows in table.snapshot()]
    for thread in threads:
        thread.join()
    assert (table.pull(ids) == 40.0).all()
    for rows in parts:
        assert (rows == rows[:, :1]).all(), "a row of a snapshot is never half updated"


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_threads_of_one_push_give_the_same_bits(kind: str) -> None:
    states = {"sgd": 0, "adagrad": 1, "adam": 2}[kind]
    named = {f"s{i}": 0.0 for i in range(states)}
    one, four = (table_of(states=named, capacity=4_000_000, first_values=FirstValues("uniform")) for _ in range(2))
    random = np.random.default_rng(1)
    for step in range(1, 4):
        ids = random.integers(0, 50_000, 60_000)
        gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
        more = {"step": step} if kind == "adam" else {}
        getattr(one, f"push_{kind}")(ids, gradients, lr=0.1, **more)
        getattr(four, f"push_{kind}")(ids, gradients, lr=0.1, threads=4, **more)
    for (ids, rows), (others, same) in zip(one.snapshot(), four.snapshot(), strict=True):
        order, by_id = np.argsort(ids), np.argsort(others)
        assert np.array_equal(ids[order], others[by_id])
        assert np.array_equal(rows[order], same[by_id])


def test_a_push_whose_threads_run_out_of_rows_is_an_error() -> None:
    table = table_of(capacity=200_000, width=1)
    table.pull(np.arange(190_000))
    with pytest.raises(TableFull, match="the table is full"):
        table.push_sgd(np.arange(100_000) + 180_000, np.ones((100_000, 1), np.float32), lr=1.0, threads=4)
    assert len(table) == 200_000
    table.push_sgd(np.arange(50_000), np.ones((50_000, 1), np.float32), lr=1.0, threads=4)
    assert (table.pull(np.arange(50_000)) == -1.0).all()


@pytest.mark.parametrize(("shape", "reason"), [((2, 4), r"gradients have the shape \[2, 3\]"), ((3, 3), "shape")])
def test_gradients_of_another_shape_are_refused(shape: tuple[int, int], reason: str) -> None:
    table = table_of()
    with pytest.raises(ValueError, match=reason):
        table.push_sgd(np.array([1, 2]), np.ones(shape, np.float32), lr=1.0)
    assert len(table) == 0


def test_a_table_without_rows_or_values_is_refused() -> None:
    with pytest.raises(SpecError, match="table 'emb' has rows of 0 values for 1000000 ids"):
        table_of(width=0)
