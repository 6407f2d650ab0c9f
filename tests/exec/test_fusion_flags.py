"""The fusion fields of a BuildStrategy and Fluid's flags for buckets: what they do, and that results stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.property.networks import NETWORKS, Network
from tests.property.oracle import copy_of, started, value

import penstock as fluid
from penstock.errors import SpecError
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.exec.pass_choice import refuse_on_gpus, settled, warn_of_fields_without_effect
from penstock.graph.passes import PassChoice
from penstock.program.program import Program
from penstock.scope import Scope

FIELDS = ("fuse_all_reduce_ops", "fuse_all_optimizer_ops", "sync_batch_norm")


@pytest.fixture(autouse=True)
def _two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")


def strategy(**fields: bool) -> fluid.BuildStrategy:
    build = fluid.BuildStrategy()
    for name, on in fields.items():
        setattr(build, name, on)
    return build


def run(network: Network, scope: Scope, build: fluid.BuildStrategy) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train three steps; return the scope's tensors, and the types of the operators."""
    executor = fluid.ParallelExecutor(False, network.loss, network.main, build_strategy=build, scope=scope)
    for step in range(3):
        executor.run([network.loss], network.feed(7, step))
    (plan, *_) = executor.core._plans.values()
    types = [h.op.type.split(".")[1] for h in plan.graph.handles]
    executor.close()
    return {name: value(scope, name).clone() for name in scope.names()}, types


@pytest.mark.parametrize("field", FIELDS)
def test_a_fusion_field_is_silent_and_does_what_it_says(field: str, caplog: pytest.LogCaptureFixture) -> None:
    network = NETWORKS["conv_net"]()
    start = started(network.startup)
    _, off = run(network, copy_of(start), strategy(**{field: False}))
    _, on = run(network, copy_of(start), strategy(**{field: True}))
    wanted = {"fuse_all_reduce_ops": "fused_all_reduce_", "fuse_all_optimizer_ops": "fused_sgd_"}
    assert wanted.get(field, "sync_batch_norm") in on
    assert wanted.get(field, "sync_batch_norm") not in off
    assert field not in caplog.text


def test_what_a_fused_update_would_not_make_can_be_fetched() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.fc(fluid.layers.fc(x, 3), 2).mean()
        fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    changes = [n for op in main.operators if op.role_vars and op.type == "aten.mul.Tensor" for n in op.output_names()]
    start = started(startup)
    found = []
    for on in (False, True):
        build = strategy(fuse_all_optimizer_ops=on)
        executor = fluid.ParallelExecutor(False, loss.name, main, build_strategy=build, scope=copy_of(start))
        found.append(executor.run(changes[:2], {"x": np.ones((6, 4), "float32")}))
        executor.run([], {"x": np.ones((6, 4), "float32")})
        types = [[h.op.type for h in plan.graph.handles] for plan in executor.core._plans.values()]
        assert ["penstock.fused_momentum_.default" in t for t in types] == [on, on]
        executor.close()
    for single, fused in zip(*found, strict=True):
        np.testing.assert_array_equal(single, fused)


