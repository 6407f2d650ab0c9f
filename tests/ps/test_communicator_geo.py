"""GEO: local training, exchanged every N steps, with the rest at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ps.communicator_harness import WAIT_S, Gate, Make, away, communicators, ones, zeros
from tests.ps.fake_servers import FakeServers
from tests.support.remotes import remotes_of_a_test

from penstock.errors import FeedError, Unavailable
from penstock.native.channels import incoming, outgoing
from penstock.ps import remote_ops
from penstock.ps.communicator import remotes
from penstock.ps.communicators.geo import GeoCommunicator

OPS = torch.ops.penstock
assert {"geo", "geo_step"} <= remote_ops.REMOTE_NAMES, "registered by its import"


@pytest.fixture
def opened() -> Iterator[Make]:
    """Make communicators that are closed at the end."""
    with communicators() as make:
        yield make


def geo_steps(trainer: Any, parameter: torch.Tensor, num: int) -> None:
    """Train a dense parameter of one block locally."""
    for step in range(num):
        parameter -= 0.1 * (step + 1)
        trainer.geo("w", ["w"], [0], [2], parameter, None)


def test_geo_with_one_trainer_and_n_of_1_is_local_bit_for_bit(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=1)
    parameter, local = ones(0.0)[0], ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    geo_steps(trainer, parameter, 20)
    for step in range(20):
        local -= 0.1 * (step + 1)
    trainer.close()
    assert torch.equal(parameter, local)
    assert torch.allclose(servers.values["w"], local, rtol=0, atol=1e-12)


def test_geo_exchanges_every_n_steps_and_flushes_at_the_end(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=10)
    parameter = ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    geo_steps(trainer, parameter, 25)
    trainer.close()
    assert servers.calls.count("send w") == 3
    assert torch.allclose(servers.values["w"], parameter, rtol=0, atol=1e-12)
    assert trainer.counters.rows()["", "w"].sent_bytes == 3 * parameter.nbytes


def test_geo_tells_its_share_and_takes_over_what_others_did(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=1, trainers=2)
    parameter = ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    servers.add_by_others("w", 10.0)
    parameter += 4.0
    trainer.geo("w", ["w"], [0], [2], parameter, None)
    trainer.close()
    assert servers.values["w"].tolist() == [12, 12]  # a half of 4
    assert parameter.tolist() == [14, 14]


def test_geo_without_a_startup_program_starts_from_the_servers(opened: Make) -> None:
    servers = FakeServers({"w": torch.full((2,), 7.0, dtype=torch.float64)}, geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=1)
    parameter = torch.full((2,), 8.0, dtype=torch.float64)
    trainer.geo("w", ["w"], [0], [2], parameter, None)
    trainer.close()
    assert servers.values["w"].tolist() == [8, 8]


@pytest.mark.parametrize("untold_steps", [0, 1])
def test_geo_restarts_from_values_that_a_startup_program_pulls(opened: Make, untold_steps: int) -> None:
    servers = FakeServers(zeros(), geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=2, trainers=2)
    parameter = ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    for _ in range(2 + untold_steps):
        parameter += 1.0
        trainer.geo("w", ["w"], [0], [2], parameter, None)
    servers.add_by_others("w", 10.0)
    parameter.fill_(-5.0)  # the startup program's initialiser
    trainer.recv("w", ["w"], [0], [parameter])
    assert parameter.tolist() == [11, 11]
    for _ in range(2):
        parameter += 4.0
        trainer.geo("w", ["w"], [0], [2], parameter, None)
    trainer.close()
    assert servers.values["w"].tolist() == [15, 15]  # a half of 8


def test_geo_tells_the_union_of_touched_rows_in_each_block(opened: Make) -> None:
    blocks = {"t.block0": torch.zeros(3, 1), "t.block1": torch.zeros(2, 1)}
    servers = FakeServers(blocks, geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=2)
    table = torch.zeros(5, 1)
    trainer.recv("t", list(blocks), [0, 1], [table[:3], table[3:]])
    for ids in ([4, 1, 1], [4, 0]):
        rows = torch.tensor(ids)
        table.index_add_(0, rows, torch.ones(len(ids), 1))
        trainer.geo("t", list(blocks), [0, 1], [3, 2], table, rows)
    servers.change_by_others("t.block1", torch.tensor([0]), torch.tensor([[9.0]]))
    trainer.geo("t", list(blocks), [0, 1], [3, 2], table, torch.tensor([2]))
    trainer.close()
    assert [rows.tolist() for rows, _ in servers.row_pushes] == [[0, 1, 4], [2]]
    assert servers.values["t.block0"].flatten().tolist() == [1, 2, 0]
    assert servers.values["t.block1"].flatten().tolist() == [9, 2]


def test_geo_takes_over_only_the_rows_that_others_changed(opened: Make) -> None:
    servers = FakeServers({"t": torch.zeros(3, 1)}, geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=1, trainers=2)
    table = torch.zeros(3, 1)
    trainer.recv("t", ["t"], [0], [table])
    servers.change_by_others("t", torch.tensor([1, 2]), torch.tensor([[5.0], [6.0]]))
    table[1] += 2.0
    trainer.geo("t", ["t"], [0], [3], table, torch.tensor([1]))
    trainer.geo("t", ["t"], [0], [3], table, torch.tensor([1]))
    assert table.flatten().tolist() == [0, 7, 6]


def test_a_geo_exchange_that_fails_ends_the_next_step_by_name(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    servers.before_push = away
    trainer = opened(GeoCommunicator, servers, push_every=1)
    parameter = ones(0.0)[0]
    trainer.geo("w", ["w"], [0], [2], parameter, None)
    with pytest.raises(Unavailable, match=r"'w'.*host:1"):
        trainer.geo("w", ["w"], [0], [2], parameter, None)


def test_an_exchange_holds_up_no_step_before_the_next(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    gate = servers.before_push = Gate("w")
    trainer = opened(GeoCommunicator, servers, push_every=4, trainers=2)
    parameter = ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    servers.add_by_others("w", 10.0)
    for _ in range(7):
        parameter += 1.0
        trainer.geo("w", ["w"], [0], [2], parameter, None)
    assert gate.arrived.acquire(timeout=WAIT_S)
    assert parameter.tolist() == [7, 7]  # the exchange of the fourth step has not ended
    gate.opened.set()
    parameter += 1.0
    trainer.geo("w", ["w"], [0], [2], parameter, None)  # the eighth begins the next one
    assert parameter.tolist() == [18, 18]  # 8 steps of its own, 10 of the other
    trainer.close()


class Operators:
    """Steps of a table of two blocks and a vector, by the operators of a program. `by_python`: steps that called it."""

    def __init__(self, opened: Make, push_every: int) -> None:
        blocks = {"t.block0": torch.zeros(3, 1), "t.block1": torch.zeros(2, 1)}
        self.servers = FakeServers({**blocks, **zeros()}, geo=True)
        self.trainer = opened(GeoCommunicator, self.servers, push_every=push_every)
        self.remote, self.by_python = str(self.trainer.descriptor), 0
        self.table, self.vector = torch.zeros(5, 1), ones(0.0)[0]
        self.spec = '[[["t.block0", "t.block1"], [0, 1], [3, 2]], [["w"], [0], [2]]]'
        step = self.trainer.geo_step

        def counted(calls: Any) -> None:
            self.by_python += 1
            step(calls)

        self.trainer.geo_step = counted
        self.has_news, notify = threading.Event(), self.trainer._notify

        def notified(names: Any) -> None:
            notify(names)
            self.has_news.set()

        self.trainer._notify = notified
        remotes.opener = lambda _: self.trainer

    def train(self, *ids: list[int]) -> None:
        rows = [torch.tensor(of).reshape(-1, 1) for of in ids]
        for of in rows:
            self.table.index_add_(0, of.flatten(), torch.ones(len(of), 1))
        self.vector += 1.0
        OPS.geo_step([self.table, self.vector], rows, self.remote, ["t", "w"], [len(rows), 0], self.spec)


@pytest.fixture
def operators(opened: Make) -> Iterator[Callable[[int], Operators]]:
    with remotes_of_a_test():
        yield lambda push_every: Operators(opened, push_every)


def test_steps_between_exchanges_need_no_python(operators: Callable[[int], Operators]) -> None:
    job = operators(10)
    for _ in range(9):
        job.train([4, 1], [1])
    assert job.by_python == 1, "the first, which asks where the trainer begins"
    assert job.trainer.queue_depths() == {"t": 9, "w": 9}
    job.train([0])
    assert job.has_news.wait(WAIT_S) and job.by_python == 2, "the tenth exchanges"
    job.train([3])
    assert job.by_python == 3, "the next takes in what came"
    for _ in range(5):
        job.train([3])
    assert job.by_python == 3
    job.trainer.close()
    assert [rows.tolist() for rows, _ in job.servers.row_pushes] == [[0, 1, 4], [3]]
    assert torch.cat([job.servers.values[f"t.block{i}"] for i in range(2)]).equal(job.table)
    assert job.servers.values["w"].equal(job.vector)


def test_a_single_operator_counts_as_a_whole_step_does(operators: Callable[[int], Operators]) -> None:
    job = operators(3)
    for _ in range(2):
        OPS.geo(job.table, torch.tensor([1, 4]), job.remote, "t", ["t.block0", "t.block1"], [0, 1], [3, 2])
    assert (job.by_python, job.trainer.queue_depths()) == (1, {"t": 2})
    with pytest.raises(FeedError, match="id 5 is no row of the table 't', which has 5"):
        OPS.geo(job.table, torch.tensor([5]), job.remote, "t", ["t.block0", "t.block1"], [0, 1], [3, 2])
    assert job.trainer.queue_depths() == {"t": 2}, "a step that fails is none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, torch.tensor([1, 4, 6])])
def test_shares_of_progress_are_torchs_to_the_bit(dtype: torch.dtype, rows: torch.Tensor | None) -> None:
    random = torch.Generator().manual_seed(3)
    parameter, old, server = (torch.randn(7, 5, generator=random).to(dtype) for _ in range(3))
    chosen = slice(None) if rows is None else rows
    server = server[chosen]
    expected = (parameter[chosen] - old[chosen]) / 3
    before = old.clone()
    before[chosen] += expected
    assert torch.equal(outgoing(parameter, old, rows, 3), expected)
    assert torch.equal(old, before)
    mine = parameter.clone()
    mine[chosen] += server - old[chosen]
    before[chosen] = server
    incoming(parameter, old, rows, server)
    assert torch.equal(parameter, mine) and torch.equal(old, before)


def test_rows_that_a_table_lacks_change_nothing() -> None:
    parameter, old = torch.ones(4, 2), torch.zeros(4, 2)
    for wrong in ([4], [-1]):
        with pytest.raises(IndexError, match="from 0 to 3"):
            outgoing(parameter, old, torch.tensor(wrong), 1)
        with pytest.raises(IndexError, match="from 0 to 3"):
            incoming(parameter, old, torch.tensor(wrong), torch.ones(1, 2))
    assert parameter.eq(1).all() and old.eq(0).all()


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3), (8,)])
def test_an_old_value_of_other_sizes_is_refused(sizes: tuple[int, ...]) -> None:
    parameter, old = torch.ones(4, 2), torch.zeros(sizes)
    with pytest.raises(ValueError, match="have other sizes"):
        outgoing(parameter, old, None, 1)
    with pytest.raises(ValueError, match="have other sizes"):
        incoming(parameter, old, None, torch.ones(4, 2))
    assert parameter.eq(1).all() and old.eq(0).all()


def test_flush_sends_the_steps_so_far_and_training_goes_on(opened: Make) -> None:
    servers = FakeServers(zeros(), geo=True)
    trainer = opened(GeoCommunicator, servers, push_every=10)
    parameter = ones(0.0)[0]
    trainer.recv("w", ["w"], [0], [parameter])
    geo_steps(trainer, parameter, 13)
    trainer.flush()
    assert torch.allclose(servers.values["w"], parameter, rtol=0, atol=1e-12)
    geo_steps(trainer, parameter, 4)
    trainer.close()
    assert torch.allclose(servers.values["w"], parameter, rtol=0, atol=1e-12)
