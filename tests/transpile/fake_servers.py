"""Parameter servers within the process, for a trainer's tests: they apply SGD, and write down what they were asked.

Sync with one trainer: what was sent is applied at the send barrier; in other modes, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.transpile.recorded import Recorded

import penstock as fluid
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.choice import PassChoice
from penstock.graph.ssa import Graph
from penstock.ps.communicator import remotes
from penstock.ps.remote import Descriptor, GeoCall, SendCall
from penstock.transpile.placement import Placement


@dataclass
class FakeServers:
    """A `Remote`. `values`: block -> its value. `calls`: (method, variable). `sent`: variable -> what came last."""

    descriptor: Descriptor
    placement: Placement
    values: dict[str, torch.Tensor]
    rate: float = 0.01
    calls: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, list[Any]] = field(default_factory=dict)
    waiting: list[tuple[str, torch.Tensor | None, torch.Tensor]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # operators of a step push at the same time

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        self._expect(variable, blocks, at)
        self.calls.append(("send", variable))
        self.sent[variable] = [v.clone() for v in values]
        self._take([(block, None, value.clone()) for block, value in zip(blocks, values, strict=True)])

    def send_rows(
        self,
        variable: str,
        blocks: Sequence[str],
        at: Sequence[int],
        heights: Sequence[int],
        rows: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self._expect(variable, blocks, at)
        self.calls.append(("send_rows", variable))
        self.sent[variable] = [rows.clone(), values.clone()]
        if not heights:  # rows by a hash of their id: one table here
            self._take([(blocks[0], rows.clone(), values.clone())])
            return
        first = 0
        for block, height in zip(blocks, heights, strict=True):
            inside = (rows >= first) & (rows < first + height)
            self._take([(block, rows[inside] - first, values[inside].clone())])
            first += height

    def send_barrier(self) -> None:
        self.calls.append(("send_barrier", ""))
        self._apply()

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        self.calls.append(("send_step", ""))
        for push in pushes:
            if push.rows is None:
                self.send(push.variable, push.blocks, push.at, push.values)
            else:
                self.send_rows(push.variable, push.blocks, push.at, push.heights, push.rows, *push.values)
        self.send_barrier()

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[torch.Tensor]) -> None:
        self._expect(variable, blocks, at)
        self.calls.append(("recv", variable))
        for block, tensor in zip(blocks, out, strict=True):
            tensor.copy_(self.values[block])

    def recv_step(
        self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[torch.Tensor]
    ) -> None:
        self.calls.append(("recv_step", ""))
        for placed, server, tensor in zip(blocks, at, out, strict=True):
            (block,) = [p for p in self.placement.blocks if p.name == placed]
            assert self.placement.endpoints[server] == block.endpoint
            tensor.copy_(self.values[placed])

    def fetch_barrier(self) -> None:
        self.calls.append(("fetch_barrier", ""))

    def prefetch(
        self,
        table: str,
        blocks: Sequence[str],
        at: Sequence[int],
        heights: Sequence[int],
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._expect(table, blocks, at)
        self.calls.append(("prefetch", table))
        out.copy_(torch.cat([self.values[b] for b in blocks])[ids])

    def geo(
        self,
        variable: str,
        blocks: Sequence[str],
        at: Sequence[int],
        heights: Sequence[int],
        parameter: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        self._expect(variable, blocks, at)
        self.calls.append(("geo", variable))
        self.sent[variable] = [parameter.clone(), rows]

    def geo_step(self, calls: Sequence[GeoCall]) -> None:
        self.calls.append(("geo_step", ""))
        for call in calls:
            rows = None if call.rows is None else torch.cat([r.reshape(-1) for r in call.rows])
            self.geo(call.variable, call.blocks, call.at, call.heights, call.parameter, rows)

    def close(self) -> None:
        self.calls.append(("close", ""))

    def _expect(self, variable: str, blocks: Sequence[str], at: Sequence[int]) -> None:
        placed = self.placement.of_parameter(variable)
        assert list(blocks) == [p.name for p in placed]
        assert [self.placement.endpoints[i] for i in at] == [p.endpoint for p in placed]

    def _take(self, sent: list[tuple[str, torch.Tensor | None, torch.Tensor]]) -> None:
        with self.lock:
            self.waiting += sent
        if self.descriptor.mode != "sync":
            self._apply()

    def _apply(self) -> None:
        with self.lock:
            for block, rows, gradient in self.waiting:
                if rows is None:
                    self.values[block] -= self.rate * gradient
                else:
                    self.values[block].index_add_(0, rows, gradient, alpha=-self.rate)
            self.waiting.clear()


def first_values(startup: fluid.Program, placement: Placement) -> dict[str, torch.Tensor]:
    """What the servers begin with: what a run of the program's own startup program makes, cut into blocks."""
    scope = fluid.Scope()
    fluid.Executor().run(startup, scope=scope)
    values = {}
    for one in placement.blocks:
        whole = scope.find(one.parameter)
        assert whole is not None
        values[one.name] = whole[one.block.first_row : one.block.first_row + one.block.num_rows].clone()
    return values


def trained(
    recorded: Recorded, made: Any, before: fluid.Program, feeds: Sequence[dict[str, Any]], choice: PassChoice,
    fetches: Sequence[str] = (),
) -> tuple[FakeServers, fluid.Scope, Graph]:  # fmt: skip
    """Train a trainer's program on two replicas, a step a feed; return its servers, its scope, and its last graph.

    `made`: what cut it; `before`: its startup program as it was. Within `remotes_of_a_test`.
    """
    fakes = FakeServers(made.descriptor, made.placement, first_values(before, made.placement))
    remotes.opener = lambda _: fakes
    scope = fluid.Scope()
    fluid.Executor().run(recorded.startup, scope=scope)
    core = DataParallel(
        recorded.main, ReplicaMemory(scope), mode="reduce", num_replicas=2, loss_name=recorded.loss, choice=choice
    )
    for feed in feeds:
        core.run(feed, [recorded.loss, *fetches])
    graph = core.newest_graph
    core.close()
    remotes.close(str(made.descriptor))
    assert graph is not None
    return fakes, scope, graph