@pytest.mark.parametrize("reduce", [False, True])
def test_fused_exchanges_and_updates_change_no_bit(reduce: bool) -> None:
    network = NETWORKS["ctr_dnn"]()
    start = started(network.startup)
    found = []
    for on in (False, True):
        build = strategy(fuse_all_reduce_ops=on, fuse_all_optimizer_ops=on)
        if reduce:
            build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        found.append(run(network, copy_of(start), build)[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_none_means_fused_exchanges_and_reads_true() -> None:
    build = fluid.BuildStrategy()
    assert build.fuse_all_reduce_ops is True
    assert "fuse_all_reduce_ops" not in repr(build)
    build.fuse_all_reduce_ops = False
    assert build.fuse_all_reduce_ops is False
    build.fuse_all_reduce_ops = None
    assert build.fuse_all_reduce_ops is True


@pytest.mark.parametrize(
    ("memory", "groups", "exchanges"), [(-1, -1, 1), (-1, 1, 5), (-1, 2, 3), (0.0001, -1, 3), (0.0625, -1, 1)]
)
def test_flags_limit_a_bucket_by_megabytes_and_layers(memory: float, groups: int, exchanges: int) -> None:
    network = NETWORKS["conv_net"]()
    fluid.set_flags({"FLAGS_fuse_parameter_memory_size": memory, "FLAGS_fuse_parameter_groups_size": groups})
    _, types = run(network, started(network.startup), fluid.BuildStrategy())
    assert sum(t in ("fused_all_reduce_", "all_reduce_") for t in types) == exchanges


def test_a_flag_that_is_no_number_is_refused_and_nothing_set() -> None:
    before = fluid.get_flags("FLAGS_fuse_parameter_memory_size")
    for wrong in ("much", "nan", "inf"):
        with pytest.raises(SpecError, match=rf"FLAGS_fuse_parameter_memory_size is '{wrong}'; expected a number"):
            fluid.set_flags({"FLAGS_fuse_parameter_memory_size": wrong})
    assert fluid.get_flags("FLAGS_fuse_parameter_memory_size") == before


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of fields without effect."""

    def lines() -> list[str]:
        return [line for line in caplog.messages if "has no effect" in line]

    return lines


def made(make: Callable[[], fluid.optimizer.Optimizer], build: fluid.BuildStrategy) -> None:
    """Make and close an executor for two layers."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.fc(fluid.layers.fc(x, 3), 2).mean()
        make().minimize(loss)
    fluid.ParallelExecutor(False, loss.name, main, build_strategy=build, scope=started(startup)).close()


def test_fused_exchanges_in_reduce_mode_warn_of_no_effect(
    warnings: Callable[[], list[str]],
) -> None:
    for build in (fluid.BuildStrategy(), strategy(fuse_all_reduce_ops=True), strategy(fuse_all_reduce_ops=True)):
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        made(lambda: fluid.optimizer.SGD(0.1), build)
    (line,) = warnings()
    assert "BuildStrategy.fuse_all_reduce_ops = True has no effect in Reduce mode" in line


def test_an_optimizer_that_no_rule_fuses_is_warned_of(warnings: Callable[[], list[str]]) -> None:
    for make in (lambda: fluid.optimizer.SGD(0.1), lambda: fluid.optimizer.Adam(0.1)):
        made(make, strategy(fuse_all_optimizer_ops=True))
    assert not warnings()
    made(lambda: fluid.optimizer.RMSProp(0.1), strategy(fuse_all_optimizer_ops=True))
    (line,) = warnings()
    assert "BuildStrategy.fuse_all_optimizer_ops = True has no effect on this program" in line


def test_what_devices_switch_off_is_named(warnings: Callable[[], list[str]]) -> None:
    program = Program(seed=1)
    build = strategy(memory_optimize=True, fuse_elewise_add_act_ops=True)
    memory = ReplicaMemory(Scope(), (torch.device("cpu"),) * 2)
    core = DataParallel(program, memory, mode="all_reduce", num_replicas=2)
    warn_of_fields_without_effect(build, program, core.mode, memory.devices)
    core.close()
    assert [line.split()[0] for line in warnings()] == [
        "BuildStrategy.fuse_elewise_add_act_ops", "BuildStrategy.memory_optimize",
    ]  # fmt: skip


@pytest.mark.parametrize(("num_cards", "asked", "fused"), [(1, False, True), (2, False, False), (2, True, True)])
def test_updates_are_fused_on_one_card_and_where_asked_for(num_cards: int, asked: bool, fused: bool) -> None:
    cards = tuple(torch.device("cuda", card) for card in range(num_cards))
    assert settled(PassChoice(fuse_optimizer=asked), devices=cards, at_once=1, intra_op=1).fuse_optimizer == fused


def test_batch_norm_over_several_gpus_is_refused_by_field_name() -> None:
    cards = (torch.device("cuda", 0), torch.device("cuda", 1))
    network = NETWORKS["conv_net"]().main
    build = strategy(sync_batch_norm=True)
    with pytest.raises(SpecError, match=r"BuildStrategy\.sync_batch_norm = True on several GPUs.*no CUDA kernels"):
        refuse_on_gpus(build, network, cards)
    refuse_on_gpus(build, network, cards[:1])
    refuse_on_gpus(build, network.clone(for_test=True), cards)
    refuse_on_gpus(fluid.BuildStrategy(), network, cards)


def test_flags_of_fluid_without_effect_are_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fluid.set_flags({"FLAGS_use_mkldnn": True, "FLAGS_fuse_parameter_memory_size": 2.0})
    fluid.set_flags({"FLAGS_use_mkldnn": False})
    assert caplog.messages == ["the flag FLAGS_use_mkldnn has no effect in Penstock"]
    wanted = {"FLAGS_use_mkldnn": False, "FLAGS_fuse_parameter_memory_size": 2.0, "FLAGS_rpc_deadline": None}
    assert fluid.get_flags(list(wanted)) == wanted
    fluid.set_flags({"FLAGS_communicator_send_queue_size": 5})
    assert "FLAGS_communicator_send_queue_size is read from the environment" in caplog.messages[1]
    for unknown in ("FLAGS_use_mkldn", "use_mkldnn"):
        with pytest.raises(SpecError, match=f"'{unknown}' has no effect"):
            fluid.set_flags({unknown: True})
        with pytest.raises(SpecError, match=f"'{unknown}' has no effect"):
            fluid.get_flags(unknown)
