"""Fused broadcasts: one for each owner at the end of the step, and the same results."""

from __future__ import annotations

import pytest
import torch
from tests.property.networks import ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, same_bits, started, value

from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.devices import build_device_graph
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.exchanges import fuse_broadcasts

FUSED = PassChoice(fuse_all_reduce=False, matrix_kernels=False, reuse_buffers=False, inplace=False, fuse_broadcast=True)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_each_owner_broadcasts_all_its_parameters_at_once(num_replicas: int) -> None:
    built = build_device_graph(ctr_dnn().main, mode="reduce", num_replicas=num_replicas, active=num_replicas)
    graph = fuse_broadcasts(built)
    check(graph)
    fused = [h for h in graph.handles if h.kind == "broadcast"]
    assert sorted(h.replica for h in fused) == list(range(num_replicas))
    for handle in fused:
        parameters = {p for p, owner in built.owners.items() if owner == handle.replica}
        others = [r for r in range(num_replicas) if r != handle.replica]
        assert set(handle.op.writes) == {f"{p}#{r}" for p in parameters for r in others}
    updates = [h.index for h in graph.handles if h.kind == "computation"]
    assert min(h.index for h in fused) > max(updates)


def test_a_graph_without_broadcasts_is_left_as_it_is() -> None:
    for graph in (
        build_graph(fit_a_line().main, mode="reduce", num_replicas=2, active=2),
        build_device_graph(fit_a_line().main, mode="all_reduce", num_replicas=2, active=2),
    ):
        assert fuse_broadcasts(graph) is graph


def test_copies_that_a_later_update_reads_are_not_fused() -> None:
    """With one active replica of three the gradients are copied to their owners; those copies stay where they are."""
    built = build_device_graph(ctr_dnn().main, mode="reduce", num_replicas=3, active=1)
    graph = fuse_broadcasts(built)
    check(graph)
    kept = {h.op.name for h in built.handles if h.op.type == "aten._to_copy.default"}
    assert kept
    assert kept <= {h.op.name for h in graph.handles}


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_does_not_change(num_replicas: int) -> None:
    network = ctr_dnn()
    start = started(network.startup)
    sides = []
    for choice in (PLAIN, FUSED):
        memory = ReplicaMemory(copy_of(start), (torch.device("cpu"),) * num_replicas)
        sides.append(
            DataParallel(
                network.main, memory, mode="reduce", num_replicas=num_replicas, num_threads=2,
                loss_name=network.loss, choice=choice,
            )
        )  # fmt: skip
    try:
        for number, rows in enumerate((6, 7, 1, 6)):
            losses = [core.run(network.feed(rows, number), [network.loss], schedule_seed=number)[0] for core in sides]
            assert all(same_bits(a, b) for a, b in zip(*losses, strict=True))
            for name in start.names():
                assert same_bits(value(sides[0].memory.scope, name), value(sides[1].memory.scope, name)), name
    finally:
        for core in sides:
            core.close()
