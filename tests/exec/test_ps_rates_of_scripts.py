"""Learning rates that scripts compute of schedules and of counters: on servers to the bit as in an Executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.exec.ps_network import Local, Network, feeds, network, serve
from tests.transpile.recorded import Recorded, batch, tower, transpiled

import penstock as fluid
from penstock.errors import FetchError, ProgramError
from penstock.exec.fetching import fetch_names
from penstock.program.ir import Role
from penstock.program.training.schedules import decay_step_counter
from penstock.ps.remote import PsMode

L: Any = fluid.layers
STEPS = 4


def assigned(step: Any = None) -> Any:
    """A number that branches assign: a line, then a schedule."""
    rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
    step = decay_step_counter() if step is None else step
    with L.Switch() as switch:
        with switch.case(step < 2):
            L.assign(0.1 * ((step + 1.0) / 2), rate)
        with switch.default():
            L.assign(L.polynomial_decay(0.1, 10, 0.0, 1.0), rate)
    return rate


RATES: dict[str, Callable[[], Any]] = {
    "a multiple": lambda: L.noam_decay(4, 2) * 2,
    "a sum": lambda: L.piecewise_decay([2], [0.1, 0.02]) + 0.01,
    "warm-up": lambda: L.linear_lr_warmup(L.noam_decay(4, 2) * 2, 2, 0.0, 0.1),
    "scale": lambda: L.scale(L.cosine_decay(0.1, 2, 3), 0.5),
    "Switch": assigned,
    "a counter of its own": lambda: assigned(L.cast(L.autoincreased_step_counter(begin=0), "float32")),
    "a constant": lambda: L.fill_constant([1], "float32", 0.1),
}


def _made(rate: str) -> Network:
    return network.__wrapped__(lambda: fluid.optimizer.Adam(RATES[rate]()), is_sparse=True)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("mode", "together"), [("sync", False), ("async", False), ("async", True)])
def test_servers_follow_the_rates_that_a_script_computes(rate: str, mode: PsMode, together: bool) -> None:
    net = _made(rate)
    local, servers = Local(net), serve(net, 2, mode)
    for feed in feeds(STEPS, net.dtype):
        sent = local.step(feed)
        if mode == "sync":
            servers.begin_round()
        for parameter, tensors in sent.items():
            servers.push(parameter, tensors, together=together)
        for parameter in ("table", "weight"):
            assert torch.equal(servers.value(parameter), local.value(parameter))


def test_a_trainer_has_no_operator_of_a_rate_it_does_not_read() -> None:
    recorded = tower(lambda: fluid.optimizer.SGD(assigned()))
    transpiled(recorded)
    assert not any(op.role & Role.LR_SCHED for op in recorded.main.operators)
    assert not {"rate", "polynomial_decay_0.learning_rate", "@LR_DECAY_COUNTER@"} & recorded.main.variables.keys()
    with pytest.raises(FetchError, match=r"'rate' .* computed by the parameter servers; a trainer has none"):
        fetch_names(recorded.main, ["rate"])


def test_a_test_program_made_before_transpile_computes_rates() -> None:
    cloned: list[Any] = []

    def scheduled() -> Any:
        rate = assigned(L.cast(L.autoincreased_step_counter(begin=0), "float32"))
        cloned.append(fluid.default_main_program().clone(for_test=True))
        return fluid.optimizer.SGD(rate)

    recorded, scope, exe = tower(scheduled, is_sparse=False), fluid.Scope(), fluid.Executor()
    transpiled(recorded)
    recorded.startup.operators[:] = [op for op in recorded.startup.operators if not op.role & Role.RPC]
    exe.run(recorded.startup, scope=scope)
    found = [exe.run(cloned[0], batch(), ["rate", recorded.loss], scope=scope) for _ in range(2)]
    np.testing.assert_allclose([np.ravel(rate) for rate, _ in found], [[0.05], [0.1]], rtol=1e-6)


def test_a_rate_that_the_forward_pass_reads_runs_on_both_sides() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        rate = L.exponential_decay(1.0, 1, 0.5) * 2
        shown = rate + 1.0
        loss = L.mean(L.fc(L.data("x", [4]), 1, param_attr="w", bias_attr=False))
        fluid.optimizer.SGD(rate).minimize(loss)
    made = transpiled(Recorded(main, startup, loss.name))
    endpoint = made.placement.of_parameter("w")[0].endpoint
    assert {"aten_pow_0", "aten_mul_1"} <= {op.name for op in made.get_pserver_program(endpoint).block(1).operators}
    local = main.clone()
    local.operators[:] = [
        op
        for op in main.operators
        if op.role & Role.LR_SCHED or {"aten_mul_1.tmp_0", shown.name} & {*op.output_names()}
    ]
    first, state = fluid.Program(), {"@LR_DECAY_COUNTER@": -1, "exponential_decay_0.learning_rate": 0}
    with fluid.program_guard(first, first):
        for name, value in state.items():
            L.create_global_var([], value, main.variables[name].dtype, persistable=True, name=name)
    assert state.keys() <= startup.variables.keys()
    exe = fluid.Executor()
    exe.run(first, scope=scope)
    found = [float(np.asarray(exe.run(local, {}, [shown.name], scope=scope)[0]).item()) for _ in range(2)]
    assert found == [3.0, 2.0]


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_a_trainers_test_program_has_a_loss_times_a_rate(mode: str) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        rate = L.exponential_decay(1.0, 1, 0.5) * 2
        loss = L.mean(L.fc(L.data("x", [4]), 1, param_attr="w", bias_attr=False)) * rate
        fluid.optimizer.SGD(rate).minimize(loss)
    asked = {} if mode == "sync" else {"sync_mode": False, "geo_sgd_mode": True}
    before = main.clone(for_test=True)
    transpiled(Recorded(main, startup, loss.name), **asked)
    test = main.clone(for_test=True)
    assert loss.name in test.variables
    assert [op.name for op in test.operators] == [op.name for op in before.operators]


def test_in_geo_trainers_compute_rates_of_what_they_have() -> None:
    def of_inputs() -> Any:
        rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        L.assign(L.reshape(L.reduce_mean(fluid.default_main_program().global_block().var("y")), [1]), rate)
        return fluid.optimizer.SGD(rate)

    recorded = tower(of_inputs)
    before = recorded.main.clone()
    made = transpiled(recorded, sync_mode=False, geo_sgd_mode=True)
    own = {op.name: op for op in recorded.main.operators}
    assert [own[op.name] for op in before.operators] == before.operators
    for endpoint in made.placement.endpoints:
        assert "rate" not in made.get_pserver_program(endpoint).variables


def test_a_rate_that_changes_after_its_update_is_refused() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        rate = L.create_global_var([1], 0.1, "float32", persistable=True, name="rate")
        loss = L.mean(L.fc(L.data("x", [4]), 1, param_attr="w", bias_attr=False))
        fluid.optimizer.SGD(rate).minimize(loss)
        L.assign(rate * 0.5, rate)
    with pytest.raises(ProgramError, match=r"changes 'rate' after the update .* Change it before minimize"):
        transpiled(Recorded(main, startup, loss.name))
    assert transpiled(Recorded(main, startup, loss.name), sync_mode=False, geo_sgd_mode=True)


def test_a_rate_of_a_list_is_refused_with_what_to_use() -> None:
    def of_a_list() -> Any:
        rates = L.assign(np.array([0.1, 0.05, 0.01], "float32"))
        step = L.reshape(L.cast(L.autoincreased_step_counter(begin=0), "int64"), [1])
        rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        L.assign(L.gather(rates, step), rate)
        return fluid.optimizer.SGD(rate)

    text = r"computes a learning rate of '.*', which is no single number; .* Use fluid\.layers\.piecewise_decay"
    with pytest.raises(ProgramError, match=text):
        transpiled(tower(of_a_list))


def test_a_rate_of_the_data_is_refused_when_transpiling() -> None:
    def of_inputs() -> Any:
        rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        L.assign(L.reshape(L.reduce_mean(fluid.default_main_program().global_block().var("y")), [1]), rate)
        return fluid.optimizer.SGD(rate)

    recorded = tower(of_inputs)
    before = str(recorded.main)
    with pytest.raises(ProgramError, match=r"computes a learning rate of 'y', an input\..*fluid.layers.noam_decay"):
        transpiled(recorded)
    assert str(recorded.main) == before


@pytest.mark.parametrize("factor", [None, 2.0])
def test_a_rate_that_is_fed_is_refused_when_transpiling(factor: float | None) -> None:
    def fed() -> Any:
        rate = fluid.data("rate", [1], "float32")
        return fluid.optimizer.Adam(rate if factor is None else rate * factor)

    with pytest.raises(ProgramError, match=r"computes a learning rate of 'rate', an input\..*fluid.layers.noam_decay"):
        transpiled(tower(fed))
