"""Trainers with a device each, as with GPUs: their graphs on CPU tensors, exchanged as NCCL would, between threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.property.networks import Network, conv_net, ctr_dnn
from tests.property.oracle import copy_of, started, value
from torch import Tensor

import penstock as fluid
from penstock.distributed.exchange_ops import exchangers
from penstock.distributed.process_groups import ProcessGroups
from penstock.distributed.ranks import Ranks
from penstock.errors import ProgramError, SpecError, Unavailable
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.exec.trainers import Trainers
from penstock.graph.across import Across
from penstock.graph.devices import build_device_graph
from penstock.graph.passes import PLAIN
from penstock.graph.ssa import Mode
from penstock.scope import Scope

BOUND_S = 60.0
TOLERANCE = 1e-9  # float64
_numbers = itertools.count()


class Table:
    """Where threads put what they exchange."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._put: list[Any] = [None] * count
        self._all_there = threading.Barrier(count, timeout=BOUND_S)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Give something; return what all have given."""
        self._put[rank] = mine
        self._all_there.wait()
        found = list(self._put)
        self._all_there.wait()
        return found


class AmongThreads(ProcessGroups):
    """The exchange of `ProcessGroups`, without a library below."""

    def __init__(self, table: Table, rank: int) -> None:
        self._ranks, self._why, self._table = Ranks(rank, table.count, "nowhere"), "", table
        self._groups, self._levels, self._made_default = [], [], False
        self.names = [f"among threads {next(_numbers)}"]
        exchangers.register(self.names[0], self, 0)

    def _all(self, mine: Tensor, ring: int) -> Tensor:
        return torch.stack(self._table.exchange(self._ranks.rank, mine.clone()))

    def _all_rows(self, mine: Tensor, counts: Any, ring: int) -> Tensor:
        return torch.cat(self._table.exchange(self._ranks.rank, mine.clone()))

    def _reduce(self, flat: Tensor, ring: int) -> None:
        parts = self._table.exchange(self._ranks.rank, flat.clone())
        flat.copy_(torch.stack(parts).sum(0))

    def broadcast(self, tensors: list[Tensor]) -> None:
        first = self._table.exchange(self._ranks.rank, [t.clone() for t in tensors])[0]
        for tensor, given in zip(tensors, first, strict=True):
            tensor.copy_(given)


class ThreadGroup:
    """The trainers, as an executor sees them."""

    kind, rings, cores = "ring", ("not on devices",), 1

    def __init__(self, exchange: AmongThreads, rank: int) -> None:
        self.rank, self._exchange = rank, exchange

    def device_rings(self) -> tuple[str, ...]:
        return tuple(self._exchange.names)

    def check(self) -> None:
        """Nobody is lost here."""

    def broadcast(self, tensors: list[Tensor]) -> None:
        self._exchange.broadcast(tensors)

    def take_part(self, signature: int, idle: Callable[[Tensor], None]) -> None:
        """Nobody ends before the others."""

    def note(self, step: Tensor, steps: int) -> None:
        """As above."""

    def join(self) -> None:
        """As above."""

    def step_failed(self, error: BaseException) -> None:
        raise AssertionError("a step has failed") from error

    def why(self) -> Unavailable | None:
        return None


def executor(network: Network, scope: Scope, trainers: Trainers | None) -> DataParallel:
    memory = ReplicaMemory(scope, (torch.device("cpu"),))
    return DataParallel(
        network.main,
        memory,
        mode="all_reduce",
        num_replicas=1,
        loss_name=network.loss,
        choice=PLAIN,
        cores=1,
        trainers=trainers,
    )


def trained(network: Network, scopes: list[Scope], *, parameters: bool = False, steps: int = 4) -> None:
    """Train a rank in each scope, each on its share of the rows."""
    table = Table(len(scopes))
    exchanges = [AmongThreads(table, rank) for rank in range(len(scopes))]
    groups = [ThreadGroup(exchange, rank) for rank, exchange in enumerate(exchanges)]
    cores = [
        executor(network, scope, Trainers(group, parameters=parameters, on_gpu=True))
        for scope, group in zip(scopes, groups, strict=True)
    ]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for step in range(steps):
                whole = network.feed(6 * len(scopes), step)
                cores[rank].run({n: v[6 * rank : 6 * rank + 6] for n, v in whole.items()}, [])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(scopes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND_S)
    assert not errors
    for core, exchange in zip(cores, exchanges, strict=True):
        core.close()
        exchange.close()


def sparse() -> Network:
    return ctr_dnn("sgd", "float64", metrics=False)


@pytest.mark.parametrize("make", [sparse, lambda: ctr_dnn("adam", "float64", sparse=False, metrics=False)])
def test_two_trainers_with_a_device_each_learn_like_one(make: Callable[[], Network]) -> None:
    network = make()
    start = started(network.startup)
    scopes = [copy_of(start), started(network.startup)]  # the first one's values count
    alone = copy_of(start)
    trained(network, scopes)
    core = executor(network, alone, None)
    for step in range(4):
        core.run(network.feed(12, step), [])
    core.close()
    for name in alone.names():
        wanted, first, second = (value(s, name) for s in (alone, *scopes))
        assert float((wanted.double() - first.double()).abs().max()) <= TOLERANCE, name
        assert torch.equal(first, second), name


def test_one_trainer_with_a_device_equals_a_plain_executor() -> None:
    network = conv_net()
    start = started(network.startup)
    scopes = [copy_of(start), copy_of(start)]
    trained(network, scopes[:1])
    core = executor(network, scopes[1], None)
    for step in range(4):
        core.run(network.feed(6, step), [])
    core.close()
    for name in start.names():
        assert torch.equal(value(scopes[0], name), value(scopes[1], name)), name


def test_parameters_are_averaged_on_devices_too() -> None:
    network = sparse()
    start = started(network.startup)
    scopes = [copy_of(start), copy_of(start)]
    trained(network, scopes, parameters=True)
    for parameter in network.main.parameters():
        assert torch.equal(*(value(scope, parameter.name) for scope in scopes)), parameter.name


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
def test_a_trainer_among_several_with_two_devices_is_refused(mode: Mode) -> None:
    with pytest.raises(ProgramError, match="a trainer among several has one device; this one has 2"):
        build_device_graph(sparse().main, mode=mode, num_replicas=2, active=2, across=Across("group", ("ring",)))


def test_trainers_with_gpus_need_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.distributed.process_groups import NcclGroups

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpecError, match="torch sees no GPU here"):
        NcclGroups(None, "label", None)  # type: ignore[arg-type]  # it looks for GPUs first
    with pytest.raises(SpecError, match="use_cuda=True"):
        fluid.ParallelExecutor(True, loss_name=sparse().loss, main_program=sparse().main, num_trainers=2, trainer_id=0)
