"""Buckets of gradients: one exchange for several, at the same values, and never past who reads one of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from tests.property.networks import NETWORKS, Network, fit_a_line
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, Buckets, PassChoice, run_graph_passes
from penstock.graph.passes.exchanges import fuse_exchanges
from penstock.graph.ssa import Graph, Mode
from penstock.program.program import Program

FUSED = PassChoice(matrix_kernels=False, reuse_buffers=False, inplace=False)


def fused(network: Network, buckets: Buckets = Buckets(), *, mode: Mode = "all_reduce", replicas: int = 2) -> Graph:  # noqa: B008 - frozen
    built = build_graph(network.main, mode=mode, num_replicas=replicas, active=replicas)
    graph = fuse_exchanges(built, network.main, buckets)
    check(graph)
    return graph


def exchanges(graph: Graph) -> list[list[str]]:
    """The gradients of each exchange of dense ones, in order."""
    found = [h.op.writes for h in graph.handles if h.kind == "all_reduce"]
    return [list(dict.fromkeys(graph.variables[k].name for k in keys)) for keys in found]


@pytest.mark.parametrize("name", NETWORKS)
def test_buckets_change_no_bit(name: str) -> None:
    for replicas in (2, 3):
        assert_passes_keep_results(NETWORKS[name](), FUSED, mode="all_reduce", num_replicas=replicas, batches=(7, 1))


@pytest.mark.parametrize("buckets", [Buckets(num_bytes=256), Buckets(num_layers=1)])
def test_small_buckets_change_no_bit(buckets: Buckets) -> None:
    choice = replace(FUSED, buckets=buckets)
    assert_passes_keep_results(NETWORKS["ctr_dnn"](), choice, mode="all_reduce", num_replicas=2, batches=(7, 1))


def test_without_limits_all_gradients_travel_together() -> None:
    network = NETWORKS["transformer"]()
    (together,) = exchanges(fused(network))
    alone = exchanges(build_graph(network.main, mode="all_reduce", num_replicas=2, active=2))
    assert len(alone) == 12
    assert together == [name for names in alone for name in names]


def test_a_bucket_is_full_at_its_bytes() -> None:
    network = NETWORKS["transformer"]()
    found = exchanges(fused(network, Buckets(num_bytes=256)))
    assert 1 < len(found) < 12
    for names in found[:-1]:
        whole = [_bytes(network.main, n) for n in names]
        assert sum(whole) >= 256 > sum(whole[:-1])


def test_a_bucket_is_full_at_its_layers() -> None:
    found = exchanges(fused(NETWORKS["conv_net"](), Buckets(num_layers=1)))
    assert [{n.rpartition(".")[0] for n in names} for names in found] == [
        {"sequential_0.8"}, {"sequential_0.5"}, {"sequential_0.3"}, {"sequential_0.1"}, {"sequential_0.0"},
    ]  # fmt: skip


def test_a_bucket_is_exchanged_where_its_last_gradient_is_made() -> None:
    graph = fused(NETWORKS["conv_net"](), Buckets(num_layers=2))
    found = [h for h in graph.handles if h.op.type == "penstock.fused_all_reduce_.default"]
    for handle in found:
        last = handle.op.writes[-1]
        maker = max(h.index for h in graph.handles[: handle.index] if last in h.makes())
        assert all(graph.handles[i].kind == "all_reduce" for i in range(maker + 1, handle.index))
    assert len(found) == 2


def test_gradients_of_two_types_travel_apart() -> None:
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        narrow = fluid.layers.fc(x, 3)
        wide = fluid.layers.fc(fluid.layers.cast(narrow, "float64"), 2)
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(wide))
    graph = run_graph_passes(build_graph(main, mode="all_reduce", num_replicas=2, active=2), main, FUSED)
    check(graph)
    kinds = [{main.variables[n].dtype for n in names} for names in exchanges(graph)]
    assert sorted(map(sorted, kinds)) == [["float32"], ["float64"]]


def test_sparse_gradients_stay_gathered() -> None:
    network = NETWORKS["ctr_dnn"]()
    graph = fused(network)
    sparse = {s.gradient for s in graph.syncs if s.sparse}
    assert len(sparse) == 2
    assert not sparse & {name for names in exchanges(graph) for name in names}
    assert [h.op.name for h in graph.handles if h.kind == "gather"] == [
        h.op.name for h in build_graph(network.main, mode="all_reduce", num_replicas=2, active=2).handles
        if h.kind == "gather"
    ]  # fmt: skip


def test_who_reads_an_exchanged_gradient_closes_its_bucket() -> None:
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        hidden = fluid.layers.fc(x, 3)
        loss = fluid.layers.mean(fluid.layers.fc(hidden, 2))
        pairs = fluid.backward.append_backward(loss)
        # Between the gradients of the last layer, which are made first, and those of the first.
        last = [g for p, g in pairs if p.name.startswith("fc_1")]
        doubled = last[0] * 2.0
    at = next(i for i, op in enumerate(main.operators) if last[0].name in (*op.output_names(), *op.writes)) + 1
    reader = main.operators.pop()
    while any(p.startswith("fc_1") for op in main.operators[at:] for p, _ in op.role_vars):
        at += 1
    main.operators.insert(at, reader)
    built = build_graph(main, mode="all_reduce", num_replicas=2, active=2)
    graph = fuse_exchanges(built, main, Buckets())
    check(graph)
    assert [{n.partition(".")[0] for n in names} for names in exchanges(graph)] == [{"fc_1"}, {"fc_0"}]
    position = {h.op.name: h.index for h in graph.handles}
    first = next(h.index for h in graph.handles if h.kind == "all_reduce")
    assert first < position[reader.name]
    assert doubled.name in reader.output_names()


def test_clipping_sees_the_exchanged_gradients() -> None:
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, 3), 2))
        clip = fluid.clip.GradientClipByGlobalNorm(0.01)
        fluid.optimizer.SGD(0.5, grad_clip=clip).minimize(loss)
    network = Network("clipped", main, startup, loss.name, lambda rows, seed: {"x": _rows(rows, seed)})
    assert_passes_keep_results(network, FUSED, mode="all_reduce", num_replicas=2)


def test_every_process_makes_the_same_buckets() -> None:
    texts = {str([(h.op, sorted(h.before)) for h in fused(fit_a_line()).handles]) for _ in range(3)}
    assert len(texts) == 1


def test_a_bucket_takes_gradients_where_they_were_made() -> None:
    network = NETWORKS["transformer"]()
    built = build_graph(network.main, mode="all_reduce", num_replicas=2, active=2)
    graph = fused(network)
    assert graph.variables == built.variables
    makers = [h.op for h in built.handles if h.kind != "all_reduce"]
    assert [h.op for h in graph.handles if h.kind != "all_reduce"] == makers


def test_fusion_is_off_in_reduce_mode_and_on_one_replica() -> None:
    network = NETWORKS["conv_net"]()
    for mode, replicas in (("reduce", 2), ("all_reduce", 1)):
        plain = build_graph(network.main, mode=mode, num_replicas=replicas, active=replicas)  # type: ignore[arg-type]  # literals
        assert [h.op for h in run_graph_passes(plain, network.main, FUSED).handles] == [h.op for h in plain.handles]
    assert not PLAIN.fuse_all_reduce


def _bytes(program: Program, name: str) -> int:
    sizes = [int(str(d)) for d in program.variables[name].shape]
    return 4 * math.prod(sizes)


def _rows(rows: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
