"""A preempted training saves at a step boundary and ends: one process, threads of a data set, ranks that agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.io.checkpoints.conftest import Process, Start
from tests.io.checkpoints.test_passes_over_data_sets import BATCH, ROWS, Model
from tests.io.checkpoints.test_pserver_checkpoints import Job
from tests.property.networks import fit_a_line
from tests.property.oracle import started

import penstock as fluid
from penstock import identity
from penstock.distributed.trainer_group import TrainerGroup
from penstock.errors import Unavailable, UserError
from penstock.exec.dataset_pass import Saves
from penstock.io.checkpoints.ranks_team import RanksTeam
from penstock.io.checkpoints.reading import newest
from penstock.protocol import preemption
from penstock.protocol.contract import Managed

LAST = 12
Notice = Callable[[], Path]


class Store:
    """The store of a rendezvous, for ranks of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests = 0

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.values[key] = value


def ranks(count: int) -> tuple[Store, list[RanksTeam]]:
    store = Store()

    def group(rank: int) -> TrainerGroup:
        fields = {"rank": rank, "ranks": SimpleNamespace(num_ranks=count), "store": lambda name: store}
        return cast("TrainerGroup", SimpleNamespace(**fields))

    return store, [RanksTeam(group(rank)) for rank in range(count)]


@given(st.data(), st.integers(2, 4))
def test_ranks_end_after_the_same_step_whenever_each_is_asked(data: st.DataObject, count: int) -> None:
    _, teams = ranks(count)
    asked_at = data.draw(st.lists(st.integers(1, LAST - 1), min_size=count, max_size=count))
    for step in range(1, LAST + 2):  # no rank begins a step before all have ended the one before
        order = data.draw(st.permutations(range(count)))
        ends = {rank: teams[rank].ends_after(step, is_asked=asked_at[rank] <= step) for rank in order}
        assert len(set(ends.values())) == 1, "some ranks end after this step, and others go on"
        if ends[0]:
            assert step > max(asked_at), "not before all look for the last step"
            assert step <= max(asked_at) + 2
            return
    pytest.fail("the training did not end")


def test_a_rank_that_is_never_asked_is_waited_for() -> None:
    _, teams = ranks(2)
    assert not any(teams[0].ends_after(step, is_asked=True) for step in range(1, 50))
    assert not any(teams[1].ends_after(step, is_asked=False) for step in range(1, 50))


def test_a_rank_that_has_closed_its_manager_is_not_waited_for() -> None:
    store, teams = ranks(2)
    store.set("last/1", "its last word")
    assert [teams[0].ends_after(step, is_asked=True) for step in (1, 2)] == [False, True]


def test_agreement_costs_no_message_before_a_notice() -> None:
    store, teams = ranks(2)
    assert not any(team.ends_after(1, is_asked=False) for team in teams)
    assert store.requests == 0


@pytest.fixture
def notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notice:
    """Return what gives the notice to this process, as its agent does."""
    monkeypatch.setenv(identity.SOCKET, str(tmp_path / "t.sock"))
    monkeypatch.setenv(identity.REPLICA_ID, "r1")
    monkeypatch.setattr("penstock.telemetry.log", lambda **values: None)

    def give() -> Path:
        path = preemption.notice_path(tmp_path / "t.sock")
        path.write_bytes(preemption.encode(1e9, "node 'n1' is drained"))
        return path

    return give


def test_a_noticed_training_saves_answers_and_exits_with_75(tmp_path: Path, notice: Notice) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    exe = fluid.Executor()
    manager = fluid.io.CheckpointManager(tmp_path / "c", network.main, scope=scope, every_steps=1000)
    for step in (1, 2, 3):
        exe.run(network.main, network.feed(6, step), [network.loss], scope=scope)
        if step < 3:
            assert not manager.step(position={"batch": step})
    path = notice()
    with pytest.raises(fluid.io.Preempted) as ended:
        manager.step(position={"batch": 3})
    assert (ended.value.step, ended.value.code) == (3, 75)
    found = newest(tmp_path / "c", strict=True, sets_aside=False)
    assert found is not None
    assert (found.record.step, found.ranks()[0].position) == (3, {"batch": 3})
    assert preemption.decode_answer(path.read_bytes()) == 3
    with pytest.raises(UserError, match="was closed"):
        manager.step()


