"""What the recorder writes down: sizes, names, storages, roles, lines, module paths, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as fluid
from penstock.program import legality
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.scope import Scope

HERE = "test_recorder_records.py"


def record(write: Callable[[Any], Any], dtype: str = "float32") -> tuple[Program, Program, Any]:
    """Record `write` on an input x [batch, 4]; return main, startup and the result."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        result = write(fluid.layers.data(name="x", shape=[4], dtype=dtype))
    legality.check(main)
    legality.check(startup)
    return main, startup, result


def run(main: Program, startup: Program, out: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    return exe.run(main, {"x": x}, [out], scope=scope)[0]  # type: ignore[no-any-return]  # an array


SYMBOLIC: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x.reshape(-1, 2), "[2 * s0, 2]"),
    (lambda x: x.reshape(x.shape[0] * 2, 2), "[2 * s0, 2]"),
    (lambda x: x.reshape(x.size(0), 2, 2).permute(1, 0, 2).reshape(2 * x.shape[0], -1), "[2 * s0, 2]"),
    (lambda x: x[: (x.shape[0] + 1) // 2], "[(s0 + 1) // 2, 4]"),
    (lambda x: x.new_zeros(x.shape[0], 3) + x[:, :3], "[s0, 3]"),
    (lambda x: torch.cat([x, x]), "[2 * s0, 4]"),
    (lambda x: x / x.shape[0], "[s0, 4]"),
    (lambda x: x @ x.T, "[s0, s0]"),
    (lambda x: nn.functional.pad(x, (1, 1)), "[s0, 6]"),
]


@pytest.mark.parametrize("rows", [6, 1])
@pytest.mark.parametrize(("write", "shape"), SYMBOLIC)
def test_sizes_stay_symbolic_and_give_what_torch_gives(write: Callable[[Any], Any], shape: str, rows: int) -> None:
    main, startup, out = record(write)
    got_shape = "[" + ", ".join(str(d) for d in out.desc.shape) + "]"
    # Sums and products may be written in another order; what counts is their value.
    assert len(got_shape.split(", ")) == len(shape.split(", "))
    assert not main.guards
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    wanted = write(torch.from_numpy(x))
    got = run(main, startup, out, x)
    assert got.shape == tuple(wanted.shape)
    np.testing.assert_array_equal(got, wanted.numpy())
    assert [d if isinstance(d, int) else d.evaluate({"s0": rows}) for d in out.desc.shape] == list(wanted.shape)


def test_a_view_shares_its_storage_and_in_place_writes_show() -> None:
    def write(x: Any) -> Any:
        y = x.clone()
        y[:, 1:2].mul_(3.0)
        return y

    main, startup, out = record(write)
    op = next(o for o in main.operators if o.type == "aten.mul_.Tensor")
    (written,) = op.writes
    assert main.variables[written].storage == out.name
    got = run(main, startup, out, np.ones((2, 4), "float32"))
    np.testing.assert_array_equal(got, [[1, 3, 1, 1]] * 2)


def test_writing_an_input_in_place_leaves_the_fed_array_alone() -> None:
    main, startup, out = record(lambda x: x.add_(1.0))
    fed = np.zeros((2, 4), "float32")
    assert (run(main, startup, out, fed) == 1).all()
    assert (fed == 0).all()
    tensor = torch.zeros(2, 4)
    fluid.Executor().run(main, {"x": tensor}, [out], scope=Scope())
    assert (tensor == 0).all()


def test_captured_tensors_keep_their_values() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    main, startup, out = record(lambda x: x * weights + torch.ones(4))
    weights.zero_()
    np.testing.assert_array_equal(run(main, startup, out, np.ones((1, 4), "float32")), [[2, 3, 4, 5]])


def test_attention_without_dropout_stays_one_operator() -> None:
    main, *_ = record(lambda x: nn.functional.scaled_dot_product_attention(*[x.reshape(-1, 1, 2, 2)] * 3))
    assert len([op for op in main.operators if "scaled_dot_product" in op.type]) == 1
    assert not [op for op in main.operators if "softmax" in op.type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.inner(self.inner(x))


def test_a_module_called_twice_has_paths_lines_and_one_weight() -> None:
    block = Block()
    main, *_ = record(lambda x: block(block(x)))
    products = [op for op in main.operators if op.type == "aten.addmm.default"]
    assert [op.module for op in products] == ["block_0.inner.0"] * 4
    line = Block.forward.__code__.co_firstlineno + 1
    assert {op.source for op in products} == {f"{HERE}:{line}"}
    assert [p.name for p in main.parameters()] == ["block_0.inner.0.weight", "block_0.inner.0.bias"]


def test_two_modules_of_one_class_have_parameters_of_their_own() -> None:
    main, *_ = record(lambda x: nn.Linear(4, 4)(nn.Linear(4, 4)(x)))
    assert [p.name for p in main.parameters()] == [f"linear_{i}.{n}" for i in (0, 1) for n in ("weight", "bias")]


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(torch.tanh(self.first(x)))

    module = Tied()

    def write(x: Any) -> Any:
        return fluid.append_backward(fluid.layers.mean(module(x)))

    main, startup, pairs = record(write)
    assert [(p.name, g.name) for p, g in pairs] == [("tied_0.first.weight", "tied_0.first.weight@GRAD")]
    x = np.random.default_rng(1).normal(size=(3, 4)).astype("float32")
    loss: Any = module(torch.from_numpy(x)).mean()
    loss.backward()
    gradient = module.first.weight.grad
    assert gradient is not None
    np.testing.assert_allclose(run(main, startup, pairs[0][1].name, x), gradient.numpy(), rtol=1e-6)


def test_operators_have_roles_lines_and_gradient_pairs() -> None:
    def write(x: Any) -> Any:
        loss = fluid.layers.mean(fluid.layers.fc(x, 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    main, _, loss = record(write)
    first = write.__code__.co_firstlineno
    forward = [op for op in main.operators if op.role & Role.FORWARD]
    assert [op.type for op in forward] == ["aten.addmm.default", "aten.mean.default"]
    assert forward[-1].role == Role.FORWARD | Role.LOSS
    assert {op.source for op in forward} == {f"{HERE}:{first + 1}"}
    seed = next(op for op in main.operators if op.role == Role.BACKWARD | Role.LOSS)
    assert seed.output_names() == (f"{loss.name}@GRAD",)
    made = {p: g for op in main.operators if op.role & Role.BACKWARD for p, g in op.role_vars}
    used = {p: g for op in main.operators if op.role & Role.OPTIMIZE for p, g in op.role_vars}
    assert made == used == {"fc_0.w_0": "fc_0.w_0@GRAD", "fc_0.b_0": "fc_0.b_0@GRAD"}
    for op in main.operators:
        for _, gradient in op.role_vars if op.role & Role.BACKWARD else ():
            assert gradient in op.output_names()
    assert all(op.source for op in main.operators)


def sparse_table(padding_idx: int | None = None, *, is_sparse: bool = True) -> Callable[[Any], Any]:
    def write(x: Any) -> Any:
        attr = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0))
        ids = x.long()
        rows = [fluid.layers.embedding(ids[:, i], [9, 2], is_sparse, False, padding_idx, attr) for i in (0, 1)]
        loss = fluid.layers.mean(fluid.layers.reduce_sum((rows[0] * rows[1]), 1))
        return fluid.append_backward(loss)

    return write


def test_a_gradient_of_several_lookups_is_selected_rows() -> None:
    main, startup, pairs = record(sparse_table())
    (parameter, gradient), *more = pairs
    assert not more
    described = main.variables[gradient.name]
    assert (parameter.name, described.kind, described.rows) == ("table", "selected_rows", "table@GRAD@ROWS")
    dense = [v.name for v in main.variables.values() if v.kind == "dense" and list(v.shape) == [9, 2]]
    assert dense == ["table"]
    ids = np.array([[1, 2, 0, 0], [2, 2, 0, 0], [8, 1, 0, 0]], "float32")
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    (got,) = exe.run(main, {"x": ids}, [gradient.name], scope=scope)
    assert got.height == 9
    assert got.rows.tolist() == [1, 2, 8, 2, 2, 1]
    table = scope.find("table")
    assert table is not None
    reference = table.clone().requires_grad_()
    both = [torch.nn.functional.embedding(torch.from_numpy(ids).long()[:, i], reference) for i in (0, 1)]
    loss: Any = (both[0] * both[1]).sum(1).mean()
    loss.backward()
    summed = torch.zeros(9, 2).index_add(0, torch.from_numpy(got.rows), torch.from_numpy(got.values))
    assert reference.grad is not None
    torch.testing.assert_close(summed, reference.grad)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_padding_row_reads_as_zeros_and_has_no_gradient(is_sparse: bool) -> None:
    main, startup, pairs = record(sparse_table(2, is_sparse=is_sparse))
    ids = np.array([[2, 2, 0, 0], [1, 2, 0, 0], [3, 4, 0, 0]], "float32")
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    (got,) = exe.run(main, {"x": ids}, [pairs[0][1].name], scope=scope)
    dense = got
    if is_sparse:
        dense = torch.zeros(9, 2).index_add(0, torch.from_numpy(got.rows), torch.from_numpy(got.values)).numpy()
    assert (dense[2] == 0).all()
    assert (dense[1] == 0).all(), "its partner was the padding row, which reads as zeros"
    assert (dense[3] != 0).all()


def test_sparse_and_dense_tables_train_alike_with_sgd() -> None:
    tables = []
    for is_sparse in (True, False):

        def write(x: Any, is_sparse: bool = is_sparse) -> Any:
            attr = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0))
            rows = fluid.layers.embedding(x.long(), [9, 2], is_sparse, False, 3, attr)
            loss = fluid.layers.mean(rows * rows * rows)
            fluid.optimizer.SGD(0.5).minimize(loss)
            return loss

        main, startup, _ = record(write)
        scope, exe = Scope(), fluid.Executor()
        exe.run(startup, scope=scope)
        for step in range(5):
            exe.run(main, {"x": np.random.default_rng(step).integers(0, 9, (4, 4)).astype("float32")}, scope=scope)
        tables.append(scope.find("table"))
    torch.testing.assert_close(tables[0], tables[1])


