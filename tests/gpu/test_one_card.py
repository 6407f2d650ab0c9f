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
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.program.program import Program
from penstock.scope import Scope

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


def test_dropout_draws_the_bits_of_the_cpu_kernel() -> None:
    x, rng = torch.randn(64, 130), torch.tensor([5, 2, 7])
    wanted = torch.ops.penstock.dropout(x, rng, 0.3, True, 11, 0, 1)
    got = torch.ops.penstock.dropout(x.cuda(), rng, 0.3, True, 11, 0, 1)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))


def test_times_are_the_cards_and_add_up_to_less_than_the_step() -> None:
    network = lenet()
    memory = ReplicaMemory(started(network.startup), (torch.device("cuda", 0),))
    core = DataParallel(network.main, memory, mode="all_reduce", num_replicas=1, loss_name=network.loss)
    try:
        for step in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            core.run(network.feed(64, step), [network.loss])
            torch.cuda.synchronize()
            wall_ns = time.perf_counter_ns() - began
        (streams,) = [p.streams for p in core._plans.values()]
        assert streams is not None
        events = streams.events()
        assert events is not None
        assert len(events["op"]) == len(core.graph(1).handles)
        assert 0 < int(events["duration_ns"].astype(np.int64).sum()) < wall_ns
    finally:
        core.close()
