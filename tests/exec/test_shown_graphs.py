"""What an executor tells a watch of its graphs: every event is of the operator that its document names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.process_state import session_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import penstock as fluid
from penstock.program.program import Program
from penstock.protocol.graphdoc import GraphDocument, Threads
from penstock.telemetry import TraceSource, Watch
from penstock.telemetry.unwatched import Session


class Recorded(Watch):
    """A watch that keeps the documents with their first steps."""

    is_watched = True

    def __init__(self) -> None:
        self.graphs: list[tuple[int, GraphDocument]] = []
        self.threads: list[Threads | None] = []

    def graph(self, document: GraphDocument, from_step: int = 0) -> None:
        self.graphs.append((from_step, document))


class OneWatch(Session):
    """Hands out one watch."""

    def __init__(self, watch: Recorded) -> None:
        self._watch = watch

    def watch(self, source: TraceSource, *, name: str, threads: Callable[[], Threads | None] | None = None) -> Recorded:
        self._watch.threads.append(None if threads is None else threads())
        return self._watch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """What the executors of a test send; two replicas."""
    recorded = Recorded()
    monkeypatch.setenv("CPU_NUM", "2")
    with session_of(OneWatch(recorded)):
        yield recorded


def activations() -> tuple[Program, str, str]:
    """A program, its result, and the sum that is fused with its activation unless it is fetched."""
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        total = x + x * 2.0
        result = fluid.layers.relu(total).mean()
    return main, result.name, total.name


def test_fetches_that_change_the_graph_change_its_document(watch: Recorded) -> None:
    main, result, total = activations()
    build = fluid.BuildStrategy()
    build.fuse_elewise_add_act_ops = True
    executor = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope(), build_strategy=build)
    for step, fetches in enumerate(([result], [result, total], [result])):
        executor.core.engine.drain()
        executor.run(fetches, {"x": np.ones((6, 4), "float32")})
        from_step, shown = watch.graphs[-1]
        assert from_step == step
        types = [shown.ops[int(op)].type for op in executor.core.engine.drain()["op"]]
        assert len(types) == len(shown.ops)
        assert types.count("aten.relu.default") == (2 if total in fetches else 0)
        assert types.count("penstock.fused_add_act.default") == (0 if total in fetches else 2)
    executor.close()
    assert watch.graphs[0][1] is watch.graphs[2][1]


def test_fetches_that_leave_the_graph_show_it_once(watch: Recorded) -> None:
    main, result, total = activations()
    executor = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for fetches in ([result], [result, total], [result], []):
        executor.run(fetches, {"x": np.ones((6, 4), "float32")})
    executor.run([result], {"x": np.ones((5, 4), "float32")})
    executor.close()
    assert [(step, shown.batch) for step, shown in watch.graphs] == [(0, [3, 3]), (4, [2, 3])]


class Network(nn.Module):
    """float32[rows, 1, 10, 10] to [rows, 3]: convolutions, batched matmuls and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, stride=2)
        self.hidden, self.out = nn.Linear(54, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.second(self.first(x).relu()).flatten(2)
        mixed = torch.softmax(seen @ seen.transpose(1, 2), dim=-1) @ seen
        logits: torch.Tensor = self.out(self.hidden(mixed.flatten(1)).relu())
        return logits


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_flops_are_those_that_torch_counts(watch: Recorded, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    monkeypatch.setenv("PENSTOCK_MATRIX_KERNELS", kernels)
    network, fed = Network(), np.ones((8, 1, 10, 10), "float32")
    with FlopCounterMode(display=False) as counter:
        network(torch.from_numpy(fed)).square().mean().backward()
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[1, 10, 10], dtype="float32")
        loss = network(x).square().mean()
        fluid.optimizer.SGD(0.1).minimize(loss)
    scope = fluid.Scope()
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    executor = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main, scope=scope)
    executor.run([loss.name], {"x": fed})
    executor.close()
    assert sum(op.flops for op in watch.graphs[-1][1].ops) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("replicas", "num_threads", "expected"),
    [("1", 0, Threads(1, 8)), ("2", 0, Threads(2, 4)), ("1", 3, Threads(3, 2)), ("1", 40, Threads(8, 1))],
)
def test_threads_that_run_are_reported_not_those_of_the_pool(
    watch: Recorded, monkeypatch: pytest.MonkeyPatch, replicas: str, num_threads: int, expected: Threads
) -> None:
    monkeypatch.setenv("CPU_NUM", replicas)
    monkeypatch.setattr("penstock.exec.data_parallel.num_cores", lambda: 8)
    main, _, _ = activations()
    strategy = fluid.ExecutionStrategy()
    strategy.num_threads = num_threads
    fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope(), exec_strategy=strategy).close()
    [found] = watch.threads
    assert found is not None and replace(found, matrix_gflops=0.0) == expected
    assert found.matrix_gflops > 0.1  # of any processor
