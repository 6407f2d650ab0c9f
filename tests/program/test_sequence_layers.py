"""Sequence layers: each row alone, without what was put behind it, by plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

LENGTHS = [2, 5, 1, 0]
POOLS = {
    "sum": lambda x: x.sum(0),
    "average": lambda x: x.mean(0),
    "mean": lambda x: x.mean(0),
    "sqrt": lambda x: x.sum(0) / len(x) ** 0.5,
    "max": lambda x: x.amax(0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}


def run(build: Any, feed: dict[str, Any], *, data_parallel: bool = False) -> list[Any]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        fetched = build()
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    program = fluid.CompiledProgram(main).with_data_parallel() if data_parallel else main
    return list(exe.run(program, feed=feed, fetch_list=fetched, scope=scope))


@pytest.mark.parametrize("data_parallel", [False, True])
@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_is_that_of_each_rows_own_steps(kind: str, data_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    x = np.random.default_rng(0).normal(size=(4, 5, 3))
    found = run(
        lambda: [fluid.layers.sequence_pool(
            fluid.layers.data("x", [-1, -1, 3], dtype="float64", lod_level=1), kind, pad_value=-7.0
        )],
        {"x": x, "x@LENGTHS": np.array(LENGTHS)[:, None]},
        data_parallel=data_parallel,
    )[0]  # fmt: skip
    for row, length in enumerate(LENGTHS):
        own = torch.tensor(x[row, :length])
        expected = POOLS[kind](own).numpy() if length else np.full(3, -7.0)
        np.testing.assert_allclose(found[row], expected, rtol=1e-14)


@pytest.mark.parametrize("kind", POOLS)
def test_a_gradient_reaches_a_rows_own_steps_only(kind: str) -> None:
    attr = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=4))

    def build() -> list[Any]:
        ids = fluid.layers.data("ids", [-1, -1], dtype="int64", lod_level=1)
        pooled = fluid.layers.sequence_pool(fluid.layers.embedding(ids, size=[20, 3], param_attr=attr), kind)
        fluid.append_backward(fluid.layers.reduce_sum(pooled * pooled))
        return ["table", "table@GRAD"]

    ids = np.arange(20).reshape(4, 5)  # a row of the table for each step, so that its gradient is the step's
    table, found = run(build, {"ids": ids, "ids@LENGTHS": np.array(LENGTHS)[:, None]})
    for row, length in enumerate(LENGTHS):
        own = torch.tensor(table[ids[row, :length]], requires_grad=True)
        if length:
            (POOLS[kind](own) ** 2).sum().backward()
            expected = own.grad.numpy()  # type: ignore[union-attr]  # backward has set it
            np.testing.assert_allclose(found[ids[row, :length]], expected, rtol=1e-5)
        assert not found[ids[row, length:]].any()


def test_what_is_made_of_a_sequence_has_its_lengths() -> None:
    def build() -> list[Any]:
        words = fluid.layers.data("words", [-1, -1], dtype="int64", lod_level=1)
        others = fluid.layers.data("others", [-1, -1], dtype="int64", lod_level=1)
        pooled = [
            fluid.layers.sequence_pool(fluid.layers.relu(fluid.layers.embedding(x, size=[9, 2])), "sum")
            for x in (words, others, words)
        ]
        return [*pooled, fluid.layers.sequence_lengths(words)]

    feed = {"words": np.ones((2, 3), np.int64), "others": np.ones((2, 4), np.int64)}
    feed |= {"words@LENGTHS": np.array([[1], [3]]), "others@LENGTHS": np.array([[4], [2]])}
    words, others, again, lengths = run(build, feed)
    np.testing.assert_allclose(words[1], 3 * words[0], rtol=1e-6)
    np.testing.assert_allclose(others[0], 2 * others[1], rtol=1e-6)
    np.testing.assert_allclose(again[1], 3 * again[0], rtol=1e-6)
    assert lengths.tolist() == [[1], [3]]


def test_lengths_that_are_not_known_or_not_possible_are_errors() -> None:
    x = np.zeros((2, 3, 1))
    with pytest.raises(OperatorError, match="lengths of sequence_pool hold 4 at row 1"):
        run(
            lambda: [
                fluid.layers.sequence_pool(fluid.layers.data("x", [-1, -1, 1], dtype="float64", lod_level=1), "max")
            ],
            {"x": x, "x@LENGTHS": np.array([[3], [4]])},
        )  # fmt: skip
    unknown = "has neither the rows nor the time of a sequence input"
    with pytest.raises(ProgramError, match=unknown):
        run(lambda: [fluid.layers.sequence_pool(fluid.layers.data("y", [3, 1]), "max")], {})

    def used_beside_the_batch() -> list[Any]:
        rows = fluid.embedding(fluid.layers.data("ids", [1], dtype="int64", lod_level=1), [9, 2])
        return [fluid.layers.sequence_pool(rows + fluid.layers.data("dense", [2]), "sum")]

    with pytest.raises(ProgramError, match=f"{unknown}.*'ids' was used together with what has one row a sample"):
        run(used_beside_the_batch, {})
    with pytest.raises(ProgramError, match="no pool_type 'median'"):
        run(lambda: [fluid.layers.sequence_pool(fluid.layers.data("z", [-1, -1, 1], lod_level=1), "median")], {})
