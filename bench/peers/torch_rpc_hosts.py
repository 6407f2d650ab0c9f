"""Parameter servers on torch.distributed.rpc (TensorPipe) on several hosts, in step.

As `torch_rpc_pserver`, one call a step and server, all servers at once: it carries the gradients and the ids of the
next batch there, and the new parameters and the next batch's rows back. Dense parameters are one vector, cut evenly
over the servers; row r of the table is on server r mod servers. A server answers when every trainer has called
(`rpc.functions.async_execution`, as in PyTorch's tutorial on batch RPC processing), after one update with the mean.

TensorPipe would reach a process of the same machine past the network, through its memory; it is restricted to what it
uses between hosts.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.models import modules
from bench.peers.cluster import Cluster, OtherRanks, Served, mean_loss, of, share
from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, looked_up, movements
from bench.workloads.workload import Array, Workload

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class _Push:
    """One trainer's part of a step on one server. `ids` and `next_ids` are rows of the server's own part."""

    gradient: Tensor
    ids: Tensor
    rows: Tensor
    next_ids: Tensor


class _Server:
    """One server's parts of the parameters and of the table."""

    dense: Tensor
    table: Tensor
    rate: float

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[_Push, torch.futures.Future[tuple[Tensor, Tensor]]]] = []
        self._num_trainers = 0

    def load(self, workload: Workload, server: int, num_servers: int, num_trainers: int) -> None:
        """Take the workload's values."""
        whole = parameters_to_vector(modules.network(workload).body.parameters()).detach()
        self.dense = whole.tensor_split(num_servers)[server].clone()
        self.table = torch.tensor(workload.weights["table"][server::num_servers])
        self.rate = workload.learning_rate / num_trainers
        self._num_trainers = num_trainers

    def step(self, push: _Push) -> torch.futures.Future[tuple[Tensor, Tensor]]:
        """Take one trainer's part; when all are there, update and answer all."""
        answer: torch.futures.Future[tuple[Tensor, Tensor]] = torch.futures.Future()
        with self._lock:
            self._waiting.append((push, answer))
            if len(self._waiting) < self._num_trainers:
                return answer
            waiting, self._waiting = self._waiting, []
        for one, _ in waiting:
            self.dense.add_(one.gradient, alpha=-self.rate)
            self.table.index_add_(0, one.ids, one.rows, alpha=-self.rate)
        dense = self.dense.clone()  # answers are sent while the next step may have begun
        for one, its in waiting:
            its.set_result((dense, self.table[one.next_ids]))
        return answer


_server = _Server()


def _rows(ids: Tensor) -> Tensor:
    return _server.table[ids]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch has not typed it
def _step(gradient: Tensor, ids: Tensor, rows: Tensor, next_ids: Tensor) -> torch.futures.Future[tuple[Tensor, Tensor]]:
    return _server.step(_Push(gradient, ids, rows, next_ids))


@dataclass(frozen=True, slots=True)
class _Batch:
    """One trainer's share. `of_server`: positions among `unique` ids of each server's, and their rows there."""

    inverse: Tensor
    num_ids: int
    of_server: list[tuple[Tensor, Tensor]]
    dense: Tensor
    label: Tensor


