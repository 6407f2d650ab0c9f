"""A GEO step has one operator for all parameters, which reads ids as they were fed, and hands over the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import trained
from tests.transpile.recorded import Recorded, batch, tower

import penstock as fluid
from penstock.graph.analysis.origins import COPIES
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.choice import PassChoice
from penstock.graph.passes.fuse_geo import fuse_geo
from penstock.graph.passes.fuse_sparse import fuse_sparse_updates
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Operator, Ref, Role
from penstock.ps.remote import GEO, GEO_STEP

SERVERS = "127.0.0.1:6170,10.0.0.2:6171"
DENSE = 6  # parameters of the tower, beside its table


def cut() -> tuple[Recorded, Any, fluid.Program]:
    """Return a trainer's program, what cut it, and the startup program as it was."""
    recorded, before = tower(), tower().startup
    config = fluid.DistributeTranspilerConfig()
    config.sync_mode, config.geo_sgd_mode = False, True
    made = fluid.DistributeTranspiler(config)
    made.transpile(0, recorded.main, SERVERS, 1, sync_mode=False, startup_program=recorded.startup)
    return recorded, made, before


def graph_of(recorded: Recorded, num_replicas: int = 2) -> Graph:
    return build_graph(recorded.main, mode="reduce", num_replicas=num_replicas, active=num_replicas)


def of_type(graph: Graph, kind: str) -> list[OpHandle]:
    return [h for h in graph.handles if h.op.type == kind]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_all_exchanges_become_one_that_reads_fed_ids(num_replicas: int) -> None:
    recorded = cut()[0]
    graph = graph_of(recorded, num_replicas)
    assert len(of_type(graph, GEO)) == DENSE + 1
    fused = fuse_sparse_updates(fuse_geo(graph, recorded.main), recorded.main)
    check(fused)
    (step,) = of_type(fused, GEO_STEP)
    assert not of_type(fused, GEO)
    parameters, ids, _, variables, counts, _ = step.op.args
    assert isinstance(parameters, tuple) and isinstance(ids, tuple) and isinstance(variables, tuple)
    assert [isinstance(p, Ref) and p.name for p in parameters] == list(variables)
    assert dict(zip(variables, counts, strict=True))["table"] == num_replicas  # type: ignore[arg-type]
    assert all(isinstance(n, Ref) and fused.variables[n.name].feed for n in ids)
    copies = [h for h in fused.handles if h.op.type in COPIES]
    assert not copies, "copies of ids have no reader any more"


def with_one_more(graph: Graph, after: OpHandle, name: str) -> Graph:
    """Return the graph with an operator that changes `name` in place, after a handle."""
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        rewriter.keep(handle)
        if handle.index == after.index:
            op = Operator("again", "aten.mul_.Scalar", (Ref(name), 2), (), writes=(name,), role=Role.OPTIMIZE)
            rewriter.put("computation", op, handle.replica, 0)
    return rewriter.finish()


def test_a_parameter_changed_after_its_exchange_stays_apart() -> None:
    recorded = cut()[0]
    graph = graph_of(recorded)
    first = of_type(graph, GEO)[0]
    fused = fuse_geo(with_one_more(graph, first, first.op.writes[0]), recorded.main)
    check(fused)
    (alone,) = of_type(fused, GEO)
    assert alone.op.writes == first.op.writes
    (step,) = of_type(fused, GEO_STEP)
    assert len(step.op.writes) == DENSE


def test_ids_overwritten_before_the_end_are_exchanged_first() -> None:
    recorded = cut()[0]
    graph = graph_of(recorded)
    of_table = next(h for h in of_type(graph, GEO) if h.op.args[1] is not None)
    assert of_table is not of_type(graph, GEO)[-1]
    feed = next(k for k, v in graph.variables.items() if v.feed and v.name == "ids" and v.replica == 1)
    fused = fuse_geo(with_one_more(graph, of_table, feed), recorded.main)
    check(fused)
    (alone,) = of_type(fused, GEO)
    assert alone.op.args == of_table.op.args


def test_an_exchange_whose_token_is_fetched_stays_apart() -> None:
    recorded = cut()[0]
    graph = graph_of(recorded)
    (token,) = of_type(graph, GEO)[0].makes()
    assert len(of_type(fuse_geo(graph, recorded.main, {token}), GEO)) == 1


@pytest.fixture
def opened() -> Iterator[None]:
    with remotes_of_a_test():
        yield


@pytest.mark.usefixtures("opened")
def test_parameters_and_rows_are_the_same_to_the_bit() -> None:
    handed = []
    for is_fused in (True, False):
        feeds = [batch(seed=i) for i in range(3)]
        fakes, _, _ = trained(*cut(), feeds, PassChoice(fuse_remote=is_fused))
        assert (("geo_step", "") in fakes.calls) == is_fused
        handed.append(fakes.sent)
    assert handed[0].keys() == handed[1].keys()
    for name, (parameter, rows) in handed[0].items():
        other, other_rows = handed[1][name]
        assert torch.equal(parameter, other), name
        assert rows is other_rows is None or torch.equal(rows, other_rows), name
