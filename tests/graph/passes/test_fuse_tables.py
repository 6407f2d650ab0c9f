"""Lookups side by side in one operator, and sparse updates without copies: the results of single ones, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.property.networks import NETWORKS, Feed, Network
from tests.property.oracle import assert_passes_keep_results, started, value

import penstock as fluid
from penstock.errors import OperatorError
from penstock.exec.parallel import ParallelExecutor
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.fuse_lookups import fuse_lookups
from penstock.graph.passes.fuse_sparse import fuse_sparse_updates
from penstock.graph.ssa import Graph, Mode
from penstock.program.ir import Operator, Ref
from penstock.program.program import Program

FUSED = PassChoice(
    fuse_all_reduce=False, matrix_kernels=False, reuse_buffers=False, inplace=False, fuse_lookups=True, fuse_sparse=True
)
WIDTHS = (4, 8, 3, 16)
Make = Callable[[], fluid.optimizer.Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda: fluid.optimizer.SGD(0.1),
    "adagrad": lambda: fluid.optimizer.Adagrad(0.1),
    "adam": lambda: fluid.optimizer.Adam(0.01, lazy_mode=True),
}


def slots(make: Make, *, shared: bool = False, padding: bool = False, alone: bool = False) -> Network:
    """Slots with a table each, or one for all, beside numbers. `alone`: the first slot's rows are read again."""
    main, startup = Program(seed=7), Program(seed=7)
    with fluid.program_guard(main, startup):
        rows = []
        for number, width in enumerate(WIDTHS):
            ids = fluid.layers.data(name=f"slot{number}", shape=[1], dtype="int64")
            name, size = ("table", [20, 8]) if shared else (f"table{number}", [20 + number, width])
            rows.append(
                fluid.layers.embedding(
                    ids, size, is_sparse=True, padding_idx=2 if padding else None, param_attr=fluid.ParamAttr(name=name)
                )
            )
        numbers = fluid.layers.data(name="numbers", shape=[3], dtype="float32")
        label = fluid.layers.data(name="label", shape=[1], dtype="float32")
        hidden = fluid.layers.fc(fluid.layers.concat([*rows[:2], numbers, *rows[2:]], axis=1), 5, act="tanh")
        if alone:
            hidden = fluid.layers.concat([hidden, rows[0] * 2.0], axis=1)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), label))
        make().minimize(loss)

    def feed(count: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        found: Feed = {f"slot{number}": random.integers(0, 20, (count, 1)) for number in range(len(WIDTHS))}
        found["numbers"] = random.normal(size=(count, 3)).astype("float32")
        return {**found, "label": random.normal(size=(count, 1)).astype("float32")}

    return Network("slots", main, startup, loss.name, feed)


def built(network: Network, *, mode: Mode = "reduce", replicas: int = 2) -> Graph:
    return build_graph(network.main, mode=mode, num_replicas=replicas, active=replicas)


def types(graph: Graph) -> list[str]:
    return [h.op.type.removeprefix("penstock.").removesuffix(".default") for h in graph.handles]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"padding": True}, {"alone": True}], ids=str)
def test_training_keeps_its_bits(kind: str, options: dict[str, bool]) -> None:
    for mode, replicas in (("reduce", 2), ("all_reduce", 3), ("reduce", 1)):
        network = slots(KINDS[kind], **options)
        assert_passes_keep_results(network, FUSED, mode=mode, num_replicas=replicas, batches=(7, 1, 6))  # type: ignore[arg-type]  # literals


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_keeps_its_bits(name: str) -> None:
    assert_passes_keep_results(NETWORKS[name](), FUSED, mode="reduce", num_replicas=2, batches=(7, 1))


def test_each_replica_looks_all_slots_up_in_one_operator() -> None:
    network = slots(KINDS["sgd"])
    graph = fuse_lookups(built(network), network.main)
    check(graph)
    assert types(graph).count("lookup_concat") == 2
    assert "lookup_table" not in types(graph)
    (first, _) = [h for h in graph.handles if h.op.type == "penstock.lookup_concat.default"]
    assert [ref.name for ref in first.op.args[1]] == [f"slot{number}#0" for number in range(4)]  # type: ignore[union-attr]  # a list of them
    assert first.op.args[4] == (0, 1, -1, 2, 3)
    assert [op.name for op in first.parts] == [f"lookup_table_{number}" for number in range(4)]


def test_each_owner_updates_its_tables_in_one_operator() -> None:
    network = slots(KINDS["adam"])
    graph = fuse_sparse_updates(built(network), network.main)
    check(graph)
    fused = [h for h in graph.handles if h.op.type == "penstock.fused_sparse_adam_.default"]
    assert sorted(p for h in fused for p, _ in h.op.role_vars) == [f"table{number}" for number in range(4)]
    assert {h.replica for h in fused} == {0, 1}
    assert all(len(h.op.args[5]) == 2 for h in fused)  # type: ignore[arg-type]  # the matrices, one of each replica
    assert not {"aten.clone", "sparse_adam_"} & set(types(graph))
    assert not [h for h in graph.handles if h.kind == "gather"]
    assert {sync.parameter for sync in graph.syncs} >= {"table0", "table3"}


