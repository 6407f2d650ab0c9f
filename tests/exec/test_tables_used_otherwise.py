"""Tables of sparse lookups that other operators read, too, as tied weights do: trained like a dense one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

L = fluid.layers
NUM_WORDS, WIDTH, STEPS = 7, 3, 5


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(11)
    for _ in range(STEPS):
        yield {"ids": rng.integers(0, NUM_WORDS, (4, 2)), "word": rng.integers(0, NUM_WORDS, (4, 1))}


def tied(optimizer: Any, dtype: str = "float64", *, is_distributed: bool = False) -> tuple[Any, Any, Any]:
    """Words are predicted by products with the table in which the words before them are looked up; id 0 is padding."""
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids, word = L.data("ids", [2], dtype="int64"), L.data("word", [1], dtype="int64")
        start = fluid.ParamAttr("table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=3))
        rows = L.embedding(ids, [NUM_WORDS, WIDTH], True, is_distributed, 0, start, dtype)
        scores = L.matmul(L.reduce_sum(rows, 1), main.global_block().var("table"), transpose_y=True)
        loss = L.mean(L.softmax_with_cross_entropy(scores, word))
        optimizer.minimize(loss)
    return main, startup, loss


def expected(table: np.ndarray, momentum: float) -> np.ndarray:
    leaf = torch.tensor(table, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], 0.3, momentum)
    for feed in batches():
        ids, word = (torch.tensor(feed[name]) for name in ("ids", "word"))
        rows = (leaf[ids] * (ids != 0)[..., None]).sum(1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(rows @ leaf.T, word[:, 0]).backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
    return leaf.detach().numpy()


@pytest.mark.parametrize("num_replicas", [0, 1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_tied_table_trains_like_a_dense_one(
    momentum: float, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    main, startup, loss = tied(fluid.optimizer.Momentum(0.3, momentum) if momentum else fluid.optimizer.SGD(0.3))
    assert "'table' (created at test_tables_used_otherwise.py" in caplog.text
    assert main.global_block().var("table@GRAD").shape == (NUM_WORDS, WIDTH)
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    before = np.array(scope.find_var("table"))
    places = [fluid.CPUPlace()] * num_replicas
    run = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=places) if places else main
    for feed in batches():
        exe.run(run, feed, [loss], scope=scope)
    np.testing.assert_allclose(np.array(scope.find_var("table")), expected(before, momentum), rtol=1e-10)


def test_a_table_with_unused_lookups_is_trained_by_the_rest() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        L.embedding(L.data("ids", [2], dtype="int64"), [NUM_WORDS, WIDTH], True, param_attr="table", dtype="float64")
        table = main.global_block().var("table")
        fluid.optimizer.SGD(0.5).minimize(L.reduce_sum(table * table) * 0.5)
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    before = np.array(scope.find_var("table"))
    exe.run(main, {"ids": np.zeros((1, 2), "int64")}, scope=scope)
    np.testing.assert_allclose(np.array(scope.find_var("table")), before / 2, rtol=1e-12)


def test_a_distributed_table_is_looked_up_and_nothing_else() -> None:
    with pytest.raises(ProgramError, match=r"'table' .* is distributed, but it is used in other operations"):
        tied(fluid.optimizer.SGD(0.1), "float32", is_distributed=True)


@pytest.mark.parametrize("with_rest", [True, False])
def test_gradients_of_a_table_have_those_of_its_lookups(with_rest: bool) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids = L.data("ids", [3], dtype="int64")
        rows = L.embedding(ids, [NUM_WORDS, WIDTH], True, False, 0, "table", "float64")
        table = main.global_block().var("table")
        loss = L.reduce_sum(rows * rows) + (L.reduce_sum(table * table) if with_rest else 0.0)
        (gradient,) = fluid.gradients(loss, table)
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    before = np.array(scope.find_var("table"))
    found = exe.run(main, {"ids": np.array([[2, 0, 2], [4, 0, 2]])}, [gradient], scope=scope)[0]
    times = np.array([0, 0, 3, 0, 1, 0, 0])[:, None] + with_rest  # row 0 is padding
    np.testing.assert_allclose(found, 2 * times * before, rtol=1e-12)


def test_gradients_of_a_distributed_table_are_refused() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        rows = L.embedding(L.data("ids", [3], dtype="int64"), [NUM_WORDS, WIDTH], True, True, None, "table")
        with pytest.raises(ProgramError, match="'table', which is distributed"):
            fluid.gradients(L.reduce_sum(rows), main.global_block().var("table"))
