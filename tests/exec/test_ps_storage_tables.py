"""Tables spread over servers by id, against a dense table with the same updates on the ids that were touched.

float32: the table adds duplicates in another order than the whole program does; 1e-6 after four steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.exec.ps_network import HEIGHT, WIDTH, Local, Network, feeds, network, placement

import penstock as fluid
from penstock.errors import ProgramError
from penstock.ps.rows import server_of
from penstock.ps.storage import Gradient
from penstock.ps.table import SparseTable, TableFull
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage
from penstock.transpile.partition import Partition
from penstock.transpile.pserver import pserver_program, pserver_startup
from penstock.transpile.tables import capacity_of

OPT: Any = fluid.optimizer
BIG = torch.tensor([2**62, -5, 0, 2**63 - 1, -(2**63)])


def decayed(make: Callable[..., Any]) -> Callable[[], Any]:
    L: Any = fluid.layers
    return lambda: make(L.exponential_decay(0.05, 2, 0.5), regularization=fluid.regularizer.L1Decay(0.02))


RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: OPT.SGD(0.05),
    "Adagrad": lambda: OPT.Adagrad(0.05, initial_accumulator_value=0.1),
    "Adam": lambda: OPT.Adam(0.05),
    "Adam on a schedule": lambda: OPT.Adam(fluid.layers.exponential_decay(0.05, 2, 0.5)),
    "SGD with decay": decayed(OPT.SGD),
    "Momentum": lambda: OPT.Momentum(0.05, 0.9),
    "DecayedAdagrad": lambda: OPT.DecayedAdagrad(0.05),
    "AdamW": lambda: OPT.AdamW(0.05),
    "Adamax": lambda: OPT.Adamax(0.05),
    "RMSProp": decayed(lambda rate, **more: OPT.RMSProp(rate, momentum=0.9, centered=True, **more)),
    "Ftrl": lambda: OPT.Ftrl(0.05, l1=0.01, l2=0.1),
}


@dataclass
class Spread:
    """The servers of one distributed table."""

    storages: list[ProgramStorage]

    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        at = torch.from_numpy(server_of(ids.numpy(), len(self.storages)))
        for number, storage in enumerate(self.storages):
            mine = at == number
            storage.update("table", Gradient(values[mine], ids[mine]))

    def rows(self, ids: torch.Tensor, *, create: bool = True) -> torch.Tensor:
        out = torch.empty(len(ids), WIDTH)
        at = torch.from_numpy(server_of(ids.numpy(), len(self.storages)))
        for number, storage in enumerate(self.storages):
            out[at == number] = storage.rows("table", ids[at == number], create=create)
        return out

    def begin_round(self) -> None:
        for storage in self.storages:
            storage.begin_round()


def spread(
    net: Network, num_servers: int, mode: Any = "sync", clock: Callable[[], float] = time.monotonic, **said: Any
) -> Spread:
    """Serve the network's table as a distributed one. `said`: what its description says beside that."""
    main = net.main.clone()
    main.variables["table"] = replace(main.variables["table"], distributed=True, **said)
    partition = Partition(main)
    where, storages = placement(partition, num_servers), []
    for endpoint in where.endpoints:
        program = pserver_program(partition, where, endpoint, startup=net.startup, mode=mode, num_trainers=1)
        assert fluid.Program.parse(str(program)) == program
        scope = Scope()
        fluid.Executor().run(pserver_startup(program, net.startup), scope=scope)
        storages.append(ProgramStorage(program, scope, clock=clock))
    return Spread(storages)


@pytest.mark.parametrize("kind", list(RULES))
def test_a_table_trains_as_a_dense_parameter_does(kind: str) -> None:
    net = network(RULES[kind], is_sparse=True)
    for num_servers in (1, 2):
        local, servers = Local(net), spread(net, num_servers)
        ids = torch.arange(HEIGHT)
        first = servers.rows(ids)
        local.value("table").copy_(first)
        for feed in feeds(4, "float32"):
            rows, values = local.step(feed)["table"]
            servers.begin_round()
            servers.push(rows, values)
        assert torch.allclose(servers.rows(ids), local.value("table"), rtol=1e-5, atol=1e-6)
        assert not torch.equal(servers.rows(ids), first)


