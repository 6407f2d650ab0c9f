"""On a GPU: programs train as on CPU, `use_cuda` counts cards, times are the card's. Run where a card is visible.

Tolerance 1e-4 of the largest value: sums in another order, kernels of another library; the random bits are the same.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from tests.property.networks import Feed, Network, ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, started, value

import penstock as fluid
from penstock import telemetry
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.native import card_kernels
from penstock.program.program import Program
from penstock.scope import Scope
from penstock.telemetry.unwatched import NullWatch, Unwatched

pytestmark = pytest.mark.gpu
STEPS = 20


def lenet() -> Network:
    """LeNet on images [1, 28, 28] of ten classes."""
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        image = fluid.layers.data(name="image", shape=[1, 28, 28])
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        found = image
        for filters in (6, 16):
            found = fluid.layers.conv2d(found, num_filters=filters, filter_size=5, act="relu")
            found = fluid.layers.pool2d(found, pool_size=2, pool_stride=2)
        found = fluid.layers.fc(fluid.layers.fc(found, 120, act="relu"), 84, act="relu")
        predicted = fluid.layers.fc(found, 10, act="softmax")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
        fluid.optimizer.Adam(learning_rate=1e-3).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        images = random.normal(size=(rows, 1, 28, 28)).astype("float32")
        return {"image": images, "label": random.integers(0, 10, (rows, 1))}

    return Network("lenet", main, startup, loss.name, feed)


def trained(network: Network, start: Scope, devices: tuple[torch.device, ...]) -> tuple[list[float], Scope]:
    """Train for STEPS; return the losses and the scope."""
    scope = copy_of(start)
    core = DataParallel(
        network.main, ReplicaMemory(scope, devices), mode="all_reduce", num_replicas=1, loss_name=network.loss
    )
    try:
        losses = [float(core.run(network.feed(32, step), [network.loss])[0][0]) for step in range(STEPS)]
    finally:
        core.close()
    return losses, scope


def assert_close(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    left, right = got.detach().cpu().double(), wanted.detach().cpu().double()
    assert float((left - right).abs().max()) <= 1e-4 * max(float(right.abs().max()), 1e-30), name


@pytest.mark.parametrize("make", [lenet, fit_a_line, lambda: ctr_dnn("sgd"), lambda: ctr_dnn("adam")])
def test_training_on_a_card_equals_training_on_cpu(make: object) -> None:
    network: Network = make()  # type: ignore[operator]  # a factory
    start = started(network.startup)
    wanted, on_cpu = trained(network, start, ())
    got, on_card = trained(network, start, (torch.device("cuda", 0),))
    assert np.allclose(got, wanted, rtol=1e-4)
    for name in on_cpu.names():
        assert value(on_card, name).is_cuda or value(on_card, name) is value(start, name)
        assert_close(value(on_card, name), value(on_cpu, name), name)


def test_use_cuda_takes_every_visible_card() -> None:
    network = fit_a_line()
    fluid.Executor(fluid.CUDAPlace(0)).run(network.startup, scope=(scope := Scope()))
    trainer = fluid.ParallelExecutor(True, network.loss, network.main, scope=scope)
    try:
        assert trainer.device_count == torch.cuda.device_count() == len(fluid.cuda_places())
        (loss,) = trainer.run([network.loss], feed=network.feed(8 * trainer.device_count, 0))
        assert loss.shape == (trainer.device_count,)
    finally:
        trainer.close()


def test_cuda_visible_devices_restricts_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    script = "import penstock as fluid; print(len(fluid.cuda_places()))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize("make", [lenet, ctr_dnn])
def test_an_executor_on_a_card_equals_one_on_cpu(make: object) -> None:
    network: Network = make()  # type: ignore[operator]  # a factory
    start = started(network.startup)
    sides = []
    for place in (fluid.CPUPlace(), fluid.CUDAPlace(0)):
        executor, scope = fluid.Executor(place), copy_of(start)
        sides.append(
            [executor.run(network.main, network.feed(16, s), [network.loss], scope=scope)[0] for s in range(STEPS)]
        )
    assert np.allclose(sides[0], sides[1], rtol=1e-4)


def test_initial_values_on_a_card_have_the_bits_of_those_on_cpu() -> None:
    network = ctr_dnn()
    scopes = []
    for place in (fluid.CPUPlace(), fluid.CUDAPlace(0)):
        fluid.Executor(place).run(network.startup, scope=(scope := Scope()))
        scopes.append(scope)
    for name in scopes[0].names():
        assert value(scopes[1], name).is_cuda
        assert torch.equal(value(scopes[1], name).cpu(), value(scopes[0], name)), name


@pytest.mark.parametrize("name", ["dropout", "card_dropout"])
def test_dropout_draws_the_bits_of_the_cpu_kernel(name: str) -> None:
    assert not card_kernels.dropout_fault()
    for shape, batch_dim, rows in (((64, 130), 0, 1), ((3, 16, 5), 1, 2), ((4096,), -1, 1)):
        x, rng = torch.randn(shape), torch.tensor([5, 2**33 + 1, 7])
        settings = (0.3, True, 11, batch_dim, rows)
        wanted = torch.ops.penstock.dropout(x, rng, *settings)
        got = getattr(torch.ops.penstock, name)(x.cuda(), rng, *settings)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))


class _Watching(NullWatch):
    """A watch that takes everything and sends nothing."""

    is_watched = True


class _Session(Unwatched):
    """A session whose executors are watched."""

    def watch(self, *_: object, **__: object) -> NullWatch:
        return _Watching()


@pytest.mark.parametrize("step_graphs", [False, True])
def test_times_are_the_cards_and_add_up_to_less_than_the_step(
    step_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "session", _Session)
    network = lenet()
    memory = ReplicaMemory(started(network.startup), (torch.device("cuda", 0),))
    core = DataParallel(
        network.main, memory, mode="all_reduce", num_replicas=1, loss_name=network.loss, step_graphs=step_graphs
    )
    try:
        for step in range(6):
            torch.cuda.synchronize()
            began, began_ns = time.perf_counter_ns(), time.time_ns()
            core.run(network.feed(64, step), [network.loss])
            torch.cuda.synchronize()
            wall_ns = time.perf_counter_ns() - began
            (plan,) = core._plans.values()
            replayed = plan.step_graph is not None and plan.step_graph.is_captured
            assert replayed == (step_graphs and step >= 2)
            core._harvest(waits=True)
            events = core._times.drain()  # type: ignore[union-attr]  # it is watched
            assert sorted(events["op"]) == [handle.index for handle in plan.graph.handles]
            assert set(events["step"]) == {core.last_step}
            assert 0 < int(events["duration_ns"].astype(np.int64).sum()) < wall_ns
            assert (events["start_ns"] >= began_ns).all()
            assert (events["start_ns"] < began_ns + wall_ns).all()
    finally:
        core.close()
