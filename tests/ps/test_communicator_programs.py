"""Transpiled programs through their communicators to real servers: GEO is local training, threads end, nothing is lost.

Servers run on threads of this process; each trainer has a scope of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.communicator_harness import in_thread, joined
from tests.support.endpoints import free_endpoints
from tests.support.remotes import remotes_of_a_test

import penstock as fluid
from penstock.ps.communicator import Communicator
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage

HEIGHT, WIDTH, ROWS = 40, 3, 8


@dataclass
class Net:
    """A regression with a sparse table and a weight, in float64. `loss`: its variable."""

    main: Any
    startup: Any
    loss: Any


def merged() -> Any:
    """An optimizer that updates in every other run; it merges no sparse gradients."""
    return fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.Adam(0.1), 2)


def network(optimizer: Callable[[], Any] | None = None) -> Net:
    """Return a minimised network; every call gives the same one."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 3
    with fluid.program_guard(main, startup):
        layers: Any = fluid.layers
        ids, label = fluid.data("ids", [-1, 2], "int64"), fluid.data("label", [-1, 1], "float64")
        rows = fluid.embedding(ids, [HEIGHT, WIDTH], optimizer is not merged, param_attr="table", dtype="float64")
        out = layers.fc(layers.reduce_sum(rows, 1), 1, param_attr="weight", bias_attr=False)
        loss = layers.mean(layers.square_error_cost(out, label))
        (optimizer or (lambda: fluid.optimizer.SGD(0.3)))().minimize(loss)
    return Net(main, startup, loss)


def batches(num: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield feeds whose ids repeat."""
    draw = np.random.default_rng(seed)
    for _ in range(num):
        ids = draw.integers(0, HEIGHT, size=(ROWS, 2))
        yield {"ids": ids, "label": (ids.sum(1, keepdims=True) / HEIGHT - 1.0).astype("float64")}


@dataclass
class Job:
    """The servers of one job, and its trainers' programs."""

    config: Any
    num_trainers: int
    endpoints: Sequence[str]
    optimizer: Callable[[], Any] | None = None
    servers: list[ParameterServer] = field(default_factory=list)
    storages: list[ProgramStorage] = field(default_factory=list)

    def transpiled(self, trainer: int) -> tuple[Any, Net]:
        net = network(self.optimizer)
        made = fluid.DistributeTranspiler(self.config)
        made.transpile(
            trainer, program=net.main, pservers=",".join(self.endpoints), trainers=self.num_trainers,
            sync_mode=False, startup_program=net.startup,
        )  # fmt: skip
        return made, net

    def serve(self) -> None:
        for index, endpoint in enumerate(self.endpoints):
            made, _ = self.transpiled(0)
            program, startup = made.get_pserver_programs(endpoint)
            scope = Scope()
            fluid.Executor().run(startup, scope=scope)
            self.storages.append(ProgramStorage(program, scope))
            settings = ServerSettings(
                endpoint, index, self.num_trainers, made.descriptor.mode, start_s=100.0, lease_s=100.0
            )
            self.servers.append(ParameterServer(settings, self.storages[-1]))
            self.servers[-1].start()

    def value(self, variable: str) -> torch.Tensor:
        """Return what the servers have of a variable, put together."""
        made, _ = self.transpiled(0)
        placed = made.placement.of_parameter(variable)
        return torch.cat([self.storages[self.endpoints.index(p.endpoint)].value(p.name) for p in placed])

    def error(self) -> float:
        """Return the loss that the servers' parameters have on a batch of their own."""
        feed = next(batches(1, seed=99))
        out = self.value("table")[torch.from_numpy(feed["ids"])].sum(1) @ self.value("weight")
        return float((out - torch.from_numpy(feed["label"])).square().mean())

    def num_pushes(self) -> int:
        """Return how many updates the servers have applied."""
        return sum(sum(server.staleness.values()) for server in self.servers)


Start = Callable[..., Job]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start jobs; whatever is left of them ends with the test."""
    monkeypatch.setenv("PENSTOCK_PS_START_S", "100")
    monkeypatch.setenv("PENSTOCK_PS_LEASE_S", "100")
    monkeypatch.delenv("PENSTOCK_PS_STATE_DIR", raising=False)
    jobs: list[Job] = []

    def begin(num_servers: int, num_trainers: int, optimizer: Any = None, **fields: Any) -> Job:
        config = fluid.DistributeTranspilerConfig()
        for name, value in {"sync_mode": False, "runtime_split_send_recv": True, **fields}.items():
            setattr(config, name, value)
        jobs.append(Job(config, num_trainers, free_endpoints(num_servers), optimizer))
        jobs[-1].serve()
        return jobs[-1]

    with remotes_of_a_test():
        yield begin
    for job in jobs:
        for server in job.servers:
            server.close()


def train(net: Net, feeds: Iterator[dict[str, Any]], scope: Scope) -> list[float]:
    """Run one trainer's startup and steps; return its losses."""
    exe = fluid.Executor()
    exe.run(net.startup, scope=scope)
    return [float(exe.run(net.main, feed, [net.loss], scope=scope)[0].reshape(-1)[0]) for feed in feeds]


def parameter(scope: Scope, name: str) -> torch.Tensor:
    """Return a parameter of a scope."""
    found = scope.find(name)
    assert found is not None
    return found


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: fluid.optimizer.SGD(0.3),
    "adam": lambda: fluid.optimizer.Adam(0.1, lazy_mode=False),
    "momentum": lambda: fluid.optimizer.Momentum(0.1, 0.9, regularization=fluid.regularizer.L2Decay(0.1)),
    "lars": lambda: fluid.optimizer.LarsMomentum(0.1, 0.9),
    "merged": merged,
}
"""All of them move the rows of a batch alone, whatever state others have: so GEO tells of all rows that moved."""


