"""Sequential order: each replica's operators run in the order of the Program, and the result does not change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.property.networks import NETWORKS
from tests.property.oracle import assert_passes_keep_results

from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.exchanges import run_in_program_order
from penstock.graph.ssa import Graph, Mode


def order_of(graph: Graph, replica: int) -> list[int]:
    """Return the longest chain of handles of one replica, each waiting (directly or not) for the one before."""
    ancestors: list[set[int]] = []
    for handle in graph.handles:
        ancestors.append(set().union(*(ancestors[b] | {b} for b in handle.before)))
    mine = [h.index for h in graph.handles if h.replica == replica]
    return [b for a, b in pairwise(mine) if a in ancestors[b]]


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_all_operators_of_a_replica_form_one_chain(mode: Mode, num_replicas: int) -> None:
    built = build_graph(NETWORKS["transformer"]().main, mode=mode, num_replicas=num_replicas, active=num_replicas)
    graph = run_in_program_order(built)
    check(graph)
    assert [h.op for h in graph.handles] == [h.op for h in built.handles]
    for replica in range(num_replicas):
        mine = [h for h in graph.handles if h.replica == replica]
        assert len(order_of(graph, replica)) == len(mine) - 1
        assert num_replicas == 1 or len(order_of(built, replica)) < len(mine) - 1


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_changes_no_bit(name: str, mode: Mode) -> None:
    assert_passes_keep_results(NETWORKS[name](), PassChoice(sequential=True), mode=mode, num_replicas=2)


def test_exchange_plans_follow_their_handles() -> None:
    built = build_graph(NETWORKS["ctr_dnn"]().main, mode="reduce", num_replicas=2, active=2)
    graph = run_in_program_order(built)
    assert PassChoice() != PLAIN
    for before, after in zip(built.syncs, graph.syncs, strict=True):
        assert [built.handles[i].op.name for i in before.handles] == [graph.handles[i].op.name for i in after.handles]
