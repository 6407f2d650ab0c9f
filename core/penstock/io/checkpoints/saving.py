"""CheckpointManager: a training that can be interrupted at any moment and goes on as if it had not been.

    manager = fluid.io.CheckpointManager("checkpoints", every_steps=500, keep=3)
    start = manager.restore()
    for step in range(start.step if start else 0, 10_000):
        exe.run(feed=batch(step), fetch_list=[loss])
        manager.step()
    manager.close()

The training thread copies tensors; everything else is done by a thread that writes. There is one checkpoint under way
at a time: where the next is due before it is written, the training waits, and the wait is counted. What the writer
meets is logged at once, and raised by the next call. Owner: the training thread.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from penstock import telemetry
from penstock.dataset import Dataset
from penstock.distributed.collective import this_process
from penstock.errors import PenstockError, SpecError, Unavailable, UserError
from penstock.exec.feeding import resolved_seed
from penstock.exec.parallel import CompiledProgram, ParallelExecutor
from penstock.exec.strategies import BuildStrategy
from penstock.exec.trainers import mark_of, trainers_of
from penstock.identity import JobIdentity
from penstock.io.checkpoints import fingerprint
from penstock.io.checkpoints.fence import Fence, StaleAttempt
from penstock.io.checkpoints.layout import Best
from penstock.io.checkpoints.preemption import PreemptionNotice
from penstock.io.checkpoints.record import Collect, RankState
from penstock.io.checkpoints.restoring import Restored, Target, restore
from penstock.io.checkpoints.servers import is_server, restore_server
from penstock.io.checkpoints.team import Schedule, Team
from penstock.io.checkpoints.values import generator_states, of_each_rank, values_of
from penstock.io.checkpoints.writer_thread import Staging, WriterThread
from penstock.io.checkpoints.writing import AtPhase, Contents, Retention, Writer, check_dtypes, clear_up
from penstock.io.saves.variables import Folder, plain
from penstock.logger import warn_once
from penstock.program.program import Program
from penstock.scope import Scope, global_scope
from penstock.serving.remote_use import descriptors
from penstock.settings import CHECKPOINT_DIR, CHECKPOINT_EVERY_STEPS, CHECKPOINT_KEEP
from penstock.telemetry.process import outcome

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveStatistics:
    """What checkpoints have cost. `held_s`: for how long the training thread was held, `waited_s` of that by a
    checkpoint before that was not written yet; `last_held_s`: by the last one. `written`: committed ones."""

    begun: int = 0
    written: int = 0
    held_s: float = 0.0
    last_held_s: float = 0.0
    waited_s: float = 0.0


class CheckpointManager:
    """See the module. One for each training program of a process; every rank of a job makes its own.

    `directory`: of nothing but checkpoints; in a job, None for the job's own. `program`: what is trained, by default
    the default main program; `scope`: where its variables are; `executor`: a ParallelExecutor, whose both are taken.
    `every_steps`, `every_s`: how often `step` saves; in a job, None for the job's own. `keep`: the latest so many
    stay (3), and the best `keep_best` by the metric that `step` is given, the least or the greatest of them.
    Raises SpecError.
    """

    def __init__(
        self,
        directory: Folder | None = None,
        program: Program | CompiledProgram | None = None,
        *,
        executor: object = None,
        scope: Scope | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int | None = None,
        keep_best: int = 0,
        best: Best = "min",
    ) -> None:
        self.directory = _folder(directory)
        _at_least(0, "keep_best", keep_best)
        if best not in ("min", "max"):
            raise SpecError(f"best is {best!r}; expected 'min' or 'max': which metric is the best", got=best)
        kept = _at_least(1, "keep", CHECKPOINT_KEEP.read() if keep is None else keep)
        self._retention = Retention(kept, keep_best, best)
        says_nothing = every_steps is None and every_s is None
        self._schedule = Schedule(CHECKPOINT_EVERY_STEPS.read() if says_nothing else every_steps, every_s)
        core = executor.core if isinstance(executor, ParallelExecutor) else None
        self.program = plain(program) if program is not None or core is None else core.program
        self._scope = scope or (core.memory.scope if core is not None else None)
        self._background, self._staging = WriterThread(), Staging()
        self._team_found: Team | None = None
        self._writer: Writer | None = None
        self._text: tuple[int, str] = (-1, "")
        self._steps = self._passes = 0
        self._position: Any = None
        self._stands: Any = None  # where the reader is while no step is made
        self._closed = False
        self._notice, self._ends = PreemptionNotice.from_environ(), False
        self.statistics = SaveStatistics()
        self.at_phase: AtPhase = lambda phase: None
        """Called on the writer's thread before each of `writing.PHASES`; what it raises ends the writing."""

    # -- going on --------------------------------------------------------------------------------

    def restore(self, *, dataset: Dataset | None = None, strict: bool = False) -> Restored | None:
        """Go on from the newest checkpoint that is whole: return what was restored; None if there is none.

        Sets the program's persistable variables, its count of steps and its seed, the random generators of Python,
        numpy and torch, and the position of `dataset`. To be called after the startup program and before the first
        step, by every process of the job; servers take what they keep. From here on attempts before this one are
        refused.

        A damaged checkpoint is logged, and the one before it taken; with `strict`, or if none is whole, it is
        a UserError. One of another program is a UserError. Nothing has changed then.
        """
        if is_server(self.program):
            served = restore_server(self.directory, self.program, self.scope, strict=strict)
            return None if served is None else Restored(served.path, served.record.step, metric=served.record.metric)
        self._open()
        target = Target(self.program, self.program_text, self.scope, dataset)
        found = restore(self.directory, self.team, target, strict=strict)
        if found is not None:
            self._steps, self._passes, self._position = found.step, found.passes, found.position
            self._stands = found.position
        return found

    def _open(self) -> None:
        self._check_open()
        if is_server(self.program):
            raise SpecError("a parameter server saves when the trainers do; it only restores")
        if self._writer is None and self.team.writes:
            fence = Fence(self.directory)
            clear_up(fence)
            self._writer = Writer(fence, self._retention, self._reached)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this CheckpointManager was closed; make another one")

    def _reached(self, phase: str) -> None:
        self.at_phase(phase)

    @property
    def team(self) -> Team:
        """The processes that take part; found at the first call. Raises SpecError."""
        if self._team_found is None:
            self._team_found = team_of(self.program, self.directory)
            if self._team_found.kind == "collective":
                self.program.after_steps_without_rows[self._team_found] = self._without_rows
            if self._team_found.kind != "local":
                atexit.register(self._at_exit)  # before the group's own, which joins
        return self._team_found

    def _without_rows(self) -> None:
        """Count a step of the others, in which this rank took part after the end of its data, as they count it."""
        try:
            self.step(position=self._position)
        except Unavailable as error:  # a checkpoint that was not written ends no training
            _log.error("%s", error)

    def _at_exit(self) -> None:
        """Close, so that the others do not wait for this rank's part; not where the process fails."""
        if outcome().failed:
            return
        try:
            if this_process.group is not None:
                this_process.group.check()
            self.close()
        except (PenstockError, OSError) as error:
            _log.error("%s", error)

    @property
    def scope(self) -> Scope:
        """Where the variables are."""
        return self._scope or global_scope()

    @property
    def program_text(self) -> str:
        """What the fingerprint is of."""
        if self._text[0] != self.program.revision:
            self._text = (self.program.revision, fingerprint.normal_text(self.program))
        return self._text[1]

    # -- saving ----------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps that were counted, those before a restore included."""
        return self._steps

    def step(self, *, position: Any = None, metric: float | None = None) -> bool:
        """Count a step that is over; save if a checkpoint is due, and return whether that was so.

        `position`: where the reader is, in plain types. In a job every rank calls this after each step. Raises what the
        writer has met since the last call: Unavailable (for example, the disk is full), StaleAttempt; and Preempted,
        which ends the process, once a job that is preempted has saved.
        """
        if not self.advance():
            self._position = position
            return False
        self.save(position=position, metric=metric)
        return True

    def advance(self) -> bool:
        """Count a step; return whether a checkpoint is due, which the caller then saves."""
        self._check_open()
        self._steps += 1
        self._stands = None
        self._ends = self._ends or self.team.ends_after(self._steps, is_asked=self._notice.is_given)
        if self._ends or self.team.is_due(self._schedule, self._steps):
            return True
        self._background.check()
        return False

    def data_ended(self, *, position: Any) -> None:
        """Note where the reader is at the end of its data: what is saved until the pass is over records it."""
        self._position = self._stands = position

    def pass_ended(self, *, position: Any = None) -> None:
        """Count a pass over the data. `position`: of the reader, between it and the next one; None: at the start."""
        self._passes += 1
        self._position = self._stands = position

    def save(self, *, position: Any = None, metric: float | None = None) -> None:
        """Begin a checkpoint now; it is written while the training goes on. In a job, by all ranks after the same step.

        Waits for the one before; if the training ends by it, since it was preempted, until it is written. Raises as
        `step`; SpecError for a position that is more than plain types.
        """
        begin = time.perf_counter()
        self._open()
        if self._ends:
            self.team.flush()
        position = self._stands if position is None else position
        state = self._state(position).text()
        self._position = position
        self.statistics.waited_s += self._background.join()
        self._begin(state, None if metric is None else float(metric))
        self._schedule.saved()
        self.statistics.begun += 1
        self.statistics.last_held_s = time.perf_counter() - begin
        self.statistics.held_s += self.statistics.last_held_s
        self._background.check()  # of the one before; the ranks of a job have all begun this one
        if self._ends:
            self.close()
            raise self._notice.end(lambda: self.team.saved_step(state, self._steps), self._steps)

    def _state(self, position: Any) -> RankState:
        steps, seed = self.scope.steps(self.program), resolved_seed(self.program)
        return RankState(steps, seed, self._passes, position, generator_states(), self._steps)

    def _begin(self, state: str, metric: float | None) -> None:
        writer, step, team = self._writer, self._steps, self.team
        collect = team.hand_in(state)
        try:
            servers = team.save_servers(lambda: _checked(writer).begin(step))
            if writer is None:
                return
            tensors = values_of(self.program, self.scope, team.kind)
            check_dtypes(tensors)
            copies, text = self._staging.copy(tensors), self.program_text
        except (PenstockError, OSError) as error:
            if writer is not None:
                writer.abandon(step)
            self._tell(str(error))
            raise _failed(step, error) from error
        make = partial(
            Contents, team.kind, step, fingerprint.fingerprint(text), text, copies, metric=metric, servers=servers
        )
        self._background.start(partial(self._write, writer, step, collect, make), f"the checkpoint of step {step}")

    def _write(self, writer: Writer, step: int, collect: Collect, make: Callable[..., Contents]) -> None:
        begin = time.perf_counter()
        try:
            contents = make(ranks=collect())
            writer.write(contents)
        except (PenstockError, OSError) as error:
            writer.abandon(step)
            self._tell(str(error))
            raise _failed(step, error) from error
        self.statistics.written += 1
        telemetry.log(checkpoint_step=step, checkpoint_s=time.perf_counter() - begin)
        self._tell("")

    def _tell(self, error: str) -> None:
        if self.team.rank:
            return
        try:
            self.team.outcome(error)
        except Unavailable as lost:  # the receiver is gone, which the training notices by itself
            _log.error("%s", lost)

    @property
    def is_writing(self) -> bool:
        """Whether this process is writing a checkpoint."""
        return self._background.is_busy

    def wait(self) -> None:
        """Wait until what was begun is written. Raises what the writer has met."""
        self._background.wait()

    def close(self) -> None:
        """Wait until what was begun is written, by all ranks of a job. Raises what the writer has met. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._background.wait()
        finally:
            team = self._team_found
            if team is not None:
                self.program.after_steps_without_rows.pop(team, None)
                if team.rank == 0 and team.kind == "collective":
                    closed = f"rank 0 has closed its CheckpointManager of {self.directory}, and others go on"
                    text = f"{closed}: nothing is saved of their steps. Call collective.join() before close()"
                    self.program.after_steps_without_rows[team] = partial(warn_once, _log, text, team)
                team.close(self._state(self._position).text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()


def _checked(writer: Writer | None) -> Writer:
    if writer is None:
        raise SpecError("only the first rank writes")
    return writer


def _failed(step: int, error: PenstockError | OSError) -> PenstockError:
    if isinstance(error, StaleAttempt | UserError):
        return error
    return Unavailable(
        f"the checkpoint of step {step} was not written: {error}. Those before it are whole, and the training has not "
        "changed: it may go on, and save again",
        step=step,
    )


__all__ = ["CheckpointManager", "Restored", "SaveStatistics"]


def _at_least(least: int, name: str, value: int) -> int:
    """Return a number. Raises SpecError if it is less, or none."""
    if type(value) is not int or value < least:
        raise SpecError(f"{name} is {value!r}; expected a whole number of at least {least}", got=value)
    return value


def _folder(given: Folder | None) -> Path:
    """Return the folder of checkpoints. Raises SpecError if neither argument nor setting names one."""
    found = CHECKPOINT_DIR.read() if given is None else Path(given)
    if found is None:
        raise SpecError(
            f"CheckpointManager has no directory, and {CHECKPOINT_DIR} is not set; expected a folder for "
            "checkpoints alone"
        )
    return found.absolute()


def check_same(program: Program, mode: object) -> None:
    """Raise SpecError for a training after whose steps ranks have values that differ: rank 0's stand for all."""
    own = of_each_rank(program) if mode == "local_sgd" else []
    if own:
        raise SpecError(
            "collective_mode='local_sgd' cannot be saved and go on with this optimizer: each trainer has "
            f"{own[0]!r} of its own ({len(own)} such variables), and a checkpoint holds those of trainer 0 alone. Use "
            "SGD, which keeps nothing, or collective_mode='grad_allreduce', where all trainers have the same",
            got=own[0],
        )


def team_of(program: Program, folder: Path) -> Team:
    """Return the team of a program that this process trains. `folder`: of the checkpoints.

    Meets the other trainers of a collective job if its program names them. Raises SpecError where only the
    environment does, and they have not met; and for ranks whose values differ.
    """
    if descriptors(program):
        from penstock.io.checkpoints.trainers_team import TrainersTeam  # loads a client of servers

        return TrainersTeam(program, folder)
    mark = mark_of(program)
    if mark is not None:
        check_same(program, mark.args[0])
        trainers_of(program, BuildStrategy())
    if this_process.group is not None:
        from penstock.io.checkpoints.ranks_team import RanksTeam  # loads torch.distributed

        return RanksTeam(this_process.group)
    found = JobIdentity.of_meeting()
    if found is not None and found.num_trainers > 1:
        raise SpecError(
            f"this process is trainer {found.index} of {found.num_trainers}, but has not met the others, so it cannot "
            "save or restore with them. Transpile the program, or make the ParallelExecutor, before. If each process "
            "trains independently, take PADDLE_TRAINER_ENDPOINTS and WORLD_SIZE out of its environment"
        )
    return Team()
