"""Lookups with is_sparse=True in blocks of control flow: their table is trained, from every iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.oracle import value

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
HEIGHT, WIDTH, PADDING = 7, 3, 5
SEQUENCES = [[1, 2, 1], [2, 5], [6]]
RATE = 0.5


def looked_up(ids: Any, **more: Any) -> Any:
    settings = {"padding_idx": PADDING, "dtype": "float64", "param_attr": "table"}
    return L.embedding(ids, [HEIGHT, WIDTH], is_sparse=True, **settings, **more)


def by_steps(ids: Any) -> Any:
    rnn = L.DynamicRNN()
    with rnn.block():
        word = rnn.step_input(ids)
        before = rnn.memory(shape=[WIDTH], dtype="float64")
        after = L.tanh(looked_up(word) + before)
        rnn.update_memory(before, after)
        rnn.output(after)
    return L.sequence_last_step(rnn())


def _repeated(total: Any, body: Callable[[], Any]) -> None:
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
    going = L.less_than(i, n)
    with L.While(going).block():
        L.assign(total + body(), total)
        L.increment(i)
        L.less_than(i, n, cond=going)


def in_a_loop(ids: Any) -> Any:
    total = L.zeros([1], "float64")
    _repeated(total, lambda: L.reduce_sum(L.square(looked_up(ids))).reshape([1]))
    return total


def in_a_branch(ids: Any) -> Any:
    many = L.greater_than(L.cast(L.reduce_sum(ids), "float64"), L.fill_constant([1], "float64", 3.0))
    return L.cond(
        many, lambda: L.reduce_sum(L.square(looked_up(ids))), lambda: L.fill_constant([1], "float64", 0.0).sum()
    )


def of_steps(table: torch.Tensor) -> torch.Tensor:
    last = []
    for words in SEQUENCES:
        h = torch.zeros(WIDTH, dtype=torch.float64)
        for word in words:
            h = torch.tanh(table[word] * float(word != PADDING) + h)
        last.append(h)
    return torch.stack(last)


def of_squares(table: torch.Tensor) -> torch.Tensor:
    return torch.stack([table[word].square().sum() for words in SEQUENCES for word in words if word != PADDING]).sum()


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "DynamicRNN": (by_steps, of_steps),
    "While": (in_a_loop, lambda table: 3 * of_squares(table)),
    "cond": (in_a_branch, of_squares),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_table_that_blocks_look_up_is_trained(kind: str) -> None:
    build, oracle = CASES[kind]
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        loss = L.mean(build(L.data("ids", [1], dtype="int64", lod_level=1)))
        fluid.optimizer.SGD(RATE).minimize(loss)
    exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    table = value(scope, "table").clone()
    for _ in range(2):
        leaf = table.clone().requires_grad_(True)
        wanted = oracle(leaf).mean()
        (gradient,) = torch.autograd.grad(wanted, [leaf])
        (found,) = exe.run(main, {"ids": SEQUENCES}, [loss], scope=scope)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
        assert float(gradient.abs().sum()) > 0.1
        table -= RATE * gradient
        np.testing.assert_allclose(value(scope, "table").numpy(), table.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["DynamicRNN", "StaticRNN"])
def test_steps_of_ids_give_a_sparse_gradient(kind: str) -> None:
    def build(*, inside: bool) -> tuple[Any, Any, Any]:
        with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
            ragged = kind == "DynamicRNN"
            ids = L.data("ids", [1] if ragged else [3, 2, 1], dtype="int64", lod_level=int(ragged),
                         append_batch_size=ragged)  # fmt: skip
            rnn = getattr(L, kind)()
            rows = ids if inside else looked_up(ids)
            first = L.sequence_pool(L.cast(ids, "float64"), "sum") if ragged else L.cast(ids[0], "float64")
            zeros = L.expand(first, [1, WIDTH]) * 0.0
            with rnn.block() if ragged else rnn.step():
                step = rnn.step_input(rows)
                row = looked_up(step) if inside else step
                before = rnn.memory(init=zeros)
                after = L.tanh(row + before)
                rnn.update_memory(before, after)
                rnn.output(after)
            loss = L.mean(rnn())
            fluid.optimizer.Adam(RATE).minimize(loss)
        return main, startup, loss

    feed = {"ids": SEQUENCES if kind == "DynamicRNN" else np.array([1, 2, 1, 5, 2, 6]).reshape(3, 2, 1)}
    tables = []
    for inside in (True, False):
        main, startup, loss = build(inside=inside)
        assert main.variables["table@GRAD"].kind == "selected_rows"
        exe, scope = fluid.Executor(), Scope()
        startup.random_seed = 3
        exe.run(startup, scope=scope)
        for _ in range(3):
            exe.run(main, feed, [loss], scope=scope)
        tables.append(value(scope, "table").clone())
    assert torch.equal(tables[0], tables[1])


def test_a_module_with_sparse_gradients_is_trained_in_a_block() -> None:
    module = torch.nn.Embedding(HEIGHT, WIDTH, sparse=True, dtype=torch.float64)
    with fluid.program_guard(main := fluid.Program(), startup := fluid.Program()):
        ids, total = L.data("ids", [1], dtype="int64"), L.zeros([1], "float64")
        _repeated(total, lambda: L.reduce_sum(L.square(module(ids))).reshape([1]))
        ((_, gradient),) = fluid.append_backward(L.mean(total))
    exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    (found,) = exe.run(main, {"ids": np.array([[1], [4], [1]])}, [gradient], scope=scope)
    wanted = np.zeros((HEIGHT, WIDTH))
    for row in (1, 4, 1):
        wanted[row] += 6 * module.weight.detach().numpy()[row]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_distributed_table_is_refused_in_a_block() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        ids = L.data("ids", [1], dtype="int64")
        with pytest.raises(ProgramError, match="Look the ids up before the block"), L.While(L.is_empty(ids)).block():
            L.embedding(ids, [HEIGHT, WIDTH], is_sparse=True, is_distributed=True)


def test_a_dense_gradient_of_a_sparse_table_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        ids = L.data("ids", [1], dtype="int64", lod_level=1)
        for _ in range(2):
            L.embedding(ids, [HEIGHT, WIDTH], is_sparse=True, param_attr="warned_of")
        assert not caplog.records  # looked up outside: sparse
        for _ in range(2):
            L.cond(
                L.less_than(L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", 1)),
                lambda: L.reduce_sum(L.embedding(ids, [HEIGHT, WIDTH], is_sparse=True, param_attr="warned_of")),
                lambda: L.fill_constant([1], "float32", 0.0).sum(),
            )
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "table 'warned_of' is looked up with a sparse gradient in a block" in warning and "[7, 3]" in warning