@pytest.mark.parametrize(("kind", "is_native"), [("SGD", True), ("Adagrad", True), ("Adam", True), ("Momentum", False)])
def test_the_table_itself_applies_the_rules_that_it_knows(
    kind: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = spread(network(RULES[kind], is_sparse=True), 1)
    called: list[str] = []
    original = SparseTable.update

    def noted(table: SparseTable, *push: Any, now: int) -> None:
        called.append(table.settings.name)
        original(table, *push, now=now)

    monkeypatch.setattr(SparseTable, "update", noted)
    servers.begin_round()
    servers.push(BIG, torch.ones(len(BIG), WIDTH))
    assert called == ([] if is_native else ["table"])


def test_any_int64_is_an_id_and_new_rows_are_in_the_init_range() -> None:
    servers = spread(network(RULES["Adam"], is_sparse=True), 2)
    limit = (6.0 / (HEIGHT + WIDTH)) ** 0.5  # Xavier's
    first = servers.rows(BIG)
    assert bool((first.abs() <= limit).all())
    assert float(first.std()) > limit / 4
    servers.begin_round()
    servers.push(BIG[:2], torch.ones(2, WIDTH))
    after = servers.rows(BIG)
    assert bool((after[:2] < first[:2]).all())
    assert torch.equal(after[2:], first[2:])


def test_rows_of_a_truncated_normal_stay_within_two_deviations() -> None:
    net = network(RULES["SGD"], is_sparse=True)
    made = next(i for i, op in enumerate(net.startup.operators) if "table" in op.output_names())
    old = net.startup.operators[made]
    args = (old.args[0], 1.0, 0.25, *old.args[3:])
    net.startup.operators[made] = replace(old, type="penstock.truncated_normal.default", args=args)
    first = spread(net, 1).rows(torch.arange(HEIGHT) * 10**9)
    assert 0.5 <= float(first.min()) < 0.7
    assert 1.3 < float(first.max()) <= 1.5
    assert 0.15 < float(first.std()) < 0.25


def test_another_start_of_a_server_draws_the_same_rows() -> None:
    for seed in (0, 7):
        one, other = (spread(network(RULES["Adam"], is_sparse=True, seed=seed), n).rows(BIG) for n in (1, 3))
        assert torch.equal(one, other)


def test_one_id_more_than_dict_size_is_an_error_that_says_so() -> None:
    servers = spread(network(RULES["SGD"], is_sparse=True), 1)
    servers.rows(torch.arange(HEIGHT) * 10**12)
    with pytest.raises(TableFull, match=r"dict_size"):
        servers.rows(torch.tensor([-7]))


def test_dict_size_ids_fit_however_they_spread() -> None:
    for dict_size, num_servers in ((10, 3), (1000, 4), (10**6, 7)):
        ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, dict_size)
        most = int(np.bincount(server_of(ids, num_servers)).max())
        assert most <= capacity_of(dict_size, num_servers) <= dict_size
    assert capacity_of(10**8, 1) == 10**8
    assert capacity_of(10**8, 4) < 1.002 * 10**8 / 4


def test_state_comes_back_on_another_number_of_servers() -> None:
    net = network(RULES["RMSProp"], is_sparse=True)
    servers = spread(net, 2)
    servers.begin_round()
    servers.push(BIG, torch.ones(len(BIG), WIDTH))
    again = spread(network(RULES["RMSProp"], is_sparse=True, seed=9), 3)
    saved = [item for storage in servers.storages for item in storage.state()]
    for storage in again.storages:
        for name, tensors in saved:
            storage.restore(name, tensors)
    for each in (servers, again):
        each.begin_round()
        each.push(BIG, torch.full((len(BIG), WIDTH), -0.5))
    assert torch.equal(servers.rows(BIG, create=False), again.rows(BIG, create=False))
    assert sum(len(t["ids"]) for s in again.storages for n, t in s.state() if "ids" in t) == len(BIG)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "Momentum"])
