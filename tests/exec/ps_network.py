"""A program with a table and a weight, cut over servers by rows, and its storages: what tests of servers stand on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import penstock as fluid
from penstock.ps.remote import PsMode
from penstock.ps.storage import Gradient
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage
from penstock.transpile.dispatch import VarBlock, slice_variable
from penstock.transpile.partition import Partition
from penstock.transpile.placement import Placed, Placement
from penstock.transpile.pserver import pserver_program, pserver_startup

HEIGHT, WIDTH, OUT, ROWS = 23, 5, 3, 6
Make = Callable[[], Any]


@dataclass(frozen=True)
class Network:
    """A minimised program, as a user has it before it is distributed."""

    main: Any
    startup: Any
    loss: Any
    dtype: str

    def partition(self) -> Partition:
        return Partition(self.main)


@functools.cache  # recording takes longer than all that is done with it
def network(make: Make, *, is_sparse: bool, dtype: str = "float32", seed: int = 4) -> Network:
    """Return a network with the parameters `table` [23, 5] and `weight` [5, 3]; `make` gives its optimizer.

    Nobody may change it: who asks again is given the same.
    """
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = seed
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        ids, label = fluid.data("ids", [-1, 2], "int64"), fluid.data("label", [-1, OUT], dtype)
        rows = fluid.embedding(ids, [HEIGHT, WIDTH], is_sparse, param_attr="table", dtype=dtype)
        out = L.fc(L.reduce_sum(rows, 1), OUT, param_attr="weight", bias_attr=False)
        loss = L.mean(L.square_error_cost(out, label))
        make().minimize(loss)
    return Network(main, startup, loss, dtype)


def feeds(number: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield batches whose ids repeat, and never name the last two rows."""
    draw = np.random.default_rng(2)
    for _ in range(number):
        yield {
            "ids": draw.integers(0, HEIGHT - 2, size=(ROWS, 2)),
            "label": draw.normal(size=(ROWS, OUT)).astype(dtype),
        }


def placement(partition: Partition, num_servers: int) -> Placement:
    """Cut each parameter that may be cut into one block a server, however small."""
    endpoints = tuple(f"127.0.0.1:{7000 + i}" for i in range(num_servers))
    placed = []
    for update in partition.updates:
        if update.row_wise and not update.distributed:
            blocks = slice_variable(update.parameter, update.shape, num_servers, 1)
        else:
            blocks = [VarBlock(update.parameter, 0, 0, update.shape[0], update.numel, whole=True)]
        where = [(b, endpoints[i % num_servers]) for i, b in enumerate(blocks)]
        where = [(blocks[0], e) for e in endpoints] if update.distributed else where
        placed += [Placed(b, e, update.parameter, update.gradient, update.sparse, update.distributed) for b, e in where]
    return Placement(endpoints, tuple(placed))


@dataclass(frozen=True)
class Server:
    """One server: its program, its scope and its storage."""

    program: Any
    scope: Scope
    storage: ProgramStorage


@dataclass(frozen=True)
class Servers:
    """The servers of one job, pushed to and read as trainers would."""

    net: Network
    partition: Partition
    placement: Placement
    all: Sequence[Server]

    def begin_round(self) -> None:
        for server in self.all:
            server.storage.begin_round()

    def push(self, parameter: str, sent: Sequence[Any], trainer: int | None = None, *, together: bool = False) -> None:
        """Push a whole gradient, cut as the placement says: [dense], or [rows, values].

        `together`: as updates of several blocks are applied.
        """
        for placed in self.placement.of_parameter(parameter):
            first, end = placed.block.first_row, placed.block.first_row + placed.block.num_rows
            if placed.sparse:
                rows, values = sent
                mine = (rows >= first) & (rows < end)
                gradient = Gradient(values[mine], rows[mine] - first, trainer)
            else:
                gradient = Gradient(sent[0][first:end].clone(), None, trainer)
            if together:
                self.of(placed).update_all({placed.name: gradient})
            else:
                self.of(placed).update(placed.name, gradient)

    def of(self, placed: Placed) -> ProgramStorage:
        return self.all[self.placement.endpoints.index(placed.endpoint)].storage

    def value(self, parameter: str) -> torch.Tensor:
        """Return a parameter put together again."""
        return torch.cat([self.of(p).value(p.name) for p in self.placement.of_parameter(parameter)])


def serve(net: Network, num_servers: int, mode: PsMode = "sync", *, dc_asgd: bool = False) -> Servers:
    """Return started servers of a network."""
    partition = net.partition()
    where, exe, made = placement(partition, num_servers), fluid.Executor(), []
    for endpoint in where.endpoints:
        program = pserver_program(
            partition, where, endpoint, startup=net.startup, mode=mode, num_trainers=2, dc_asgd=dc_asgd
        )
        scope = Scope()
        exe.run(pserver_startup(program, net.startup), scope=scope)
        made.append(Server(program, scope, ProgramStorage(program, scope)))
    return Servers(net, partition, where, made)


class Local:
    """The same network trained by an Executor, which tells the gradients of each step."""

    def __init__(self, net: Network) -> None:
        self.net, self.scope, self.exe = net, Scope(), fluid.Executor()
        self.exe.run(net.startup, scope=self.scope)
        self._updates = net.partition().updates

    def step(self, feed: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        """Run one step; return what a trainer would send, by parameter."""
        names = [name for update in self._updates for name in update.sent]
        fetched = iter(self.exe.run(self.net.main, feed, names, scope=self.scope))
        return {u.parameter: [torch.from_numpy(next(fetched)) for _ in u.sent] for u in self._updates}

    def value(self, parameter: str) -> torch.Tensor:
        found = self.scope.find(parameter)
        assert found is not None, parameter
        return found
