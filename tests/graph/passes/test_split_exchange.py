"""Large exchanges in parts: in no order among themselves, in order with everybody else, and with the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.property.networks import Feed, Network
from tests.property.oracle import assert_engine_equals_interpreter, copy_of, same_bits, started, value
from tests.support.capabilities import pretend_cores

import penstock as fluid
from penstock.errors import Bug
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.exchanges import fuse_exchanges, split_exchanges
from penstock.graph.ssa import Graph, Mode, OpHandle
from penstock.program.program import Program
from penstock.scope import Scope

SPLIT = PassChoice(matrix_kernels=False, reuse_buffers=False, inplace=False)
MODES: tuple[Mode, ...] = ("all_reduce", "reduce")


def wide(width: int = 600) -> Network:
    """Two layers: a weight of 1.4 MB, whose gradient is stored transposed, and small ones."""
    main, startup = Program(seed=7), Program(seed=7)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[width], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, width, act="tanh"), 2))
        fluid.optimizer.Adam(0.01).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        return {"x": np.random.default_rng(seed).normal(size=(rows, width)).astype("float32")}

    return Network("wide", main, startup, loss.name, feed)


def split(network: Network, mode: Mode, at_once: int) -> Graph:
    graph = split_exchanges(build_graph(network.main, mode=mode, num_replicas=2, active=2), network.main, at_once)
    check(graph)
    return graph


def parts(graph: Graph) -> list[OpHandle]:
    return [h for h in graph.handles if h.op.type.endswith("reduce_.part")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("at_once", "expected"), [(1, 0), (2, 2), (3, 3), (64, 5)])
def test_a_large_exchange_has_as_many_parts_as_run_at_once(mode: Mode, at_once: int, expected: int) -> None:
    graph = split(wide(), mode, at_once)
    found = parts(graph)
    assert len(found) == expected
    assert not any(a.index in b.before for a in found for b in found)
    assert len({tuple(sorted(h.before)) for h in found}) <= 1
    (sync,) = (s for s in graph.syncs if s.parameter == "fc_0.w_0")
    assert list(sync.handles)[-expected:] == [h.index for h in found][-expected:] or not expected


@pytest.mark.parametrize("mode", MODES)
def test_the_update_waits_for_every_part(mode: Mode) -> None:
    graph = split(wide(), mode, 3)
    updates = [
        h for h in graph.handles if ("fc_0.w_0", "fc_0.w_0@GRAD") in h.op.role_vars and h.op.role.name == "OPTIMIZE"
    ]
    assert updates
    for update in updates:
        assert {h.index for h in parts(graph)} <= ancestors(graph, update)


def ancestors(graph: Graph, handle: OpHandle) -> set[int]:
    """The handles that run before one."""
    found: set[int] = set()
    left = set(handle.before)
    while left:
        found |= left
        left = {b for i in left for b in graph.handles[i].before} - found
    return found


def trained(network: Network, start: Scope, mode: Mode, choice: PassChoice) -> tuple[Scope, int]:
    """Train three steps on two replicas; return the parameters, and how many parts the exchanges have."""
    scope = copy_of(start)
    core = DataParallel(
        network.main, ReplicaMemory(scope), mode=mode, num_replicas=2, num_threads=3, loss_name=network.loss,
        choice=choice,
    )  # fmt: skip
    for step, rows in enumerate((7, 1, 6)):
        core.run(network.feed(rows, step), [])
    count = len(parts(core.graph(2)))
    core.close()
    return scope, count


@pytest.mark.parametrize("mode", MODES)
def test_parts_change_no_bit(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 3)
    network = wide()
    start = started(network.startup)
    (whole, none), (cut, three) = (trained(network, start, mode, choice) for choice in (PLAIN, SPLIT))
    assert (none, three) == (0, 3)
    assert all(same_bits(value(cut, name), value(whole, name)) for name in start.names())


def test_the_engine_equals_the_interpreter_on_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 3)
    for mode in MODES:
        assert_engine_equals_interpreter(
            wide(), mode=mode, num_replicas=2, batches=(7, 1), choice=SPLIT, schedule_seeds=(0, 3), num_threads=3
        )


def test_the_checker_sees_parts_that_overlap() -> None:
    graph = split(wide(), "all_reduce", 2)
    first, second = parts(graph)
    second.op = replace(second.op, args=first.op.args)
    with pytest.raises(Bug, match=r"rule 2: .*part0.*part1"):
        check(graph)


def test_a_large_gradient_rides_in_no_bucket() -> None:
    network = wide()
    built = build_graph(network.main, mode="all_reduce", num_replicas=2, active=2)
    graph = fuse_exchanges(built, network.main, PassChoice().buckets)
    alone = [h for h in graph.handles if h.op.type == "penstock.all_reduce_.default"]
    assert [graph.variables[h.op.writes[0]].name for h in alone] == ["fc_0.w_0@GRAD"]
    assert sum(h.op.type == "penstock.fused_all_reduce_.default" for h in graph.handles) == 1
