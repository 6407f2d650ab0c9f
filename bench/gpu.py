"""`bench gpu`: training a workload on one GPU, Penstock against what a user of torch would write.

All contenders run in this process on the same card, from the same values and on the same batches, which lie in the
processor's memory: bringing them to the card is part of the time. The peers' batches are pinned before; ours are given
as a user has them. They take turns, in an order that turns round after each round; each turn ends when the card has
done what was launched, with the loss on the processor. A ratio is the median over rounds of our rate over the peer's.

Peers: `eager`; `compile`, torch.compile of network and loss; `compile_graphs`, the same with mode="reduce-overhead",
which captures CUDA graphs; `graph`, a whole step, update included, captured by hand as one CUDA graph. Where tables
are sparse, `graph` and the compiled ones take dense gradients, which can be captured, and `eager` is there in both
forms. Ours runs in three ways: as users get it; `watched`, with the times of all operators recorded and drained, as
telemetry has it; `op_by_op`, without CUDA graphs.
`…_cpu_ms_per_step`: processor time of this process in a turn, which launching costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import penstock  # noqa: F401 before torch, whose threads it keeps from spinning

# isort: split
import numpy as np
import torch
from torch import Tensor

from bench import workloads
from bench.models import modules, programs
from bench.report import Report
from bench.workloads import Workload
from penstock import telemetry
from penstock.telemetry.unwatched import NullWatch, Unwatched

ROUNDS = 5
STEPS, WARM_UP = 200, 30
NAMES = ("criteo", "lenet", "transformer")
PEERS = ("eager", "eager_dense", "compile", "compile_graphs", "graph")


class Trainer(Protocol):
    """A contender: trains so many steps; returns the last loss."""

    def run(self, num_steps: int) -> float: ...


class Ours:
    """A program on the card. `graphs`: whether its steps may be captured as CUDA graphs."""

    def __init__(self, workload: Workload, *, graphs: bool = True) -> None:
        build = programs.strategy("all_reduce")
        build.allow_cuda_graph_capture = graphs
        self.executor, self._loss, self._feeds = programs.trainer(workload, build=build, use_cuda=True, fixed=True)
        self._next = 0

    def run(self, num_steps: int) -> float:
        found: list[Any] = []
        for step in range(num_steps):
            feed = self._feeds[self._next % len(self._feeds)]
            self._next += 1
            found = self.executor.run([self._loss] if step + 1 == num_steps else [], feed=feed)
        return float(np.asarray(found[0]).reshape(-1)[0])


class _Drained(NullWatch):
    """What a watched process does with the times of its operators, but for sending them: they are drained."""

    is_watched = True

    def __init__(self, source: Any) -> None:
        self._source, self._ends = source, threading.Event()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while not self._ends.wait(0.1):
            self._source.drain()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()


class _Watching(Unwatched):
    """A session that watches executors."""

    def watch(self, source: Any, **_: Any) -> NullWatch:
        return _Drained(source)


def watched(workload: Workload) -> Ours:
    """Our executor as one that telemetry watches."""
    session, telemetry.session = telemetry.session, _Watching
    try:
        return Ours(workload)
    finally:
        telemetry.session = session


class Torch:
    """What a user of torch writes. `mode`: of PEERS."""

    def __init__(self, workload: Workload, mode: str) -> None:
        self.model = modules.network(workload)
        dense = mode in ("eager_dense", "graph") or mode.startswith("compile")
        for table in self.model.modules():
            if dense and isinstance(table, torch.nn.Embedding):
                table.sparse = False
        self.model.cuda()
        self.optimizers = modules.optimizers(workload, self.model, capturable=mode == "graph")
        self._batches = [[t.pin_memory() for t in batch.values()] for batch in modules.tensors(workload)]
        self._body: Callable[..., Tensor] = self._forward
        if mode.startswith("compile"):
            self._body = torch.compile(self._forward, mode="reduce-overhead" if mode == "compile_graphs" else None)
        self._graph = self._captured() if mode == "graph" else None
        self._next = 0

    def _forward(self, *batch: Tensor) -> Tensor:
        return modules.loss_of(self.model(*batch[:-1]), batch[-1])

    def _step(self, batch: Sequence[Tensor]) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._body(*batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Capture a step over static inputs; what the warm-up has changed is put back."""
        values = self.model.state_dict()
        before = {name: value.clone() for name, value in values.items()}
        self._static = [t.cuda() for t in self._batches[0]]
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has not typed it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(self._static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._step(self._static)
        with torch.no_grad():
            for name, value in before.items():
                values[name].copy_(value)
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            value.zero_()
        return graph

    def run(self, num_steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(num_steps):
            batch = self._batches[self._next % len(self._batches)]
            self._next += 1
            if self._graph is None:
                loss = self._step([t.cuda(non_blocking=True) for t in batch])
                continue
            for static, given in zip(self._static, batch, strict=True):
                static.copy_(given, non_blocking=True)
            self._graph.replay()
            loss = self._loss
        return float(loss.detach())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--workload", choices=NAMES, default="criteo", help="what is trained (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of one turn (%(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Race; raise SystemExit with the reason if there is no GPU or a contender has learned something else."""
    if not torch.cuda.is_available():
        raise SystemExit("bench gpu: no GPU is visible")
    workload = workloads.build(extra.workload)
    sparse = bool(modules.network(workload).sparse_parameters())
    wanted = [peer for peer in extra.peers.split(",") if peer and (sparse or peer != "eager_dense")]
    if unknown := sorted(set(wanted) - set(PEERS)):
        raise SystemExit(f"bench gpu: unknown peer {', '.join(unknown)}; expected {', '.join(PEERS)}")
    contenders: dict[str, Trainer] = {
        "penstock": Ours(workload),
        "watched": watched(workload),
        "op_by_op": Ours(workload, graphs=False),
    }
    contenders |= {peer: Torch(workload, peer) for peer in wanted}
    report = Report("gpu", rounds)
    first = {name: trainer.run(WARM_UP) for name, trainer in contenders.items()}
    _check(first, workload)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_ms: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders)[:: -1 if number % 2 else 1]
        for name in order:
            torch.cuda.synchronize()
            began, cpu = time.perf_counter(), time.process_time()
            contenders[name].run(extra.steps)
            torch.cuda.synchronize()
            rates[name].append(extra.steps / (time.perf_counter() - began))
            cpu_ms[name].append(1e3 * (time.process_time() - cpu) / extra.steps)
    for name, found in rates.items():
        report.add(f"{name}_steps_per_s", found, digits=1)
        report.figures[f"{name}_cpu_ms_per_step"] = round(statistics.median(cpu_ms[name]), 3)
    for name in list(rates)[1:]:
        ratios = [a / b for a, b in zip(rates["penstock"], rates[name], strict=True)]
        report.ratios[name] = round(report.add(f"ratio_{name}", ratios, digits=3), 3)
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"bench gpu: {extra.workload} on {card}", file=sys.stderr)
    return report


def _check(losses: dict[str, float], workload: Workload) -> None:
    """Refuse figures of contenders that did not learn the same in the warm-up."""
    for name, loss in losses.items():
        if not abs(loss - losses["eager" if "eager" in losses else "penstock"]) <= workload.loss_band:
            raise SystemExit(f"bench gpu: {name} has another loss after {WARM_UP} steps: {losses}")
