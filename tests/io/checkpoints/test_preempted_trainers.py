"""Preempted trainers of servers: no update is lost without common steps, and who says "saved" was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.io.checkpoints.pserver_threads import Job, Trainer
from tests.io.checkpoints.test_pserver_checkpoints import left

import penstock as fluid
from penstock import identity
from penstock.errors import PenstockError, Unavailable
from penstock.io.checkpoints.reading import newest
from penstock.protocol import preemption
from penstock.ps.communicator import Communicator, remotes
from penstock.telemetry.outcome import Outcome

MERGES = {"communicator_max_merge_var_num": 50, "communicator_send_queue_size": 50}
NEVER_ALONE = {"communicator_send_wait_times": 10**6}


class Noticed(Job):
    """A job whose trainers have a notice each. Its parameter is minus the sum of what all steps were fed, over `mode`.

    In async mode gradients wait in queues for others that do not come; in GEO mode an exchange is every 1000 steps.
    """

    def __init__(self, folder: Path, mode: str, patch: pytest.MonkeyPatch) -> None:
        self._mode, self.patch = mode, patch
        super().__init__(folder, servers=1, trainers=2, sync=mode == "sync")

    def transpiled(self, trainer: int) -> tuple[Any, Any, Any]:
        """Return (transpiler, startup program, loss): the gradient is what the step is fed."""
        main, startup = fluid.Program(), fluid.Program()
        startup.random_seed = main.random_seed = 3
        with fluid.program_guard(main, startup):
            x = fluid.layers.data("x", [3])
            zero = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(0.0))
            loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr=zero, bias_attr=False))
            fluid.optimizer.SGD(1.0).minimize(loss)
        config = fluid.DistributeTranspilerConfig()
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = self._mode == "geo", 1000
        made = fluid.DistributeTranspiler(config)
        made.transpile(
            trainer, program=main, pservers=",".join(self.endpoints), trainers=2, sync_mode=self.sync,
            startup_program=startup,
        )  # fmt: skip
        if self._mode == "async":
            Communicator(made.get_trainer_program(), envs=MERGES | NEVER_ALONE).start(connects=False)
        return made, startup, loss

    def noticed(self, index: int) -> Trainer:
        """Make a trainer whose notice lies at `notice(index)`."""
        self.patch.setenv(identity.SOCKET, str(self._socket(index)))
        self.patch.setenv(identity.REPLICA_ID, f"r{index}")
        return self.trainer(index, every_steps=None)

    def notice(self, index: int) -> Path:
        """Return where the notice to a trainer lies."""
        return preemption.notice_path(self._socket(index))

    def preempt(self, index: int, until: float = 1e9) -> None:
        """Give a trainer the notice."""
        self.notice(index).write_bytes(preemption.encode(until, "node 'n1' is drained"))

    def _socket(self, index: int) -> Path:
        return self.folder.parent / f"trainer{index}.sock"

    def saved_by(self, index: int) -> int | None:
        """Return what a trainer has answered."""
        return preemption.decode_answer(self.notice(index).read_bytes())


Begin = Callable[[str], Noticed]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start a job in this process; what is left of it is ended."""
    made: list[Noticed] = []
    monkeypatch.setattr("penstock.telemetry.log", lambda **values: None)
    monkeypatch.setattr(remotes, "configs", {})

    def start(mode: str) -> Noticed:
        made.append(Noticed(tmp_path / "c", mode, monkeypatch))
        return made[-1]

    yield start
    for descriptor in remotes.opened():
        with suppress(PenstockError):
            remotes.close(descriptor)
    for job in made:
        job.close()


def until_preempted(trainer: Trainer, numbers: Iterator[int]) -> list[int]:
    """Train until the preemption; return the numbers of the steps."""
    made: list[int] = []
    try:
        for number in numbers:
            made.append(number)
            trainer.step(number)
    except fluid.io.Preempted:
        return made
    pytest.fail(f"the training goes on after {made[-1:]}")


def run(job: Noticed, first: int) -> tuple[int, list[Trainer]]:
    """Train some steps and preempt; return the sum of what was fed, and the trainers."""
    trainers = [job.noticed(index) for index in range(2)]
    starts = [one.manager.restore() for one in trainers]
    assert [None if s is None else s.step for s in starts] == ([None, None] if first == 0 else [first, 3])
    fed = 0
    for one in trainers:
        for number in range(2):
            one.step(number)
            fed += number + one.index
    for index in range(2):
        job.preempt(index)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(until_preempted, trainers[1], iter(range(2, 100)))
        mine = until_preempted(trainers[0], iter(range(2, 10_000)))
        theirs = other.result()
    assert theirs == [2], "it ends after the step that it was at"
    return fed + sum(mine) + sum(theirs) + len(theirs), trainers


