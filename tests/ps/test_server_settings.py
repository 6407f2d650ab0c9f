"""What the environment says, ids over servers, merges, and members of a server that is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import SpecError
from penstock.ps.rounds.machine import Membership, Roster
from penstock.ps.rounds.messages import Barrier, Close, Join, Lost, Refuse, Release, Reply, Tick, TrainerIncarnation
from penstock.ps.rounds.sync import SyncRounds
from penstock.ps.rows import server_of
from penstock.ps.settings import ServerSettings, TlsFiles, TrainerSettings, started_ns
from penstock.ps.state import mean
from penstock.ps.storage import Gradient

THIS: dict[str, Any] = {"endpoint": "h:1", "index": 1, "fanin": 2, "mode": "sync", "num_servers": 3}


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = ServerSettings.from_environ({}, **THIS)
    assert (settings.job, settings.token, settings.epoch, settings.lease_s, settings.start_s) == (
        "local",
        "",
        started_ns(),
        20,
        600,
    )
    assert (settings.state_dir, settings.folder, settings.snapshot_every_s, settings.tls) == (None, None, 60, None)
    trainer = TrainerSettings.from_environ({})
    assert (trainer.job, trainer.epoch, trainer.deadline_s, trainer.tls) == ("local", started_ns(), 30, None)
    assert trainer.lease_s == settings.lease_s
    assert trainer.shared_memory


def test_the_environment_is_read() -> None:
    environ = {
        "PENSTOCK_JOB_ID": "x", "PENSTOCK_PS_TOKEN": "secret", "PENSTOCK_EPOCH": "3", "PENSTOCK_PS_LEASE_S": "2.5",
        "PENSTOCK_PS_STATE_DIR": "/state", "PENSTOCK_PS_SNAPSHOT_S": "9", "PENSTOCK_PS_SAVE_DIRS": "/a:/b",
        "PENSTOCK_CHECKPOINT_DIR": "/of/job",
        "PENSTOCK_PS_TLS_CERT": "c", "PENSTOCK_PS_TLS_KEY": "k", "PENSTOCK_PS_TLS_CA": "ca",
        "PENSTOCK_PS_DEADLINE_S": "4", "PENSTOCK_PS_TRANSPORT": "tcp",
    }  # fmt: skip
    settings = ServerSettings.from_environ(environ, **THIS)
    assert settings.folder == Path("/state/1-of-3")
    assert (settings.epoch, settings.lease_s, settings.snapshot_every_s) == (3, 2.5, 9)
    assert settings.save_dirs == (Path("/a"), Path("/b"), Path("/of/job"))
    assert settings.tls == TlsFiles(Path("ca"), Path("c"), Path("k"))
    assert "secret" not in repr(settings)
    trainer = TrainerSettings.from_environ(environ)
    assert (trainer.deadline_s, trainer.shared_memory) == (4, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PENSTOCK_EPOCH", "x"), ("PENSTOCK_EPOCH", "-1"), ("PENSTOCK_PS_LEASE_S", "0"), ("PENSTOCK_PS_LEASE_S", "nan"),
        ("PENSTOCK_PS_START_S", "inf"), ("PENSTOCK_PS_TLS_CERT", "c"),
        ("PENSTOCK_PS_TRANSPORT", "udp"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    def read(environ: dict[str, str]) -> None:
        ServerSettings.from_environ(environ, **THIS)
        TrainerSettings.from_environ(environ)

    with pytest.raises(SpecError, match=name):
        read({name: text})


def test_ids_are_spread_evenly_and_the_same_for_ever() -> None:
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63)], np.int64)

    def one(id: int) -> int:
        """Splitmix64 in whole numbers."""
        mask = 2**64 - 1
        z = (id + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % 5

    assert server_of(ids, 5).tolist() == [one(int(i)) for i in ids]
    counts = np.bincount(server_of(np.arange(0, 1 << 20, 64), 7), minlength=7)
    assert counts.max() < 1.1 * counts.min()


def test_a_mean_is_over_members_also_of_those_who_sent_nothing() -> None:
    shape = torch.Size([4, 1])
    sparse = [Gradient(torch.tensor([[3.0]]), torch.tensor([1])), Gradient(torch.tensor([[6.0]]), torch.tensor([1]))]
    merged = mean(sparse, 3, shape)
    assert (merged.values.tolist(), merged.rows.tolist()) == ([[1.0], [2.0]], [1, 1])  # type: ignore[union-attr]  # rows
    mixed = mean([Gradient(torch.ones(4, 1)), Gradient(torch.tensor([[2.0]]), torch.tensor([3]))], 1, shape)
    assert mixed.values.flatten().tolist() == [1, 1, 1, 3]


def restarted() -> tuple[SyncRounds, TrainerIncarnation, TrainerIncarnation]:
    """Return a machine of a server that was killed while two trainers were in round 5."""
    before = Membership(expected=2, lease_s=10)
    for trainer in range(2):
        before.join(TrainerIncarnation(trainer, 0), 0.0, 3)
    members = Membership(expected=2, lease_s=10)
    members.restore(before.roster(), 100.0)
    return SyncRounds(members, round=5), TrainerIncarnation(0, 0), TrainerIncarnation(1, 0)


def test_a_restarted_server_has_its_members_join_again() -> None:
    machine, a, _ = restarted()
    (refused,) = machine.handle(Barrier(1, a, 5), 101.0)
    assert isinstance(refused, Refuse)
    assert refused.rejoin, "what it had pushed to the open round is gone"
    assert machine.handle(Join(2, a), 101.0) == [Reply(2, 5)]


def test_a_restarted_server_waits_for_members_despite_a_barrier() -> None:
    machine, a, b = restarted()
    machine.handle(Join(1, a), 101.0)
    assert machine.handle(Barrier(2, a, 5), 101.0) == [], "the round waits for the other"
    assert machine.waits_for() == [1]
    assert machine.handle(Join(3, b), 102.0) == [Reply(3, 5)]
    (closed,) = machine.handle(Barrier(4, b, 5), 102.0)
    assert closed == Close(5, {}, (0, 1))


def test_a_restarted_server_drops_members_absent_for_a_lease() -> None:
    machine, a, _ = restarted()
    machine.handle(Join(1, a), 109.0)
    machine.handle(Barrier(2, a, 5), 109.0)
    assert machine.handle(Tick(), 110.0) == []
    assert machine.handle(Tick(), 110.5) == [Lost(1), Close(5, {}, (0,))]


def test_a_restored_started_job_has_no_missing_trainer() -> None:
    members = Membership(expected=2, lease_s=10)
    members.restore(Roster(joined=frozenset({1, 2})), 0.0)
    assert members.started
    assert members.missing() == []


def test_a_restarted_server_waits_a_lease_for_lost_members() -> None:
    before = Membership(expected=2, lease_s=10)
    for trainer in range(2):
        before.join(TrainerIncarnation(trainer, 0), 0.0, 0)
    before.expire(11.0)
    before.join(TrainerIncarnation(0, 0), 12.0, 0)
    before.leave(0)
    members = Membership(expected=2, lease_s=10)
    members.restore(before.roster(), 100.0)
    assert not members.all_left
    assert members.expire(110.5) == []
    assert members.all_left


def test_a_repeated_join_keeps_what_was_pushed() -> None:
    machine, a, _ = restarted()
    machine.handle(Join(1, a), 101.0)
    assert not any(isinstance(i, Release) for i in machine.handle(Join(2, a), 101.0))