def test_a_seed_repeats_the_start_and_zero_gives_a_fresh_one() -> None:
    def start(seed: int) -> torch.Tensor:
        main, startup = Program(seed=seed), Program(seed=seed)
        with fluid.program_guard(main, startup):
            fluid.layers.fc(fluid.layers.data(name="x", shape=[4]), 3)
        scope = Scope()
        fluid.Executor().run(startup, scope=scope)
        found = scope.find("fc_0.w_0")
        assert found is not None
        return found

    assert torch.equal(start(7), start(7))
    assert not torch.equal(start(7), start(8))
    assert not torch.equal(start(0), start(0))


def test_dropout_draws_anew_in_each_step_and_alike_in_each_run() -> None:
    main, startup, out = record(lambda x: nn.functional.dropout(x, 0.5))
    ones = np.ones((50, 4), "float32")

    def two_steps() -> list[Any]:
        scope, exe = Scope(), fluid.Executor()
        exe.run(startup, scope=scope)
        return [exe.run(main, {"x": ones}, [out], scope=scope)[0] for _ in range(2)]

    first, again = two_steps(), two_steps()
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, again)
    torch.manual_seed(1)
    np.testing.assert_array_equal(first, two_steps())


@pytest.mark.parametrize("call", [F.dropout, F.dropout2d, nn.Dropout(0.0), nn.Dropout(0.0, inplace=True)])
def test_dropout_that_drops_nothing_is_no_operator(call: Any) -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.layers.data("x", [3, 4, 4])
        y = x + 1.0
        z = call(y) if isinstance(call, nn.Module) else call(y, 0.0)
        assert [op.type for op in x.program.operators] == ["aten.add.Tensor"]
        assert z.name == y.name
