"""A sync step with servers has one operator that pushes and one that pulls, and computes the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import trained
from tests.transpile.recorded import Recorded, batch, tower

import penstock as fluid
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.choice import PassChoice
from penstock.graph.passes.fuse_remote import fuse_remote
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph
from penstock.program.ir import Operator, Ref, Role
from penstock.ps.remote import FETCH_BARRIER, RECV, RECV_STEP, SEND, SEND_BARRIER, SEND_ROWS, SEND_STEP

SERVERS = "127.0.0.1:6170,10.0.0.2:6171"
SINGLE = {SEND, SEND_ROWS, SEND_BARRIER, RECV, FETCH_BARRIER}


def cut(*, half_async: bool = False, **settings: Any) -> tuple[Recorded, fluid.DistributeTranspiler, fluid.Program]:
    """Return a trainer's program, what cut it, and the startup program as it was."""
    recorded, before = tower(), tower().startup
    config = fluid.DistributeTranspilerConfig()
    config.sync_mode, config.half_async = settings.get("sync_mode", True), half_async
    made = fluid.DistributeTranspiler(config)
    made.transpile(0, recorded.main, SERVERS, 1, startup_program=recorded.startup, **settings)
    return recorded, made, before


def counts(graph: Graph) -> Counter[str]:
    return Counter(h.op.type for h in graph.handles if h.op.type in {*SINGLE, SEND_STEP, RECV_STEP})


def graph_of(recorded: Recorded, num_replicas: int = 2) -> Graph:
    return build_graph(recorded.main, mode="reduce", num_replicas=num_replicas, active=num_replicas)


@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_all_pushes_become_one_operator_and_all_pulls_another(num_replicas: int, mode: str) -> None:
    recorded, made, _ = cut(sync_mode=mode == "sync", half_async=mode == "half_async")
    assert made.descriptor.mode == mode
    graph = fuse_remote(graph_of(recorded, num_replicas))
    check(graph)
    assert counts(graph) == {SEND_STEP: 1, RECV_STEP: 1}
    push, pull = (next(h for h in graph.handles if h.op.type == kind) for kind in (SEND_STEP, RECV_STEP))
    spec = json.loads(str(push.op.args[-1]))
    assert sum(count for *_, count in spec["dense"]) + 2 * len(spec["sparse"]) == len(push.op.input_names())
    assert push.index in pull.before


@pytest.mark.parametrize("kind", [SEND, RECV])
def test_without_rounds_what_others_change_stays_apart(kind: str) -> None:
    graph = graph_of(cut(sync_mode=False)[0])
    handle = next(h for h in graph.handles if h.op.type == kind)
    name = handle.op.input_names()[0] if kind == SEND else handle.op.writes[0]
    fused = fuse_remote(with_one_more(graph, kind, name))
    check(fused)
    assert SEND_STEP not in counts(fused)


def with_one_more(graph: Graph, after: str, name: str) -> Graph:
    """Return the graph with an operator that changes `name` in place, after the first operator of a type."""
    rewriter, added = Rewriter(graph), False
    for handle in graph.handles:
        rewriter.keep(handle)
        if handle.op.type == after and name in (*handle.op.input_names(), *handle.op.writes) and not added:
            op = Operator("again", "aten.mul_.Scalar", (Ref(name), 2.0), (), writes=(name,), role=Role.OPTIMIZE)
            rewriter.put("computation", op, handle.replica, 0)
            added = True
    assert added
    return rewriter.finish()


def test_a_gradient_rewritten_before_the_barrier_is_pushed_first() -> None:
    graph = graph_of(cut()[0])
    sent = next(h.op.input_names()[0] for h in graph.handles if h.op.type == SEND)
    fused = fuse_remote(with_one_more(graph, SEND, sent))
    check(fused)
    assert counts(fused) == {SEND: 1, SEND_STEP: 1, RECV_STEP: 1}
    (alone,) = (h for h in fused.handles if h.op.type == SEND)
    assert sent in alone.op.input_names()


def test_a_parameter_changed_after_its_pull_is_pulled_before() -> None:
    graph = graph_of(cut()[0])
    pulled = next(h.op.writes[0] for h in graph.handles if h.op.type == RECV)
    fused = fuse_remote(with_one_more(graph, RECV, pulled))
    check(fused)
    assert counts(fused)[RECV] == 1
    assert pulled in next(h for h in fused.handles if h.op.type == RECV).op.writes


@pytest.fixture
def opened() -> Iterator[None]:
    with remotes_of_a_test():
        yield


@pytest.mark.usefixtures("opened")
def test_training_is_the_same_to_the_bit() -> None:
    learned = []
    for is_fused in (True, False):
        feeds = [batch(seed=i) for i in range(3)]
        fakes, scope, _ = trained(*cut(), feeds, PassChoice(fuse_remote=is_fused))
        assert (("send_step", "") in fakes.calls) == is_fused
        learned.append({**{n: scope.find(n) for n in ("w", "out")}, **fakes.values})
    for name, value in learned[0].items():
        assert torch.equal(value, learned[1][name]), name
