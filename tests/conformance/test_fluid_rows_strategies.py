"""Rows 17, 18, 34 to 43 and 83 of the parity table: what the fields of the strategies do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.dot_grammar import read_dot
from tests.conformance.trainers import MODES, Trainers, assert_near, persistables
from tests.property.networks import Network, conv_net, ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, same_bits, started, value
from tests.support.capabilities import pretend_cores

import penstock as fluid
from penstock.errors import SpecError
from penstock.graph.check import check
from penstock.scope import Scope

Scale = fluid.BuildStrategy.GradientScaleStrategy


def trained(trainers: Trainers, network: Network, start: Scope, **fields: Any) -> dict[str, Any]:
    """Train two replicas for four steps from a copy of `start`; return what is kept."""
    scope = copy_of(start)
    executor = trainers(network, scope, **fields)
    for step in range(4):
        executor.run([], network.feed(6 - step, step))
    return persistables(network.main, scope)


def test_row_17_the_build_strategy_selects_the_mode(trainers: Trainers) -> None:
    strategy = fluid.BuildStrategy()
    assert strategy.reduce_strategy == fluid.BuildStrategy.ReduceStrategy.AllReduce
    strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    assert strategy.reduce_strategy == fluid.BuildStrategy.ReduceStrategy.Reduce
    modes = [trainers(fit_a_line(), mode=mode).core.graph(2).mode for mode in MODES]
    assert modes == ["all_reduce", "reduce"]


@pytest.mark.parametrize("mode", MODES)
def test_row_18_the_initial_gradient_is_a_share_one_or_fed(mode: str, trainers: Trainers) -> None:
    """Four replicas, equal shares: gradients in the ratio 1/4 : 1 : what is fed."""
    network = fit_a_line()
    feed = network.feed(8, 0)
    name = f"{network.loss}@GRAD"
    fed = {name: np.full(4, 3.0, "float32")}
    updates = []
    for scale, given in ((Scale.CoeffNumDevice, {}), (Scale.One, {}), (Scale.Customized, fed)):
        executor = trainers(network, replicas=4, mode=mode, gradient_scale_strategy=scale)
        kinds = {h.kind for h in executor.core.graph(4).handles}
        assert ("scale_loss_grad" in kinds) == (scale != Scale.Customized)
        check(executor.core.graph(4))
        scope = executor.core.memory.scope
        before = value(scope, "fc_0.b_0").clone()
        executor.run([network.loss], feed | given)
        updates.append((before - value(scope, "fc_0.b_0")).item())  # by SGD: the gradient times a rate
    share, one, custom = updates
    np.testing.assert_allclose([share / one, custom / one], [1 / 4, 3.0], rtol=1e-5)


def test_row_34_scopes_are_dropped_by_hand(trainers: Trainers) -> None:
    network = fit_a_line()
    executor = trainers(network)
    seen = [executor._need_create_local_exe_scopes()]
    executor.run([], network.feed(4, 0))
    seen.append(executor._need_create_local_exe_scopes())
    executor.drop_local_exe_scopes()
    seen.append(executor._need_create_local_exe_scopes())
    assert seen == [True, False, True]
    assert executor.run([network.loss], network.feed(4, 1))[0].shape == (2,)


def test_row_36_allow_op_delay_is_accepted_and_changes_nothing(trainers: Trainers) -> None:
    network = ctr_dnn()
    start = started(network.startup)
    assert fluid.ExecutionStrategy().allow_op_delay is False
    plain, delayed = (trained(trainers, network, start, allow_op_delay=delay) for delay in (False, True))
    assert all(same_bits(plain[name], delayed[name]) for name in plain)


def drawings(path: Path) -> dict[str, str]:
    """The files of one executor, by their kind."""
    return {f.name.removeprefix("net_").removesuffix("_graph"): f.read_text() for f in path.parent.iterdir()}


@pytest.mark.parametrize("mode", MODES)
def test_row_41_three_dot_files_are_written_and_parse(mode: str, trainers: Trainers, tmp_path: Path) -> None:
    network = conv_net()
    executor = trainers(network, mode=mode, debug_graphviz_path=str(tmp_path / "net"), fuse_all_reduce_ops=False)
    executor.run([], network.feed(4, 0))
    files = drawings(tmp_path / "net")
    assert files.keys() == {"original", "fused", "multi_devices"}
    drawn = {kind: read_dot(text) for kind, text in files.items()}
    operators = {kind: [n for n in d.nodes if n.startswith("op ")] for kind, d in drawn.items()}
    assert len(operators["original"]) == len(network.main.operators)
    assert len(operators["multi_devices"]) == len(executor.core.graph(2).handles)
    whole = drawn["multi_devices"]
    assert all(f"op {h.index}" in whole.frames[f"cluster_replica_{h.replica}"] for h in executor.core.graph(2).handles
               if h.replica >= 0)  # fmt: skip
    arrows = {(a, b) for a, b, _ in whole.edges if a.startswith("op ") and b.startswith("op ")}
    assert arrows == {(f"op {a}", f"op {b}") for a, b in executor.core.graph(2).edges()}
    addmm = next(n for n in whole.nodes.values() if "addmm" in n.get("label", ""))
    assert "networks.py:" in addmm["tooltip"]
    executor.run([], network.feed(5, 0))  # other sizes: drawn once
    assert drawings(tmp_path / "net") == files


def test_row_41_names_with_quotes_and_backslashes_are_escaped(trainers: Trainers, tmp_path: Path) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name='a "b" \\ c', shape=[2])
        loss = fluid.layers.mean(x * 2.0)
    network = Network("odd", main, startup, loss.name, lambda rows, _: {x.name: np.ones((rows, 2), "float32")})
    trainers(network, program=main, debug_graphviz_path=str(tmp_path / "net")).run([], network.feed(2, 0))
    nodes = read_dot(drawings(tmp_path / "net")["original"]).nodes
    assert nodes['var a "b" \\ c#0']["label"] == 'a "b" \\ c'


def test_row_41_an_unwritable_path_is_named_before_the_run(trainers: Trainers, tmp_path: Path) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    before = persistables(network.main, scope)
    executor = trainers(network, scope, debug_graphviz_path=str(tmp_path / "missing" / "net"))
    with pytest.raises(SpecError, match=r"debug_graphviz_path is '.*missing/net', where no file can be written: "):
        executor.run([], network.feed(4, 0))
    assert_near(persistables(network.main, scope), before, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_row_42_sequential_execution_keeps_the_programs_order(mode: str, trainers: Trainers) -> None:
    """By the engine's own trace: begin of an operator after the end of the one before, replica by replica."""
    network = ctr_dnn()
    start = started(network.startup)
    executor = trainers(network, copy_of(start), mode=mode, enable_sequential_execution=True)
    executor.run([], network.feed(6, 0))
    executor.core.engine.drain()
    executor.run([], network.feed(6, 1))
    events = executor.core.engine.drain()
    (lowered,) = executor.core._plans.values()
    ends = dict(zip(events["op"].tolist(), (events["start_ns"] + events["duration_ns"]).tolist(), strict=True))
    starts = dict(zip(events["op"].tolist(), events["start_ns"].tolist(), strict=True))
    for replica in range(2):
        mine = [h.index for h in lowered.graph.handles if h.replica == replica]
        assert len(mine) > 20
        assert all(starts[b] >= ends[a] for a, b in itertools.pairwise(mine))
    found = [trained(trainers, network, start, mode=mode, enable_sequential_execution=on) for on in (False, True)]
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