def test_gradients_that_are_fetched_are_still_made() -> None:
    network = slots(KINDS["sgd"])
    gradient = network.main.variables["table1@GRAD"]
    kept = {gradient.rows, gradient.values}
    graph = fuse_sparse_updates(built(network), network.main, kept)
    check(graph)
    assert kept <= {n for h in graph.handles for n in h.makes()}
    assert "table0@GRAD@ROWS" not in {n for h in graph.handles for n in h.makes()}


def test_rows_with_another_reader_are_looked_up_by_themselves() -> None:
    network = slots(KINDS["sgd"], alone=True)
    graph = fuse_lookups(built(network), network.main)
    assert types(graph).count("lookup_table") == 2
    assert all(len(h.parts) == 3 for h in graph.handles if h.op.type == "penstock.lookup_concat.default")


def test_a_gradient_that_is_written_after_the_copy_is_not_read() -> None:
    """The copy of a replica's values comes before a write of the matrix: the update has to read the copy."""
    network = slots(KINDS["sgd"])
    operators = network.main.operators
    copy = next(i for i, op in enumerate(operators) if "table1@GRAD@VALUES" in op.output_names())
    matrix = network.main.variables[operators[copy].input_names()[0]].storage
    with fluid.program_guard(network.main, network.startup):
        late = next(i for i, op in enumerate(operators) if op.type == "penstock.sparse_sgd_.default")
        operators.insert(late, Operator("scaled", "aten.mul_.Scalar", (Ref(matrix), 0.0), (), writes=(matrix,)))
    graph = fuse_sparse_updates(built(network), network.main)
    check(graph)
    assert "sparse_sgd_" in types(graph)
    assert "fused_sparse_sgd_" not in types(graph)


def test_an_id_outside_its_table_names_the_recorded_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = slots(KINDS["sgd"])
    scope = started(network.startup)
    parallel = fluid.ParallelExecutor(False, network.loss, network.main, scope=scope)
    feed = network.feed(6, 1)
    feed["slot2"][4] = 22
    before = {name: value(scope, name).clone() for name in ("table0", "table2")}
    try:
        with pytest.raises(OperatorError, match=r"id 22 at position 1 .*which has 22 rows") as caught:
            parallel.run([network.loss], feed)
    finally:
        parallel.close()
    assert caught.value.operator == "lookup_table_2"
    assert "penstock.lookup_table: id" in str(caught.value)
    assert "table2" in str(caught.value)
    assert all(torch.equal(value(scope, name), kept) for name, kept in before.items())


def test_no_pass_leaves_lookups_as_they_are() -> None:
    assert not PLAIN.fuse_lookups
    assert not PLAIN.fuse_sparse


@pytest.mark.parametrize("split", [[4, 4], [3, 5]])
def test_gradients_in_other_parts_than_the_ids_are_copied(split: list[int]) -> None:
    main, startup = Program(seed=7), Program(seed=7)
    with fluid.program_guard(main, startup):
        ids = [
            fluid.layers.data(name=n, shape=[size, 1], dtype="int64", append_batch_size=False)
            for n, size in (("a", 3), ("b", 5))
        ]
        name = fluid.ParamAttr(name="table")
        rows = fluid.layers.embedding(torch.cat(ids), [10, 4], is_sparse=True, param_attr=name, dtype="float64")
        first, second = torch.split(rows, split)
        loss = fluid.layers.mean(first * 2.0) + fluid.layers.mean(second * second)
        fluid.optimizer.SGD(0.1).minimize(loss)
    graph = build_graph(main, mode="all_reduce", num_replicas=1, active=1)
    fused = fuse_sparse_updates(graph, main)
    assert any(kind.startswith("fused_sparse_sgd_") for kind in types(fused)) == (split == [3, 5])
    scope = started(startup)
    table = torch.tensor(np.array(scope.find_var("table")), requires_grad=True)
    drawn = np.random.default_rng(0).integers(0, 10, (8, 1))
    executor = ParallelExecutor(False, loss.name, main, scope=scope)
    executor.run([loss.name], {"a": drawn[:3], "b": drawn[3:]})
    executor.close()
    one, other = torch.split(table[torch.from_numpy(drawn[:, 0])], split)
    (grad,) = torch.autograd.grad((one * 2.0).mean() + (other * other).mean(), [table])
    np.testing.assert_allclose(np.array(scope.find_var("table")), (table - 0.1 * grad).detach(), rtol=1e-12)