@pytest.mark.parametrize(
    ("every", "num_servers", "kind"),
    [
        (1, 2, "sgd"),
        (4, 1, "sgd"),
        (1, 1, "adam"),
        (4, 2, "adam"),
        (4, 1, "momentum"),
        (4, 1, "lars"),
        (1, 2, "merged"),
        (4, 1, "merged"),
    ],
)
def test_geo_with_one_trainer_is_local_training(start: Start, every: int, num_servers: int, kind: str) -> None:
    local_net, local_scope = network(OPTIMIZERS[kind]), Scope()
    local = train(local_net, batches(10), local_scope)
    job = start(num_servers, 1, OPTIMIZERS[kind], geo_sgd_mode=True, geo_sgd_need_push_nums=every)
    _, net = job.transpiled(0)
    scope = Scope()
    one = Communicator(net.main, envs={"communicator_thread_pool_size": 2})
    one.start()
    assert train(net, batches(10), scope) == local
    one.stop()
    for name in ("table", "weight"):
        assert torch.equal(parameter(scope, name), parameter(local_scope, name))
        # 10 exchanges at most, each rounds a delta and a sum of values below 4
        assert torch.allclose(job.value(name), parameter(local_scope, name), rtol=0, atol=1e-13)
    for server in job.servers:
        assert server.wait(60)


def test_geo_trainers_learn_from_each_other(start: Start) -> None:
    job = start(2, 2, geo_sgd_mode=True, geo_sgd_need_push_nums=3)
    before = job.error()

    def run(trainer: int) -> None:
        _, net = job.transpiled(trainer)
        one = Communicator(net.main)
        one.start()
        train(net, batches(60, seed=trainer), Scope())
        one.stop()

    threads = [in_thread(lambda t=t: run(t)) for t in range(2)]  # type: ignore[misc]
    for thread, errors in threads:
        thread.join(60)
        assert not errors
    assert job.error() < 0.5 * before


@pytest.mark.parametrize("independent", [0, 1])
def test_async_applies_every_gradient_and_loses_none_at_the_end(start: Start, independent: int) -> None:
    job = start(2, 2)
    envs = {
        "communicator_send_queue_size": 30,
        "communicator_max_merge_var_num": 1,
        "communicator_min_send_grad_num_before_recv": 0,
        "communicator_independent_recv_thread": independent,
    }
    before = job.error()

    def run(trainer: int) -> None:
        _, net = job.transpiled(trainer)
        one = Communicator(net.main, "async", envs=envs)
        one.start()
        train(net, batches(30, seed=trainer), Scope())
        one.stop()

    threads = [in_thread(lambda t=t: run(t)) for t in range(2)]  # type: ignore[misc]
    for thread, errors in threads:
        thread.join(60)
        assert not errors
    assert all(server.wait(60) for server in job.servers)
    assert job.num_pushes() >= 2 * 30 * 2  # steps, trainers, variables; a table may be pushed to both servers
    assert job.error() < 0.5 * before


def test_half_async_threads_of_unequal_data_push_their_average(start: Start) -> None:
    job = start(1, 1, half_async=True)
    _, net = job.transpiled(0)
    one = Communicator(net.main)
    one.start()
    one.set_threads(3)
    barrier = threading.Barrier(3)
    scopes = [Scope() for _ in range(3)]

    def run(thread: int, steps: int) -> None:
        exe = fluid.Executor()
        exe.run(net.startup, scope=scopes[thread])
        barrier.wait(60)
        with one.thread():
            for feed in batches(steps, seed=thread):
                exe.run(net.main, feed, [net.loss], scope=scopes[thread])

    threads = [in_thread(lambda t=t: run(t, 4 + 3 * t)) for t in range(3)]  # type: ignore[misc]
    for thread, errors in threads:
        joined(thread)
        assert not errors
    one.stop()  # the last round of the table, which nobody pulled, may still have been on its way
    assert job.num_pushes() == 2 * 10  # the longest thread's steps, of two variables
    assert torch.equal(parameter(scopes[2], "weight"), job.value("weight"))


def test_replicas_of_a_node_push_once_a_gradient_and_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    job = start(1, 1, half_async=True)
    _, net = job.transpiled(0)
    one = Communicator(net.main)
    one.start()
    strategy = fluid.BuildStrategy()
    strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    compiled: Any = fluid.CompiledProgram(net.main)
    compiled = compiled.with_data_parallel(loss_name=net.loss.name, build_strategy=strategy)
    exe, scope = fluid.Executor(), Scope()
    exe.run(net.startup, scope=scope)
    for feed in batches(5):
        exe.run(compiled, feed, [net.loss], scope=scope)
    one.stop()
    assert job.num_pushes() == 5 * 2  # steps, variables
