"""A strategy's runtime configs in a job of one worker and one server, both in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.endpoints import free_endpoint

import penstock as fluid
from penstock.fleet.parameter_server import ParameterServerFleet
from penstock.fleet.roles import Role, UserDefinedRoleMaker
from penstock.fleet.strategy import DistributedStrategy, StrategyFactory

SIZE = 1024  # two layers' gradients are 8 MiB, which a server with threads updates in parallel


def begun(role: Role, endpoint: str, strategy: DistributedStrategy) -> ParameterServerFleet:
    """Return one process of the job, with a program of its own."""
    fleet = ParameterServerFleet()
    fleet.init(UserDefinedRoleMaker(0, role, 1, [endpoint]))
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        hidden = fluid.layers.fc(fluid.layers.data("x", [SIZE]), SIZE, bias_attr=False)
        loss = fluid.layers.mean(fluid.layers.fc(hidden, SIZE, bias_attr=False))
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(loss)
    return fleet


@contextmanager
def job(strategy: DistributedStrategy) -> Iterator[ParameterServerFleet]:
    """Run a server in a thread; yield the worker once it is connected, and end both."""
    endpoint = free_endpoint()
    server, worker = begun(Role.SERVER, endpoint, strategy), begun(Role.WORKER, endpoint, strategy)
    with fluid.scope_guard(fluid.Scope()), ThreadPoolExecutor(1) as pool:
        server.init_server()
        served = pool.submit(server.run_server)
        worker.init_worker()
        try:
            yield worker
        finally:
            worker.stop_worker()
        served.result(60)


@pytest.fixture(autouse=True)
def _of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    monkeypatch.setenv("PENSTOCK_PS_SAVE_DIRS", "")  # run_server sets it


def threads_called(part: str, *, besides: set[threading.Thread]) -> int:
    """Count the threads of this process with a name like this, without those of tests before."""
    return sum(part in thread.name for thread in threading.enumerate() if thread not in besides)


@pytest.mark.parametrize("senders", [1, 3])
def test_a_worker_has_as_many_send_threads_as_its_strategy_says(senders: int) -> None:
    strategy = StrategyFactory.create_async_strategy()
    strategy.set_trainer_runtime_config({"communicator_thread_pool_size": senders})
    before = set(threading.enumerate())
    with job(strategy):
        assert threads_called("ps-send", besides=before) == senders


def threads_of_updates(config: dict[str, Any]) -> int:
    """Train one step; count the threads with which the server has applied it, besides those of its requests."""
    strategy, scope = StrategyFactory.create_sync_strategy(), fluid.Scope()
    strategy.set_server_runtime_config(config)
    before = set(threading.enumerate())
    with job(strategy) as worker:
        exe = fluid.Executor()
        exe.run(worker.startup_program, scope=scope)
        exe.run(worker.main_program, {"x": np.ones((2, SIZE), "float32")}, scope=scope)
        found = threads_called("ps-update", besides=before)
        exe.close()  # leaves the server, which then ends
    return found


def test_a_server_updates_with_the_threads_of_its_strategy() -> None:
    assert threads_of_updates({}) > 0
    assert threads_of_updates({"_rpc_send_thread_num": 1}) == 0