@pytest.mark.parametrize(("mode", "shares"), [("geo", 2), ("async", 1)])
def test_a_preemption_without_common_steps_loses_no_update(
    mode: str, shares: int, begin: Begin, tmp_path: Path
) -> None:
    job = begin(mode)
    fed, trainers = run(job, 0)
    found, values = left(tmp_path / "c")
    assert values["w"].tolist() == pytest.approx([-fed / shares] * 3)
    assert [state.position["batch"] for state in found.ranks()] == [found.record.step, 3]
    assert [job.saved_by(index) for index in range(2)] == [found.record.step] * 2
    for one in trainers:
        one.exe.close()
    job.close()
    for index in range(2):
        job.notice(index).unlink()
    more, _ = run(begin(mode), found.record.step)
    _, values = left(tmp_path / "c")
    assert values["w"].tolist() == pytest.approx([-(fed + more) / shares] * 3)


def both(job: Noticed) -> list[Trainer]:
    """Make both trainers, which have trained one step."""
    trainers = [job.noticed(index) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.step(0), trainers))
    return trainers


def test_a_trainer_without_checkpoint_in_time_does_not_answer(begin: Begin, tmp_path: Path) -> None:
    job = begin("async")
    _, second = both(job)
    job.preempt(1, until=1.0)  # trainer 0 never saves
    with pytest.raises(Unavailable, match=r"after 2 steps, was not written while the notice .* lasted"):
        second.step(1)
    assert job.saved_by(1) is None
    assert newest(tmp_path / "c", strict=True, sets_aside=False) is None


def test_a_trainer_answers_after_the_commit_of_its_part(begin: Begin, tmp_path: Path) -> None:
    job = begin("sync")
    first, second = both(job)
    answers: list[int | None] = []
    first.manager.at_phase = lambda phase: answers.append(job.saved_by(1)) if phase == "commit" else None
    for index in range(2):
        job.preempt(index)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(until_preempted, second, iter(range(1, 100)))
        until_preempted(first, iter(range(1, 100)))
        other.result()
    found = newest(tmp_path / "c", strict=True, sets_aside=False)
    assert found is not None
    assert (answers, job.saved_by(1)) == ([None], found.record.step)


def test_a_trainer_that_exits_without_close_is_not_waited_for(begin: Begin, tmp_path: Path) -> None:
    job = begin("sync")
    at_exit: list[Callable[[], None]] = []
    job.patch.setattr("penstock.io.checkpoints.saving.atexit.register", at_exit.append)
    first, second = both(job)
    (hook,) = [call for call in at_exit if getattr(call, "__self__", None) is second.manager]
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr("penstock.io.checkpoints.saving.outcome", lambda: Outcome("exit code 3"))
        hook()
        assert not list((tmp_path / "c").glob("handed-in.1.*")), "a process that fails has not ended in order"
    hook()  # as the interpreter does
    second.exe.close()
    job.preempt(0)
    assert until_preempted(first, iter(range(1, 5))) == [1, 2]
    found = newest(tmp_path / "c", strict=True, sets_aside=False)
    assert found is not None
    assert [state.position for state in found.ranks()] == [{"trainer": 0, "batch": 3}, {"trainer": 1, "batch": 1}]


def test_a_notice_without_a_folder_of_checkpoints_saves(begin: Begin, tmp_path: Path) -> None:
    job = begin("sync")
    first, second = both(job)
    assert not (tmp_path / "c").exists()
    job.preempt(0)
    first_steps = ThreadPoolExecutor(1)
    first_step = first_steps.submit(first.step, 1)
    second.step(1)
    first_step.result()  # asks who has ended
    job.preempt(1)
    other = first_steps.submit(until_preempted, second, iter(range(2, 100)))
    until_preempted(first, iter(range(2, 100)))
    other.result()
    first_steps.shutdown()
    assert newest(tmp_path / "c", strict=True, sets_aside=False) is not None


def test_another_trainer_saves_after_the_end_of_trainer_0(begin: Begin, tmp_path: Path) -> None:
    job = begin("sync")
    first, second = both(job)
    first.ends()
    job.preempt(1)
    assert until_preempted(second, iter(range(1, 5))) == [1, 2]
    found, values = left(tmp_path / "c")
    assert [state.position for state in found.ranks()] == [{"trainer": 0, "batch": 1}, {"trainer": 1, "batch": 3}]
    assert (found.record.step, job.saved_by(1)) == (3, 3)
    assert not [*(tmp_path / "c").glob("handed-in.*"), *(tmp_path / "c").glob("ends-after*")]
    second.exe.close()
    job.close()
    assert values["w"].tolist() == pytest.approx([-(0.5 + 2 + 3)] * 3), "the mean of both, then trainer 1's"
    again = begin("sync")
    starts = [again.noticed(index).manager.restore() for index in range(2)]
    assert [None if one is None else one.step for one in starts] == [1, 3]


def test_trainers_go_on_without_trainer_0_and_common_steps(begin: Begin, tmp_path: Path) -> None:
    job = begin("async")
    first, second = both(job)
    first.ends()
    job.preempt(1, until=1.0)
    for number in range(1, 4):
        second.step(number)
    assert job.saved_by(1) is None
    assert newest(tmp_path / "c", strict=True, sets_aside=False) is None
