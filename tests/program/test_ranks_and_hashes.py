"""Sequences in the order of their lengths, and hashes of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ArgumentError, OperatorError, ProgramError

L: Any = fluid.layers
LENGTHS = [2, 3, 0, 3, 1]
ORDER = [1, 3, 0, 4, 2]  # longest first, equal ones as they come


def ragged(values: np.ndarray, *levels: list[int]) -> Any:
    return fluid.create_lod_tensor(values, list(levels))


def test_a_rank_table_orders_sequences_by_length() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        table = L.lod_rank_table(L.data("words", [1], dtype="int64", lod_level=1))
        longest = L.max_sequence_len(table)
    feed = {"words": ragged(np.arange(9)[:, None], LENGTHS)}
    found, most = fluid.Executor().run(main, feed, [table, longest])
    assert found.tolist() == [[at, LENGTHS[at]] for at in ORDER]
    assert most.tolist() == [3]


@pytest.mark.parametrize("lod_level", [0, 1, 2])
def test_what_a_table_reorders_keeps_its_sequences(lod_level: int) -> None:
    inner = [[1, 2], [3], [], [2, 1, 1], [4]]  # of two levels, of each outer sequence the inner ones
    own = {0: [1] * 5, 1: [2, 1, 3, 2, 4], 2: [sum(one) for one in inner]}[lod_level]
    levels: list[list[int]] = {0: [], 1: [own], 2: [[len(one) for one in inner], [n for one in inner for n in one]]}[
        lod_level
    ]
    values = np.random.default_rng(lod_level).normal(size=(sum(own), 3))
    weights = np.random.default_rng(9).normal(size=(sum(own), 3))
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        table = L.lod_rank_table(L.data("words", [1], dtype="int64", lod_level=1))
        x = L.data("x", [3], dtype="float64", lod_level=lod_level, stop_gradient=False)
        rows = L.reorder_lod_tensor_by_rank(x, table)
        weight = L.reorder_lod_tensor_by_rank(L.data("w", [3], dtype="float64", lod_level=lod_level), table)
        (gradient,) = fluid.gradients(L.reduce_sum(rows * rows * weight), x)
    assert fluid.Program.parse(str(main)) == main
    feed = {
        "words": ragged(np.arange(9)[:, None], LENGTHS), "x": ragged(values, *levels), "w": ragged(weights, *levels)
    }  # fmt: skip
    found, slope = fluid.Executor().run(main, feed, [rows, gradient], return_numpy=False)
    ends = np.cumsum(own)
    parts = [values[end - count : end] for end, count in zip(ends, own, strict=True)]
    np.testing.assert_array_equal(np.array(found), np.concatenate([parts[at] for at in ORDER]))
    np.testing.assert_allclose(np.array(slope), 2 * values * weights, rtol=1e-12)
    wanted = {
        0: [], 1: [[own[at] for at in ORDER]],
        2: [[len(inner[at]) for at in ORDER], [n for at in ORDER for n in inner[at]]],
    }[lod_level]  # fmt: skip
    assert found.recursive_sequence_lengths() == wanted


def test_a_table_needs_sequences() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = L.data("x", [1], dtype="int64", lod_level=1)
        with pytest.raises(ProgramError, match=r"lod_rank_table\(level=1\).*has 1 levels"):
            L.lod_rank_table(x, level=1)


def test_an_array_of_steps_joins_to_the_same_rows() -> None:
    values = np.random.default_rng(4).normal(size=(9, 2))
    weights = np.random.default_rng(5).normal(size=(9, 2))
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x = L.data("x", [2], dtype="float64", lod_level=1, stop_gradient=False)
        table = L.lod_rank_table(x)
        steps = L.lod_tensor_to_array(x, table)
        second = L.array_read(steps, L.fill_constant([1], "int64", 1))
        rows = L.array_to_lod_tensor(steps, table)
        (gradient,) = fluid.gradients(L.reduce_sum(rows * L.data("w", [2], dtype="float64", lod_level=1)), x)
    assert fluid.Program.parse(str(main)) == main
    feed = {"x": ragged(values, LENGTHS), "w": ragged(weights, LENGTHS)}
    found, step, slope = fluid.Executor().run(main, feed, [rows, second, gradient], return_numpy=False)
    np.testing.assert_array_equal(np.array(found), values)
    assert found.recursive_sequence_lengths() == [LENGTHS]
    np.testing.assert_array_equal(np.array(step), values[[3, 6, 1]])
    np.testing.assert_allclose(np.array(slope), weights, rtol=1e-12)


def test_memories_shrink_to_sequences_that_have_a_step() -> None:
    values = np.arange(9.0)[:, None]
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        words, x = L.data("words", [1], dtype="float64", lod_level=1), L.data("x", [2], dtype="float64")
        table, i = L.lod_rank_table(words), L.fill_constant([1], "int64", 2)
        left = L.shrink_memory(x, i, table)
        own = L.shrink_memory(L.reorder_lod_tensor_by_rank(words, table), i, table)
    feed = {"words": ragged(values, LENGTHS), "x": np.arange(10.0).reshape(5, 2)}
    found, rows = fluid.Executor().run(main, feed, [left, own], return_numpy=False)
    np.testing.assert_array_equal(np.array(found), feed["x"][:2])
    np.testing.assert_array_equal(np.array(rows)[:, 0], [2, 3, 4, 5, 6, 7])
    assert rows.recursive_sequence_lengths() == [[3, 3]]


def test_an_array_of_other_steps_is_not_joined() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        x, y = (L.data(name, [1], dtype="float64", lod_level=1) for name in "xy")
        rows = L.array_to_lod_tensor(L.lod_tensor_to_array(x, L.lod_rank_table(x)), L.lod_rank_table(y))
    feed = {"x": ragged(np.zeros([4, 1]), [3, 1]), "y": ragged(np.zeros([4, 1]), [2, 2])}
    with pytest.raises(OperatorError, match=r"steps of \[2, 1, 1\] rows, .*; the sequences .* have steps of \[2, 2\]"):
        fluid.Executor().run(main, feed, [rows])


def test_steps_are_of_sequences_of_one_level() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, deep = L.data("x", [1]), L.data("deep", [1], lod_level=2)
        table = L.lod_rank_table(deep)
        with pytest.raises(ProgramError, match=r"lod_tensor_to_array needs rows of sequences of one level.*with 0"):
            L.lod_tensor_to_array(x, table)
        with pytest.raises(ProgramError, match=r"shrink_memory.* has 2 levels"):
            L.shrink_memory(deep, L.fill_constant([1], "int64", 0), table)
        with pytest.raises(ArgumentError, match="array_to_lod_tensor needs an array"):
            L.array_to_lod_tensor(x, table)
        with pytest.raises(ProgramError, match=r"array_to_lod_tensor: elements of .* nothing like that was written"):
            L.array_to_lod_tensor(L.create_array("float32"), table)


def test_hashes_of_ragged_ids_look_a_table_up() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        ids = L.data("ids", [1], dtype="int64", lod_level=1)
        hashed = L.hash(ids, hash_size=10000, num_hash=2)
        pooled = L.sequence_pool(L.reshape(L.cast(hashed, "float64"), [-1, 2]), "sum")
    assert hashed.shape[1:] == (2, 1)
    feed = {"ids": ragged(np.array([[1], [2**32 + 1], [1]]), [2, 1])}
    found, sums = fluid.Executor().run(main, feed, [hashed, pooled], return_numpy=False)
    assert np.array(found)[..., 0].tolist() == [[1269, 9609], [3868, 7268], [1269, 9609]]
    assert found.recursive_sequence_lengths() == [[2, 1]]
    assert np.array(sums).tolist() == [[1269 + 3868, 9609 + 7268], [1269, 9609]]


def test_a_table_of_more_sequences_than_there_are_is_an_error() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        table = L.lod_rank_table(L.data("words", [1], dtype="int64", lod_level=1))
        rows = L.reorder_lod_tensor_by_rank(fluid.data("x", [3, 2], "float64"), table)
    with pytest.raises(OperatorError, match="out of range"):
        fluid.Executor().run(main, {"words": ragged(np.zeros((9, 1), int), LENGTHS), "x": np.zeros((3, 2))}, [rows])
