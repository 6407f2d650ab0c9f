"""Steps on one GPU as CUDA graphs: they train as operator by operator does, and follow what changes between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.test_one_card import lenet
from tests.property.networks import Network, ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, started, value

import penstock as fluid
from penstock.compat.torch import ATTENTION_ON_CPU
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.native import card_kernels
from penstock.program.program import Program
from penstock.scope import Scope

pytestmark = pytest.mark.gpu
CARD = (torch.device("cuda", 0),)


def core_of(network: Network, scope: Scope, *, step_graphs: bool = True) -> DataParallel:
    return DataParallel(
        network.main, ReplicaMemory(scope, CARD), mode="all_reduce", num_replicas=1, loss_name=network.loss,
        step_graphs=step_graphs,
    )  # fmt: skip


def reasons(core: DataParallel) -> list[str]:
    """Why each plan is not captured, '' for those that are."""
    found = []
    for plan in core._plans.values():
        assert plan.step_graph is not None
        found.append(plan.step_graph.reason)
        assert plan.step_graph.reason or plan.step_graph.is_captured
    return found


def losses_of(core: DataParallel, network: Network, feeds: list[Any]) -> list[float]:
    return [float(core.run(feed, [network.loss])[0][0]) for feed in feeds]


@pytest.mark.parametrize("make", [lenet, fit_a_line, lambda: ctr_dnn("sgd"), lambda: ctr_dnn("adam")])
def test_replayed_steps_train_as_launched_ones_do(make: Any) -> None:
    network: Network = make()
    start, feeds = started(network.startup), [network.feed(32 if step % 3 else 7, step) for step in range(24)]
    sides = []
    for step_graphs in (False, True):
        core = core_of(network, scope := copy_of(start), step_graphs=step_graphs)
        try:
            sides.append((losses_of(core, network, feeds), scope))
            assert not step_graphs or reasons(core) == ["", ""]  # of both batch sizes
        finally:
            core.close()
    (wanted, launched), (got, replayed) = sides
    assert np.allclose(got, wanted, rtol=1e-5)
    for name in launched.names():
        left, right = value(launched, name), value(replayed, name)
        assert torch.allclose(left.double(), right.double(), rtol=1e-4, atol=1e-6), name


def test_a_parameter_set_between_steps_is_read_by_the_next_one() -> None:
    network = fit_a_line()
    core = core_of(network, scope := started(network.startup))
    feed = network.feed(16, 0)
    try:
        losses_of(core, network, [feed] * 4)
        saved = {name: value(scope, name).cpu().clone() for name in scope.names()}
        first = losses_of(core, network, [feed] * 3)
        for name, tensor in saved.items():
            scope.set(name, tensor)
        assert losses_of(core, network, [feed] * 3) == pytest.approx(first, rel=1e-6)
        assert reasons(core) == [""]
    finally:
        core.close()


def test_a_parameter_set_before_every_step_is_read_by_each() -> None:
    network = fit_a_line()
    sides = []
    for step_graphs in (False, True):
        core = core_of(network, scope := started(network.startup), step_graphs=step_graphs)
        parameter, found = network.main.parameters()[0].name, []
        try:
            for step in range(12):
                scope.set(parameter, torch.full_like(value(scope, parameter), 0.1 * step))
                found += losses_of(core, network, [network.feed(8, step)])
        finally:
            core.close()
        sides.append(found)
    assert np.allclose(sides[1], sides[0], rtol=1e-6)


def test_feeds_of_the_card_and_of_lists_are_read_in_each_step() -> None:
    network = fit_a_line()
    core = core_of(network, started(network.startup))
    try:
        feeds = [network.feed(8, step) for step in range(6)]
        plain = core_of(network, started(network.startup), step_graphs=False)
        wanted = losses_of(plain, network, feeds)
        plain.close()
        given = [
            {n: torch.as_tensor(v).cuda() if step % 2 else v.tolist() for n, v in feed.items()}
            for step, feed in enumerate(feeds)
        ]
        assert losses_of(core, network, given) == pytest.approx(wanted, rel=1e-6)
        assert reasons(core) == [""]
    finally:
        core.close()


@pytest.mark.parametrize("has_kernel", [True, False])
def test_dropout_draws_other_bits_in_each_replay(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernel:
        monkeypatch.setattr(card_kernels, "dropout_fault", lambda: "no compiler")
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4])
        hidden = fluid.layers.dropout(fluid.layers.fc(x, 8), 0.5)
        loss = fluid.layers.mean(fluid.layers.fc(hidden, 1))
        fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    network = Network("dropout", main, startup, loss.name, lambda rows, seed: {"x": np.ones((rows, 4), "float32")})
    start, feeds = started(startup), [network.feed(4, step) for step in range(6)]
    core, alone = (
        core_of(network, copy_of(start)),
        DataParallel(main, ReplicaMemory(copy_of(start)), mode="all_reduce", num_replicas=1, loss_name=loss.name),
    )
    try:
        found = losses_of(core, network, feeds)
        assert len(set(found)) == len(found)
        assert found == pytest.approx(losses_of(alone, network, feeds), rel=1e-4)  # the bits of the CPU kernel
        assert ("random" in reasons(core)[0]) == (not has_kernel)
    finally:
        core.close()
        alone.close()


def test_a_strategy_turns_graphs_off() -> None:
    network = fit_a_line()
    for allowed in (True, False):
        build = fluid.BuildStrategy()
        build.allow_cuda_graph_capture = allowed
        scope = started(network.startup)
        trainer = fluid.ParallelExecutor(True, network.loss, network.main, scope=scope, build_strategy=build)
        for step in range(4):
            trainer.run([network.loss], feed=network.feed(8, step))
        (plan,) = trainer.core._plans.values()
        assert (plan.step_graph is not None and plan.step_graph.is_captured) == allowed
        trainer.close()


@pytest.mark.parametrize("order", ["BHTD", "TBHD"])
@pytest.mark.parametrize("width", [8, 5])  # torch's memory-efficient kernel, and whole matrices of scores
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_on_a_card_is_that_of_the_cpu(width: int, is_causal: bool, order: str) -> None:
    random = torch.Generator().manual_seed(width)
    sizes = {"B": 2, "H": 3, "T": 6, "D": width}
    q, k, v, grad = (
        torch.randn([sizes[c] for c in order], generator=random).permute([order.index(c) for c in "BHTD"])
        for _ in range(4)
    )
    forward, backward = (getattr(torch.ops.aten, name) for name in ATTENTION_ON_CPU)
    out, sums = forward(q, k, v, 0.0, is_causal)
    wanted = (out, *backward(grad, q, k, v, out, sums, 0.0, is_causal))
    q, k, v, grad = (t.cuda() for t in (q, k, v, grad))
    out, sums = torch.ops.penstock.attention(q, k, v, 0.0, is_causal)
    got = (out, *torch.ops.penstock.attention_backward(grad, q, k, v, out, sums, 0.0, is_causal))
    for left, right in zip(got, wanted, strict=True):
        assert torch.allclose(left.cpu(), right, rtol=1e-4, atol=1e-5)
        assert left.stride() == right.stride()  # which recorded views count on


def test_the_check_for_nan_runs_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CHECK_NAN", "1")
    network = lenet()
    core = core_of(network, started(network.startup))
    try:
        assert np.isfinite(losses_of(core, network, [network.feed(4, 0)])).all()
        feed = network.feed(4, 1)
        feed["image"] = np.full_like(feed["image"], np.nan)
        with pytest.raises(fluid.errors.OperatorError, match=r"NaN|nan"):
            losses_of(core, network, [feed])
    finally:
        core.close()
