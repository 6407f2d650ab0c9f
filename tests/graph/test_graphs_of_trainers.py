"""Graphs of programs that talk to parameter servers: checked edges, each gradient sent once, barriers after all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.transpile.recorded import ROWS, Recorded, tower, transpiled

import penstock as fluid
from penstock.errors import ProgramError
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.devices import build_device_graph
from penstock.graph.document import document, kind_and_role
from penstock.graph.operands import Shares
from penstock.graph.ssa import Graph
from penstock.program.ir import Role
from penstock.ps.remote import PREFETCH, REMOTE_TYPES

SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "geo": {"sync_mode": False, "geo_sgd_mode": True},
}


@pytest.fixture(scope="module", params=SETTINGS)
def model(request: pytest.FixtureRequest) -> Recorded:
    """A trainer's program in each mode."""
    recorded = tower(clip=fluid.clip.GradientClipByValue(1.0))
    transpiled(recorded, 0, 2, **SETTINGS[request.param])
    return recorded


def ancestors(graph: Graph) -> list[set[int]]:
    """All handles that run before each handle."""
    found: list[set[int]] = []
    for handle in graph.handles:
        found.append(set(handle.before).union(*(found[b] for b in handle.before)))
    return found


@pytest.mark.parametrize("build", [build_graph, build_device_graph])
@pytest.mark.parametrize(("num_replicas", "active"), [(1, 1), (2, 2), (3, 2), (4, 1)])
def test_each_exchange_with_servers_happens_once_in_a_step(
    model: Recorded, build: Callable[..., Graph], num_replicas: int, active: int
) -> None:
    graph = build(model.main, mode="reduce", num_replicas=num_replicas, active=active)
    check(graph)
    counts = Counter(h.op.name for h in graph.handles if h.kind == "rpc")
    assert set(counts.values()) == {1}
    assert counts.keys() == {op.name for op in model.main.operators if op.role & Role.RPC}
    prefetches = [h for h in graph.handles if h.op.type == "penstock.prefetch.default"]
    assert len(prefetches) in (0, active)


def test_a_prefetch_is_shown_as_communication(model: Recorded) -> None:
    graph = build_graph(model.main, mode="reduce", num_replicas=2, active=2)
    shown = {h.op.type: kind_and_role(h) for h in graph.handles}
    remote = [found for kind, found in shown.items() if kind in REMOTE_TYPES]
    assert remote and set(remote) == {("rpc", "communication")}
    assert shown["aten.addmm.default"] == ("computation", "forward")


@pytest.mark.parametrize(("is_distributed", "num_rows"), [(False, ROWS), (True, -1)])
def test_a_prefetch_reads_the_table_of_the_servers(*, is_distributed: bool, num_rows: int) -> None:
    recorded = tower(is_distributed=is_distributed)
    transpiled(recorded, 0, 2)
    variables = recorded.main.variables.values()
    sizes = {s: 4 for v in variables for d in v.shape if not isinstance(d, int) for s in d.symbols()}
    graph = build_graph(recorded.main, mode="reduce", num_replicas=1, active=1)
    made = document(graph, recorded.main, Shares([sizes], [1.0]), name="t", num_threads=1, rows=[4])
    [op] = [op for op in made.ops if op.type == PREFETCH]
    table = op.inputs[-1]
    assert (table.name, table.dtype, table.shape) == ("table", "float32", [num_rows, 16])
    assert op.bytes == sum(value.num_bytes for value in (*op.inputs[:-1], *op.outputs))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_pull_follows_all_sends_and_readers_of_its_parameter(num_replicas: int) -> None:
    recorded = tower()
    transpiled(recorded, 0, 2)
    graph = build_graph(recorded.main, mode="reduce", num_replicas=num_replicas, active=num_replicas)
    before = ancestors(graph)
    sends = {h.index for h in graph.handles if h.op.name.startswith("send_")}
    for handle in graph.handles:
        if handle.op.name.startswith("recv_"):
            assert sends <= before[handle.index]
            parameter = handle.op.role_vars[0][0]
            readers = {h.index for h in graph.handles if parameter in h.reads() and not h.op.role & Role.DIST}
            assert readers - {handle.index} <= before[handle.index]


@pytest.mark.parametrize("build", [build_graph, build_device_graph])
def test_sending_from_every_replica_is_refused(model: Recorded, build: Callable[..., Graph]) -> None:
    with pytest.raises(ProgramError, match=r"Use BuildStrategy\.ReduceStrategy\.Reduce"):
        build(model.main, mode="all_reduce", num_replicas=2, active=2)