def test_an_id_gets_a_row_after_the_programs_number_of_updates(kind: str) -> None:
    servers = spread(network(RULES[kind], is_sparse=True), 2, admit_after=3)
    first = servers.rows(BIG)
    for _ in range(2):
        servers.begin_round()
        servers.push(BIG, torch.ones(len(BIG), WIDTH))
        assert torch.equal(servers.rows(BIG), first)
    servers.begin_round()
    servers.push(BIG[:2], torch.ones(2, WIDTH))
    after = servers.rows(BIG)
    assert bool((after[:2] != first[:2]).all())
    assert torch.equal(after[2:], first[2:])
    assert sum(len(t["ids"]) for s in servers.storages for _, t in s.state() if "ids" in t) == 2


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "Momentum"])
def test_rows_unused_for_long_are_dropped_and_reinitialised(kind: str) -> None:
    at = [1000.0]
    servers = spread(network(RULES[kind], is_sparse=True), 1, clock=lambda: at[0], expire_after_s=60.0)
    (storage,) = servers.storages
    first = servers.rows(BIG)
    servers.begin_round()
    servers.push(BIG, torch.ones(len(BIG), WIDTH))
    trained = servers.rows(BIG)
    at[0] += 40
    servers.push(BIG[:1], torch.zeros(1, WIDTH))
    servers.rows(BIG[1:2])
    assert storage.expire("table") == 0
    at[0] += 30
    assert storage.expire("table") == len(BIG) - 2
    after = servers.rows(BIG)
    assert torch.equal(after[1], trained[1])
    assert not torch.equal(after[0], first[0])
    assert torch.equal(after[2:], first[2:])


def test_rows_of_a_restart_age_from_the_restart() -> None:
    at = [0.0]
    net = network(RULES["Adam"], is_sparse=True)
    one = spread(net, 1, clock=lambda: at[0], expire_after_s=60.0)
    one.rows(BIG)
    again = spread(net, 1, clock=lambda: at[0], expire_after_s=60.0)
    at[0] += 1000
    for name, tensors in one.storages[0].state():
        again.storages[0].restore(name, tensors)
    at[0] += 60
    assert again.storages[0].expire("table") == 0
    at[0] += 2
    assert again.storages[0].expire("table") == len(BIG)


def test_a_table_of_which_nothing_was_said_keeps_its_rows() -> None:
    at = [0.0]
    servers = spread(network(RULES["SGD"], is_sparse=True), 1, clock=lambda: at[0])
    servers.rows(BIG)
    at[0] += 10**9
    assert servers.storages[0].expire("table") == 0
    assert servers.storages[0].expire(servers.storages[0].blocks()[-1]) == 0


def test_tables_of_immediate_modes_count_their_own_pushes() -> None:
    net = network(RULES["Adam"], is_sparse=True)
    synced, alone = spread(net, 1), spread(net, 1, "async")
    for _ in range(3):
        synced.begin_round()
        for each in (synced, alone):
            each.push(BIG, torch.ones(len(BIG), WIDTH))
    assert torch.equal(synced.rows(BIG), alone.rows(BIG))


@pytest.mark.parametrize(
    ("make", "dtype", "words"),
    [
        (lambda: OPT.LarsMomentum(0.05, 0.9), "float32", "LarsMomentum"),
        (RULES["Adam"], "float64", "float32"),
    ],
)
def test_what_no_table_can_do_is_refused(make: Callable[[], Any], dtype: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        spread(network(make, is_sparse=True, dtype=dtype), 1)


def test_an_initialiser_that_no_row_can_begin_with_is_refused() -> None:
    net = network(RULES["Adam"], is_sparse=True)
    net.startup.operators[:] = [op for op in net.startup.operators if "table" not in op.output_names()]
    with pytest.raises(ProgramError, match="0 operators of the startup program initialise 'table'"):
        spread(net, 1)
