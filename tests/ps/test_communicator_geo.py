"""GEO: local training, exchanged every N steps, with the rest at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.ps.communicator_harness import Make, away, communicators, ones, zeros
from tests.ps.fake_servers import FakeServers

from penstock.errors import Unavailable
from penstock.ps.communicators.geo import GeoCommunicator


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
    servers.values["w"] += 10.0  # another trainer's
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
    servers.values["w"] = servers.values["w"] + 10.0  # another trainer's
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
