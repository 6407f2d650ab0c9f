"""Graphs that advice derives from one recorded graph, against those that the executor builds for the same settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import penstock as fluid
from penstock.advice.costs import Costs
from penstock.advice.plan import tasks_of, template_of
from penstock.advice.recorded import Recorded, setting_of
from penstock.advice.setting import DEFAULT_BUCKET_BYTES, Exchange, Setting
from penstock.graph.document import document
from penstock.protocol.graphdoc import GraphDocument, Op, Sync, Value

ROWS = 64
MODES: tuple[Exchange, ...] = ("reduce", "all_reduce")
EXCHANGES: tuple[tuple[Exchange, int], ...] = (
    ("reduce", DEFAULT_BUCKET_BYTES), ("all_reduce", DEFAULT_BUCKET_BYTES), ("all_reduce", 0),
)  # fmt: skip
SETTINGS = [Setting(2, 1, "reduce"), *(Setting(2, cpu_num, *one) for cpu_num in (2, 4) for one in EXCHANGES)]


def built(setting: Setting) -> GraphDocument:
    """Return the document of a network with a sparse table, a large gradient (parts) and small ones (buckets)."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup), fluid.scope_guard(scope):
        ids = fluid.layers.data("ids", [1], dtype="int64")
        label = fluid.layers.data("label", [1])
        rows = fluid.layers.embedding(ids, [100, 64], is_sparse=True)
        hidden = fluid.layers.fc(fluid.layers.fc(rows, 600, act="tanh"), 500, act="tanh")
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), label))
        fluid.optimizer.Adam(0.01).minimize(loss)
        build, execution = fluid.BuildStrategy(), fluid.ExecutionStrategy()
        fluid.Executor(fluid.CPUPlace()).run(startup)
        executor = fluid.ParallelExecutor(
            False, loss.name, main, build_strategy=build, exec_strategy=execution, scope=scope
        )
        draw = np.random.default_rng(0)
        feed = {"ids": draw.integers(0, 100, (ROWS, 1)), "label": draw.random((ROWS, 1), np.float32)}
        executor.run([], feed=feed)
    core = executor.core
    lowered = next(reversed(core._plans.values()))
    share = [ROWS // setting.cpu_num] * setting.cpu_num
    made = document(lowered.graph, main, lowered.shares, name="p", num_threads=core.num_threads, rows=share)
    executor.close()
    return made


@pytest.fixture(scope="module")
def documents() -> Iterator[dict[Setting, GraphDocument]]:
    with pytest.MonkeyPatch.context() as patch:
        # one kernel for every size, so that no graph has operators that the others lack
        patch.setenv("PENSTOCK_MATRIX_KERNELS", "torch")
        found = {}
        for setting in SETTINGS:
            for name, value in setting.environment().items():
                patch.setenv(name, value)
            found[setting] = built(setting)
        yield found


def ordered_pairs(before: Sequence[Sequence[int]]) -> int:
    found: list[set[int]] = []
    for ones in before:
        found.append(set(ones).union(*(found[one] for one in ones)))
    return sum(map(len, found))


def names(found: Sequence[str]) -> Counter[str]:
    beginnings = ("exchange.", "all_reduce.", "fused_all_reduce.", "reduce.")
    return Counter("exchange" if name.startswith(beginnings) else name for name in found)


@pytest.mark.parametrize("target", SETTINGS, ids=lambda one: one.name)
@pytest.mark.parametrize("source", SETTINGS, ids=lambda one: one.name)
def test_a_planned_graph_has_the_handles_of_the_built_one(
    documents: dict[Setting, GraphDocument], source: Setting, target: Setting
) -> None:
    graph, expected = documents[source], documents[target]
    run = Recorded(graph, source, 2, 1.0, 0.0, tuple(1000.0 for _ in graph.ops))
    tasks = tasks_of(template_of(graph), run, target, Costs(run))
    assert names([task.name for task in tasks]) == names([op.name for op in expected.ops])
    before: list[list[int]] = [[] for _ in expected.ops]
    for first, second in expected.edges:
        before[second].append(first)
    planned, real = ordered_pairs([task.before for task in tasks]), ordered_pairs(before)
    # a graph has no edge that follows from others; so what only a bucket implied is not known without it
    assert planned == pytest.approx(real, rel=0.02)


def test_a_setting_is_read_back_from_its_graph(documents: dict[Setting, GraphDocument]) -> None:
    for setting, graph in documents.items():
        assert setting_of(graph, threads=2) == setting, setting.name


def test_variables_of_a_setting_win_over_the_script(
    documents: dict[Setting, GraphDocument], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges: set[Exchange] = {"reduce", "all_reduce"}
    assert {graph.mode for setting, graph in documents.items() if setting.cpu_num == 2} == exchanges
    assert {graph.num_replicas for graph in documents.values()} == {1, 2, 4}
    assert {graph.num_threads for graph in documents.values()} == {2}


def test_a_fused_update_of_several_tables_falls_to_all_owners() -> None:
    tables = [Value(name=f"t{k}", dtype="float32", shape=[10, 4]) for k in range(6)]
    update = Op(
        name="fused_0", type="penstock.fused_sparse_sgd_.default", kind="computation", role="optimize", replica=0,
        module="", source="", inputs=tables, outputs=tables, bytes=0, flops=0,
    )  # fmt: skip
    syncs = [
        Sync(parameter=t.name, gradient=f"{t.name}@GRAD", mode="all_reduce", owner=-1, bytes=0, sparse=True, ops=[])
        for t in tables
    ]
    graph = GraphDocument(
        program="p", mode="local", num_replicas=1, num_threads=1, batch=[8], ops=[update], edges=[], syncs=syncs
    )
    run = Recorded(graph, Setting(1, 1, "reduce"), 4, 9e6, 0.0, (8e6,))
    found = {exchange: tasks_of(template_of(graph), run, Setting(4, 4, exchange), Costs(run)) for exchange in MODES}
    assert [task.home for task in found["reduce"]] == [0, 1, 2, 3] == [task.home for task in found["all_reduce"]]
    whole = found["all_reduce"][0].cost_ns
    assert [task.cost_ns for task in found["reduce"]] == pytest.approx([whole / 4] * 4)