def test_a_notice_before_the_first_step_lets_it_end(tmp_path: Path, notice: Notice) -> None:
    notice()
    network = fit_a_line()
    scope = started(network.startup)
    manager = fluid.io.CheckpointManager(tmp_path / "c", network.main, scope=scope, every_steps=1)
    fluid.Executor().run(network.main, network.feed(6, 0), [network.loss], scope=scope)
    with pytest.raises(fluid.io.Preempted):
        manager.step()
    assert manager.statistics.written == 1, "one checkpoint, though one was due as well"


def test_a_checkpoint_that_fails_is_no_answer(tmp_path: Path, notice: Notice) -> None:
    path = notice()
    network = fit_a_line()
    scope = started(network.startup)
    manager = fluid.io.CheckpointManager(tmp_path / "c", network.main, scope=scope, every_steps=1)

    def full(phase: str) -> None:
        raise OSError("no space left on device")

    manager.at_phase = full
    with pytest.raises(Unavailable, match="no space left"):
        manager.step()
    assert preemption.decode_answer(path.read_bytes()) is None


class Ends:
    """A manager that is preempted at the first batch."""

    program: Any = None
    num_steps = 1

    def __init__(self) -> None:
        self.saved = 0

    def advance(self) -> bool:
        return True

    def save(self, *, position: object = None) -> None:
        self.saved += 1
        raise fluid.io.Preempted(1)

    def data_ended(self, *, position: object) -> None:
        raise AssertionError

    def pass_ended(self, *, position: object = None) -> None:
        raise AssertionError


def test_no_thread_takes_a_batch_after_the_save_that_ends_a_pass() -> None:
    manager = Ends()
    saves = Saves(manager, manager.program, lambda: 0)
    assert saves.begin()
    with pytest.raises(fluid.io.Preempted):
        saves.end(trained=True)
    assert not saves.begin()
    assert manager.saved == 1


def test_threads_of_a_preempted_pass_repeat_no_sample(tmp_path: Path, notice: Notice) -> None:
    path = notice()
    first = Model(tmp_path)
    with pytest.raises(fluid.io.Preempted):
        first.train(first.dataset("QueueDataset", threads=3), tmp_path / "c", 1, every_steps=1000)
    seen = first.seen()
    assert 0 < seen.sum() < ROWS
    path.unlink()
    again = Model(tmp_path)
    found = again.train(again.dataset("QueueDataset", threads=3), tmp_path / "c", 1, every_steps=1000)
    assert found is not None
    assert (found.step * BATCH, found.passes) == (seen.sum(), 0), "what was trained on is what was saved"
    assert (again.seen() == 1).all()


@pytest.mark.slow
def test_trainers_of_servers_save_the_same_round(start: Start, tmp_path: Path) -> None:
    first = Preempted(start, tmp_path, "--steps", 10**6, "--every_steps", 10**6)
    assert all(one.first_line() == "from 0 None" for one in first.trainers)
    for trainer in (1, 0):
        first.give_notice(trainer)
    assert [one.end() for one in first.trainers] == [75, 75], first.said
    found = newest(tmp_path / "c", strict=True, sets_aside=False)
    assert found is not None
    step = found.record.step
    assert [state.position for state in found.ranks()] == [{"trainer": i, "batch": step} for i in range(2)]
    assert first.saved() == [step, step]
    assert not [*(tmp_path / "c").glob("preempted.*"), *(tmp_path / "c").glob("ends-after*")]
    for server in first.servers:
        server.kill()

    again = Job(start, tmp_path / "c", 1, 2, "--steps", step + 2)
    again.ends_well()
    for i, one in enumerate(again.trainers):
        assert f"from {step} {{'trainer': {i}, 'batch': {step}}}" in one.said


class Preempted(Job):
    """A job of which each trainer has a notice of its own."""

    def __init__(self, start: Start, folder: Path, *options: object) -> None:
        self._sockets = [folder / f"trainer{index}.sock" for index in range(2)]

        def begin(script: Path, role: str, index: int, *told: object, **environ: str) -> Process:
            if role == "trainer":
                managed = Managed("j", "job", f"r{index}", "trainer", index, 1, index, str(self._sockets[index]))
                environ |= managed.environ()
            return start(script, role, index, *told, **environ)

        super().__init__(begin, folder / "c", 1, 2, *options)

    def give_notice(self, trainer: int) -> None:
        """Ask a trainer to save and to end."""
        preemption.notice_path(self._sockets[trainer]).write_bytes(preemption.encode(1e9, "node 'n1' is drained"))

    def saved(self) -> list[int | None]:
        """Return the steps that the trainers have answered."""
        return [preemption.decode_answer(preemption.notice_path(path).read_bytes()) for path in self._sockets]