def residual() -> Network:
    """Layers with a sum in front of each activation, trained by SGD: what every fusion finds something in."""
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 3
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[6])
        hidden = fluid.layers.fc(x, 6, act="relu")
        hidden = torch.relu(fluid.layers.fc(hidden, 6) + hidden)
        loss = fluid.layers.mean(fluid.layers.fc(hidden, 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
    return Network("residual", main, startup, loss.name, _some_rows)


def _some_rows(rows: int, seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, 6)).astype("float32")}


def compiled(trainers: Trainers, start: Scope, **fields: Any) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Train `residual` for four steps; return what is kept, the types of the operators that run, and the plan."""
    network = residual()
    scope = copy_of(start)
    executor = trainers(network, scope, **fields)
    for step in range(4):
        executor.run([], network.feed(6, step))
    (lowered,) = executor.core._plans.values()
    (plan,) = executor.statistics()["plans"]
    return persistables(network.main, scope), [h.op.type for h in lowered.graph.handles], plan


FUSIONS = [
    ("fuse_all_reduce_ops", "AllReduce", "fused_all_reduce_"),
    ("fuse_all_optimizer_ops", "AllReduce", "fused_sgd_"),
    ("fuse_all_optimizer_ops", "Reduce", "fused_sgd_"),
    ("fuse_elewise_add_act_ops", "AllReduce", "add_act"),
    ("fuse_elewise_add_act_ops", "Reduce", "add_act"),
]


@pytest.mark.parametrize(("flag", "mode", "fused"), FUSIONS)
def test_row_43_a_fusion_changes_the_graph_and_not_the_result(
    flag: str, mode: str, fused: str, trainers: Trainers
) -> None:
    """A fused kernel may round otherwise: 1e-6."""
    start = started(residual().startup)
    plain, without, _ = compiled(trainers, start, mode=mode, **{flag: False})
    changed, operators, _ = compiled(trainers, start, mode=mode, **{flag: True})
    assert not any(fused in name for name in without)
    assert any(fused in name for name in operators)
    assert len(operators) < len(without)
    assert_near(plain, changed, 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("flag", "figure"), [("memory_optimize", "arena_bytes"), ("enable_inplace", "in_place")])
def test_row_43_a_memory_flag_changes_the_plan_and_no_bit(
    flag: str, figure: str, mode: str, trainers: Trainers
) -> None:
    start = started(residual().startup)
    (on, graph, plan), (off, same_graph, apart) = (
        compiled(trainers, start, mode=mode, **{flag: value}) for value in (True, False)
    )
    assert graph == same_graph
    assert plan[figure] != apart[figure]
    assert all(same_bits(on[name], off[name]) for name in on)


IDLE: dict[str, Any] = {
    "fuse_bn_act_ops": True,
    "fuse_relu_depthwise_conv": True,
    "enable_auto_fusion": True,
    "fuse_broadcast_ops": True,
    "cache_runtime_context": True,
    "remove_unnecessary_lock": False,
    "enable_backward_optimizer_op_deps": False,
    "mkldnn_enabled_op_types": {"conv2d"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flag", IDLE)
def test_row_43_flags_without_effect_are_accepted_with_a_warning(
    flag: str, mode: str, trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    start = started(residual().startup)
    plain, without, _ = compiled(trainers, start, mode=mode)
    changed, operators, _ = compiled(trainers, start, mode=mode, **{flag: IDLE[flag]})
    assert f"BuildStrategy.{flag}" in caplog.text
    assert operators == without
    assert all(same_bits(plain[name], changed[name]) for name in plain)


@pytest.mark.parametrize("cores", [2, 4])
def test_row_83_best_practice_runs_one_operator_a_replica_core(
    cores: int, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_threads = CPU_NUM = cores, Reduce: as many run at once, each on one core, on one copy of the parameters."""
    pretend_cores(monkeypatch, cores)
    network = ctr_dnn()
    executor = trainers(network, replicas=cores, mode="Reduce", num_threads=cores)
    losses = [executor.run([network.loss], network.feed(32, 0))[0].mean() for _ in range(20)]
    core = executor.core
    assert (core.num_replicas, core.num_threads, core.max_running, core.intra_op_threads) == (cores, cores, cores, 1)
    assert core.graph(cores).mode == "reduce"
    assert losses[-1] < losses[0]