class RpcTrainer:
    """One trainer; rank 0 owns the other processes."""

    def __init__(self, workload: Workload, options: Options, cluster: Cluster) -> None:
        torch.set_num_threads(1)
        self._others = OtherRanks(options, cluster) if options.rank == 0 else None
        _join(options, cluster)
        self._servers = [f"server{number}" for number in range(len(cluster.servers))]
        self._workload, self._model = workload, modules.network(workload)
        self._body: list[Tensor] = list(self._model.body.parameters())
        shares = [share(batch, options.rank, len(cluster.trainers)) for batch in modules.tensors(workload)]
        self._batches = [_prepared(share, len(self._servers)) for share in shares]
        self._next, self._waited_s, self._run_s = 0, 0.0, 1.0
        first = self._batches[0]
        asked = [rpc.rpc_async(s, _rows, args=(ids,)) for s, (_, ids) in zip(self._servers, first.of_server)]  # noqa: B905
        self._rows = _put(first, [one.wait() for one in asked], workload.weights["table"].shape[1])

    def run(self, num_steps: int) -> float:
        """Train on every trainer; return the last loss, of the whole batch."""
        if self._others is not None:
            self._others.pass_on({"run": num_steps})
        begin, self._waited_s, loss = time.perf_counter(), 0.0, 0.0
        for step in range(num_steps):
            value = self._step()
            if fetches(step, num_steps):
                loss = value.item()
        self._run_s = time.perf_counter() - begin
        return mean_loss(loss, self._others)

    def exposed_share(self) -> float:
        """Return the share of the last turn in which the trainer waited for its servers: nothing else runs then."""
        return self._waited_s / self._run_s

    def _step(self) -> Tensor:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        after = self._batches[self._next % len(self._batches)]
        rows = self._rows.requires_grad_()
        features = torch.cat([rows[batch.inverse].flatten(1), batch.dense], dim=1)
        loss = modules.loss_of(self._model.body(features), batch.label)
        *dense, of_rows = torch.autograd.grad(loss, [*self._body, rows])
        gradients = parameters_to_vector(dense).tensor_split(len(self._servers))
        begin = time.perf_counter()
        answers = [
            rpc.rpc_async(
                name, _step, args=(gradients[at].clone(), batch.of_server[at][1], of_rows[batch.of_server[at][0]],
                                   after.of_server[at][1]),
            )
            for at, name in enumerate(self._servers)
        ]  # fmt: skip
        values = [answer.wait() for answer in answers]
        self._waited_s += time.perf_counter() - begin
        vector_to_parameters(torch.cat([dense for dense, _ in values]), self._model.body.parameters())
        self._rows = _put(after, [found for _, found in values], rows.shape[1])
        return loss.detach()

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        values = modules.trained(self._workload, dict(self._model.named_parameters()))
        return movements(self._workload, {**values, "table": self._table()})

    def _table(self) -> Array:
        rows = looked_up(self._workload, "table")
        table: Array = np.array(self._workload.weights["table"])
        for number, name in enumerate(self._servers):
            mine = rows[rows % len(self._servers) == number]
            table[mine] = rpc.rpc_sync(name, _rows, args=(torch.tensor(mine // len(self._servers)),)).numpy()
        return table

    def close(self) -> None:
        """End the servers."""
        if self._others is not None:
            self._others.end_trainers()
        rpc.shutdown()
        if self._others is not None:
            self._others.wait()


def _prepared(batch: dict[str, Tensor], num_servers: int) -> _Batch:
    ids, inverse = torch.unique(batch["ids"], return_inverse=True)
    positions = [(ids % num_servers == server).nonzero().flatten() for server in range(num_servers)]
    of_server = [(at, ids[at] // num_servers) for at in positions]
    return _Batch(inverse, len(ids), of_server, batch["dense"], batch["label"])


def _put(batch: _Batch, rows: list[Tensor], width: int) -> Tensor:
    whole = torch.empty(batch.num_ids, width)
    for (at, _), found in zip(batch.of_server, rows, strict=True):
        whole[at] = found
    return whole


def _join(options: Options, cluster: Cluster) -> None:
    os.environ.update(TP_SOCKET_IFNAME=cluster.interface, GLOO_SOCKET_IFNAME=cluster.interface)
    trainers = len(cluster.trainers)
    name = f"trainer{options.rank}" if options.rank < trainers else f"server{options.rank - trainers}"
    chosen: Any = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{options.folder / 'meet'}",
        num_worker_threads=max(2, trainers),
        rpc_timeout=LIMIT_S,
        _transports=["uv"],
        _channels=["mpt_uv", "basic"],
    )
    rpc.init_rpc(name, rank=options.rank, world_size=len(cluster.hosts), rpc_backend_options=chosen)  # type: ignore[no-untyped-call] # torch's


def make(options: Options) -> RpcTrainer | Served:
    """Build one trainer, or serve; rank 0 starts the others."""
    cluster = of(options)
    workload, num_trainers = Workload.load(options.workload), len(cluster.trainers)
    if options.rank < num_trainers:
        return RpcTrainer(workload, options, cluster)
    torch.set_num_threads(1)
    _server.load(workload, options.rank - num_trainers, len(cluster.servers), num_trainers)
    _join(options, cluster)
    rpc.shutdown()  # waits for the trainers'
    return Served()
