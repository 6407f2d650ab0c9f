"""A parameter server on torch.distributed.rpc (TensorPipe): one server and one trainer, in step.

Written as PyTorch's tutorials on parameter servers do it, with one call a step: it carries the gradients and the ids of
the next batch there, and the new parameters and the next batch's rows back. Duplicate ids are looked up once.
Rank 0 trains and is the process that the parent talks to; rank 1 serves. They meet through a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from bench.models import modules
from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, looked_up, movements
from bench.workloads.workload import Array, Workload

SERVER = "server"


class _Served:
    """Parameters and table on the server. One trainer, so one call at a time."""

    dense: list[Tensor]
    table: Tensor
    rate: float

    def load(self, path: str, threads: int) -> None:
        """Take the workload's values."""
        torch.set_num_threads(threads)
        workload = Workload.load(Path(path))
        model = modules.network(workload)
        self.dense = [parameter.detach() for parameter in model.body.parameters()]
        self.table = torch.tensor(workload.weights["table"])
        self.rate = workload.learning_rate

    def rows(self, ids: Tensor) -> Tensor:
        """Look up."""
        return self.table[ids]

    def step(self, gradients: list[Tensor], ids: Tensor, rows: Tensor, next_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Update everything; return the parameters and the rows of the next batch."""
        torch._foreach_add_(self.dense, gradients, alpha=-self.rate)
        self.table.index_add_(0, ids, rows, alpha=-self.rate)
        return self.dense, self.table[next_ids]


_served = _Served()


def _load(path: str, threads: int) -> None:
    _served.load(path, threads)


def _rows(ids: Tensor) -> Tensor:
    return _served.rows(ids)


def _step(gradients: list[Tensor], ids: Tensor, rows: Tensor, next_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    return _served.step(gradients, ids, rows, next_ids)


class RpcTrainer:
    """The trainer; owns the server's process."""

    def __init__(self, workload: Workload, options: Options) -> None:
        torch.set_num_threads(options.cores)
        self._server = _start(options)
        _join("trainer", 0, options)
        rpc.rpc_sync(SERVER, _load, args=(str(options.workload), options.cores))
        self._workload, self._model = workload, modules.network(workload)
        self._body: list[Tensor] = list(self._model.body.parameters())
        self._batches = [_prepared(batch) for batch in modules.tensors(workload)]
        self._next = 0
        self._rows: Tensor = rpc.rpc_sync(SERVER, _rows, args=(self._batches[0][0],))

    def run(self, num_steps: int) -> float:
        """Train; return the last loss."""
        loss = 0.0
        for step in range(num_steps):
            value = self._step()
            if fetches(step, num_steps):
                loss = value.item()
        return loss

    def _step(self) -> Tensor:
        ids, inverse, dense, label = self._batches[self._next % len(self._batches)]
        self._next += 1
        rows = self._rows.requires_grad_()
        features = torch.cat([rows[inverse].flatten(1), dense], dim=1)
        loss = modules.loss_of(self._model.body(features), label)
        gradients = torch.autograd.grad(loss, [*self._body, rows])
        next_ids = self._batches[self._next % len(self._batches)][0]
        values, self._rows = rpc.rpc_sync(SERVER, _step, args=(list(gradients[:-1]), ids, gradients[-1], next_ids))
        with torch.no_grad():
            torch._foreach_copy_(self._body, values)
        return loss.detach()

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved."""
        values = modules.trained(self._workload, dict(self._model.named_parameters()))
        return movements(self._workload, {**values, "table": _table(self._workload)})

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        rpc.shutdown()
        self._server.wait()


def _table(workload: Workload) -> Array:
    """Fetch the rows that count of the table on the server."""
    rows = looked_up(workload, "table")
    table: Array = np.array(workload.weights["table"])
    table[rows] = rpc.rpc_sync(SERVER, _rows, args=(torch.tensor(rows),)).numpy()
    return table


def _prepared(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, inverse = torch.unique(batch["ids"], return_inverse=True)
    return ids, inverse, batch["dense"], batch["label"]


def _join(name: str, rank: int, options: Options) -> None:
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chosen: Any = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{options.folder / 'meet'}", num_worker_threads=2)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=chosen)  # type: ignore[no-untyped-call] # torch's


def _start(options: Options) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.peers.serve", "torch_rpc_ps", "--workload", str(options.workload)]
    command += ["--folder", str(options.folder), "--cores", str(options.cores), "--rank", "1"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


class _Server:
    """Rank 1: serves until the trainer shuts both down."""

    def __init__(self, options: Options) -> None:
        _join(SERVER, 1, options)
        rpc.shutdown()  # waits for the trainer's

    def run(self, num_steps: int) -> float:
        """Not called."""
        raise RuntimeError(f"the server is asked to train {num_steps} steps")

    def check(self) -> None:
        """Not called."""

    def movements(self) -> dict[str, Movement]:
        """Not called."""
        return {}

    def close(self) -> None:
        """It has ended."""


def make(options: Options) -> RpcTrainer | _Server:
    """Build one rank; rank 0 starts the other."""
    return _Server(options) if options.rank else RpcTrainer(Workload.load(options.workload), options)
