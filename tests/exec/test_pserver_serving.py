"""Executors that run pserver programs, with trainers in the same process: served is what one machine computes."""

from __future__ import annotations

import ctypes
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.exec.ps_network import HEIGHT, WIDTH
from tests.support.endpoints import free_endpoint, free_endpoints
from tests.support.nursery import Forked, Nursery

import penstock as fluid
from penstock.scope import Scope

STEPS, BATCH = 5, 8


def network(kind: str) -> tuple[Any, Any, Any]:
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 4
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        dtype = "float32" if kind == "distributed" else "float64"
        rows = 40 if kind == "declared" else -1  # BATCH are fed, whatever is declared
        ids = L.data("ids", [rows, 2], dtype="int64", append_batch_size=False)
        label = L.data("label", [rows, 3], dtype=dtype, append_batch_size=False)
        how = {"is_sparse": kind != "dense", "is_distributed": kind == "distributed"}
        found = fluid.embedding(ids, [HEIGHT, WIDTH], **how, param_attr="table", dtype=dtype)
        hidden = L.fc(L.reduce_sum(found, 1), 7, param_attr="w1", bias_attr="b1", act="tanh")
        loss = L.mean(L.square_error_cost(L.fc(hidden, 3, param_attr="w2", bias_attr=False), label))
        rate = L.exponential_decay(0.05, 2, 0.9)
        fluid.optimizer.Adam(rate, regularization=fluid.regularizer.L2Decay(0.01)).minimize(loss)
    return main, startup, loss


def feeds(kind: str, part: int, parts: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(2)
    out = []
    for _ in range(STEPS):
        ids, label = draw.integers(0, HEIGHT, (BATCH, 2)), draw.normal(size=(BATCH, 3))
        if kind == "distributed":
            ids, label = ids * 10**15 - 7, label.astype("float32")
        out.append({"ids": ids[part::parts].copy(), "label": label[part::parts].copy()})
    return out


def distributed(kind: str, trainer: int, endpoints: str, *, sync: bool, trainers: int = 2) -> tuple[Any, Any, Any]:
    main, startup, loss = network(kind)
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(
        trainer, program=main, pservers=endpoints, trainers=trainers, sync_mode=sync, startup_program=startup
    )
    return transpiler, startup, loss


def serve(transpiler: Any, endpoint: str) -> Scope:
    scope, exe = Scope(), fluid.Executor()
    program, startup = transpiler.get_pserver_programs(endpoint)
    exe.run(startup, scope=scope)
    assert exe.run(program, scope=scope) == []
    return scope


def train(transpiler: Any, startup: Any, loss: Any, batches: list[dict[str, Any]]) -> Scope:
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    for feed in batches:
        exe.run(transpiler.get_trainer_program(), feed, [loss], scope=scope)
    exe.close()
    return scope


def together(kind: str, *, sync: bool, number: int = 2) -> tuple[list[Scope], list[Scope]]:
    """Run as many servers as trainers; return their scopes."""
    endpoints = ",".join(free_endpoints(number))
    made = [distributed(kind, trainer, endpoints, sync=sync, trainers=number) for trainer in range(number)]
    with ThreadPoolExecutor(2 * number) as pool:
        servers = [pool.submit(serve, made[0][0], endpoint) for endpoint in endpoints.split(",")]
        trainers = [pool.submit(train, *one, feeds(kind, part, number)) for part, one in enumerate(made)]
        return [s.result(60) for s in servers], [t.result(60) for t in trainers]


def found(scope: Scope, name: str) -> torch.Tensor:
    tensor = scope.find(name)
    assert tensor is not None, name
    return tensor


@pytest.mark.parametrize("kind", ["dense", "sparse", "declared"])
def test_two_servers_and_trainers_equal_one_machine_whole_batch(kind: str) -> None:
    main, startup, loss = network(kind)
    local, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=local)
    for feed in feeds(kind, 0, 1):
        exe.run(main, feed, [loss], scope=local)
    servers, trainers = together(kind, sync=True)
    for name in ("w1", "b1", "w2"):
        for trainer in trainers:
            assert torch.allclose(found(trainer, name), found(local, name), rtol=0, atol=1e-12), name
    tables = [t for t in (server.find("table") for server in servers) if t is not None]
    assert len(tables) == 1
    assert torch.allclose(tables[0], found(local, "table"), rtol=0, atol=1e-12)


def test_a_table_spread_over_two_servers_trains_as_on_one() -> None:
    _, (alone,) = together("distributed", sync=True, number=1)
    servers, trainers = together("distributed", sync=True)
    assert not [s for s in (*servers, *trainers, alone) if s.find("table") is not None]
    for name in ("w1", "b1", "w2"):
        for trainer in trainers:
            assert torch.allclose(found(trainer, name), found(alone, name), rtol=0, atol=1e-6), name


def test_async_counters_count_the_pushes_of_both_trainers() -> None:
    servers, _ = together("dense", sync=False)
    steps = {n: float(found(s, n)) for s in servers for n in s.names() if n.startswith("adam_0.step@")}
    assert steps == {f"adam_0.step@{n}": 2.0 * STEPS for n in ("table", "w1", "b1", "w2")}


SCRIPT = """
import sys
from tests.exec.test_pserver_serving import distributed, serve
transpiler, _, _ = distributed("dense", 0, sys.argv[1], sync=True)
print("serves", flush=True)
serve(transpiler, sys.argv[1])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_after_it_has_closed(nursery: Nursery, tmp_path: Path, number: int, status: int) -> None:
    endpoint = free_endpoint()
    server = Forked(nursery, tmp_path / "server", ["-c", SCRIPT, endpoint], {})
    try:
        _wait_for(server, endpoint)
        server.signal(number)
        assert server.end() in (status, -number), server.errors
    finally:
        server.close()
    assert "Fatal" not in server.errors


def test_a_signal_that_another_thread_receives_ends_a_server(nursery: Nursery, tmp_path: Path) -> None:
    """The main thread is not woken by it: as where a signal comes just before that sleeps."""
    endpoint = free_endpoint()
    server = Forked(nursery, tmp_path / "server", ["-c", SCRIPT, endpoint], {})
    try:
        _wait_for(server, endpoint)
        while "waits for trainers" not in server.errors:  # the main thread waits for the server's end by then
            assert not server.has_ended(0.05), server.errors
        others = [int(task.name) for task in Path(f"/proc/{server.pid}/task").iterdir() if task.name != str(server.pid)]
        assert ctypes.CDLL(None, use_errno=True).tgkill(server.pid, others[0], signal.SIGTERM) == 0
        assert server.end() == 143, server.errors
    finally:
        server.close()


def _wait_for(server: Forked, endpoint: str) -> None:
    """Wait until it listens."""
    host, _, port = endpoint.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            assert not server.has_ended(0.05), server.errors
