"""The buffer plan: nothing overlaps that may live at once, and the check sees it when something does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from tests.property.networks import NETWORKS
from tests.property.oracle import started

from penstock.errors import Bug
from penstock.exec.data_parallel import DataParallel
from penstock.exec.lowering import Lowered
from penstock.exec.memory import ReplicaMemory
from penstock.graph.analysis.buffers import HEADER, Buffers, check, plan
from penstock.graph.analysis.liveness import Allocation, Liveness, staying
from penstock.graph.passes import PassChoice
from penstock.graph.ssa import Graph

CASES = [(name, mode, n) for name in NETWORKS for mode, n in (("all_reduce", 1), ("all_reduce", 2), ("reduce", 3))]


def lowered(name: str, mode: str, num_replicas: int, choice: PassChoice = PassChoice()) -> Lowered:  # noqa: B008 - frozen
    """Run a network twice, so that its memory is planned; return the plan."""
    network = NETWORKS[name]()
    core = DataParallel(
        network.main, ReplicaMemory(started(network.startup)), mode="reduce" if mode == "reduce" else "all_reduce",
        num_replicas=num_replicas, loss_name=network.loss, choice=choice,
    )  # fmt: skip
    for number in range(2):
        core.run(network.feed(6, number), [network.loss])
    (found,) = core._plans.values()
    core.close()
    return found


@pytest.fixture(scope="module")
def ctr() -> tuple[Graph, Buffers]:
    one = lowered("ctr_dnn", "all_reduce", 2)
    assert one.memory.buffers is not None
    return one.graph, one.memory.buffers


@pytest.mark.parametrize(("name", "mode", "num_replicas"), CASES)
def test_plans_of_all_networks_are_proved_and_share(name: str, mode: str, num_replicas: int) -> None:
    one = lowered(name, mode, num_replicas)
    buffers = one.memory.buffers
    assert buffers is not None
    check(one.graph, buffers)
    assert buffers.live_bytes <= buffers.arena_bytes < 0.8 * buffers.separate_bytes
    assert any(operand >= 0 for operand in buffers.operand_of)


def test_the_same_observation_gives_the_same_plan(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    assert plan(graph, buffers.allocations) == plan(graph, buffers.allocations)


def test_without_reuse_and_in_place_everything_lies_apart(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    apart = plan(graph, buffers.allocations, reuse=False, inplace=False)
    assert apart.arena_bytes == apart.separate_bytes
    spans = sorted(zip(apart.offsets, apart.sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))


def test_pinned_storages_get_no_block_and_lasting_ones_their_own(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    chosen = next(a for a in buffers.allocations if a.results and a.nbytes >= 64)
    storage = graph.variables[chosen.results[0]].storage
    assert chosen not in plan(graph, buffers.allocations, pinned={storage}).allocations
    lasting = plan(graph, buffers.allocations, lasting={storage})
    check(graph, lasting, lasting={storage})
    block = lasting.block_of[lasting.allocations.index(chosen)]
    start, end = lasting.offsets[block], lasting.offsets[block] + lasting.sizes[block]
    for other, (offset, size) in enumerate(zip(lasting.offsets, lasting.sizes, strict=True)):
        if other != block and offset < end and start < offset + size:  # only what was over before it was made
            members = [i for i, b in enumerate(lasting.block_of) if b == other]
            alive = Liveness(graph, lasting.allocations, {storage})
            assert all(alive.is_over_before(i, chosen.handle) for i in members)


def test_the_check_finds_every_block_moved_onto_a_live_one(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    alive = Liveness(graph, buffers.allocations)
    moved = 0
    for one, other in combinations(range(len(buffers.offsets)), 2):
        if _may_share(graph, buffers, alive, one, other):
            continue
        offsets = list(buffers.offsets)
        offsets[other] = offsets[one]
        with pytest.raises(Bug, match="overlap at"):
            check(graph, replace(buffers, offsets=tuple(offsets)))
        moved += 1
        if moved == 40:
            break
    assert moved == 40


def _may_share(graph: Graph, buffers: Buffers, alive: Liveness, one: int, other: int) -> bool:
    def over(first: int, second: int) -> bool:
        makers = [a.handle for a, b in zip(buffers.allocations, buffers.block_of, strict=True) if b == second]
        members = [i for i, b in enumerate(buffers.block_of) if b == first]
        return all(alive.is_over_before(i, min(makers)) for i in members)

    return over(one, other) or over(other, one)


def test_the_check_sees_a_missing_edge(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    seen = 0
    for handle in graph.handles:
        for before in sorted(handle.before):
            handle.before.remove(before)
            try:
                check(graph, buffers)
            except Bug:
                seen += 1
            handle.before.add(before)
    check(graph, buffers)
    assert seen > 20


def test_an_arena_that_is_too_small_or_unaligned_is_refused(ctr: tuple[Graph, Buffers]) -> None:
    graph, buffers = ctr
    with pytest.raises(Bug, match="lies at"):
        check(graph, replace(buffers, offsets=tuple(o + 8 for o in buffers.offsets)))


def test_scratch_of_one_handle_shares_with_no_other_of_it(ctr: tuple[Graph, Buffers]) -> None:
    graph, _ = ctr
    scratch = [Allocation(0, 100, 0), Allocation(0, 100, 1), Allocation(0, 5000, 0)]
    buffers = plan(graph, scratch)
    assert buffers.arena_bytes == buffers.separate_bytes == 2 * (HEADER + 128) + HEADER + 5056
    check(graph, buffers)


def test_deletion_is_eager_unless_told_otherwise(ctr: tuple[Graph, Buffers]) -> None:
    graph, _ = ctr
    assert staying(graph, eager=True) == frozenset()
    made = {n for h in graph.handles for n in h.makes()}
    all_stay = staying(graph, eager=False)
    assert all_stay and all(not graph.variables[n].persistable for n in all_stay) and all_stay <= made
    name = graph.variables[min(all_stay)].name
    assert {graph.variables[n].name for n in staying(graph, eager=True, kept={name})} >= {name}
