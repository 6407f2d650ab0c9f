"""`Executor.train_from_dataset` and `infer_from_dataset`: a pass over a data set, on one or several Hogwild threads.

Each thread takes batches and runs steps of its own, without the interpreter lock while a step runs; temporaries are the
thread's, persistable variables are the scope's own tensors, which all threads read and update without locks. With one
thread a pass gives the bits of `exe.run(CompiledProgram(program))` over the same batches.
Trainers of a collective job make a pass together: it ends for all when the data of all has ended.
The first error ends the pass: the other threads finish their step. Parameters keep what was learned until then.
Nothing is written to disk, but for checkpoints that were asked for. They are taken between the steps of all threads: a
thread is *at work* from taking a batch until that is used; when a checkpoint is due, the thread that finds it due waits
until no other is at work, and none begins, while the training's tensors are copied. So the position of the reader is
what the parameters have learned from, each batch once.
Source: Executor.train_from_dataset of Fluid 1.8; hogwild_worker.cc.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock import telemetry
from penstock.dataset import Dataset
from penstock.dataset.dataset_base import Run
from penstock.dataset.prefetch import RunAhead
from penstock.dataset.slots import feed_of
from penstock.errors import SpecError
from penstock.exec.data_parallel import DataParallel, results
from penstock.exec.dataset_reports import Fetches, FetchHandler, HandlerThread, PassProgress, Profile
from penstock.exec.devices import Devices, devices_of
from penstock.exec.memory import ReplicaMemory
from penstock.exec.parallel import CompiledProgram
from penstock.exec.pass_choice import choice_of
from penstock.exec.places import CUDAPlace, gpus_for, num_cores
from penstock.exec.rows_ahead import RowsAhead
from penstock.exec.strategies import BuildStrategy
from penstock.logger import warn_once
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.context import default_main_program
from penstock.protocol.frames import Work
from penstock.ps.remote import REMOTE_TYPES
from penstock.scope import Scope, global_scope

_log = logging.getLogger(__name__)


class Checkpoints(Protocol):
    """`fluid.io.CheckpointManager`, as a pass sees it."""

    @property
    def program(self) -> Program: ...

    @property
    def num_steps(self) -> int: ...

    def advance(self) -> bool: ...

    def save(self, *, position: Any = None) -> None: ...

    def data_ended(self, *, position: Any) -> None: ...

    def pass_ended(self, *, position: Any = None) -> None: ...


class Saves:
    """The checkpoints of one pass; `manager` None: there are none. Thread-safe."""

    def __init__(self, manager: Checkpoints | None, program: Program, position: Callable[[], Any]) -> None:
        """Raises SpecError for a manager of another program."""
        if manager is not None and manager.program is not program:
            raise SpecError(
                "train_from_dataset is given a CheckpointManager of another program than it trains; make it of the same"
            )
        self._manager, self._position = manager, position
        self._turn = threading.Condition()
        self._at_work, self._saving, self._saved_at, self._over = 0, False, -1, False

    def begin(self) -> bool:
        """Go to work: before a batch is taken. False if a save has ended the training: it is preempted."""
        if self._manager is None:
            return True
        with self._turn:
            self._turn.wait_for(lambda: not self._saving)
            self._at_work += not self._over
            return not self._over

    def end(self, *, trained: bool) -> None:
        """Be at work no more. `trained`: on a batch; it is counted, and saved if that is due, which may raise."""
        if self._manager is None:
            return
        with self._turn:
            self._at_work -= 1
            self._turn.notify_all()
            if trained and self._manager.advance():
                self._save(self._manager)

    def _save(self, manager: Checkpoints) -> None:
        """Save when no thread is at work, unless another thread has just done so. The lock is held."""
        self._turn.wait_for(lambda: not self._saving)
        if self._saved_at == manager.num_steps:
            return
        self._saving = True
        try:
            self._turn.wait_for(lambda: not self._at_work)
            self._saved_at = manager.num_steps
            manager.save(position=self._position())
        except SystemExit:
            self._over = True
            raise
        finally:
            self._saving = False
            self._turn.notify_all()

    def data_ended(self) -> None:
        """There is no more data here; other trainers may have some, in whose steps this one takes part without rows."""
        if self._manager is not None:
            self._manager.data_ended(position=self._position())

    def ended(self, position: Any) -> None:
        """The pass is over; `position`: of the reader, between it and the next one."""
        if self._manager is not None:
            self._manager.pass_ended(position=position)


Step = Callable[[Mapping[str, Any], Sequence[str]], list[Any]]
"""Runs a step on a feed and returns what is fetched, as arrays."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `train_from_dataset` was asked to show, and to save."""

    debug: bool = False
    fetch_list: Sequence[Any] = ()
    fetch_info: Sequence[str] | None = None
    print_period: int = 100
    fetch_handler: FetchHandler | None = None
    checkpoints: Checkpoints | None = None


def run_from_dataset(
    executor: Any,
    program: Any,
    dataset: Dataset | None,
    scope: Scope | None,
    thread: int,
    wanted: Wanted,
    *,
    trains: bool,
) -> None:
    """Make one pass. Raises SpecError, DataError, and what a step raises."""
    if not isinstance(dataset, Dataset):
        raise SpecError(f"dataset is {dataset!r}; expected one that fluid.DatasetFactory().create_dataset() made")
    num_threads = _num_threads(thread, dataset)
    compiled = program if isinstance(program, CompiledProgram) else None
    chosen: Program = compiled._program if compiled is not None else program or default_main_program()
    if not trains and any(op.role & (Role.BACKWARD | Role.OPTIMIZE) for op in chosen.operators):
        chosen, compiled = chosen.clone(for_test=True), None  # nothing is updated
    num_threads = _allowed_threads(chosen, num_threads, is_compiled=compiled is not None)
    fetches = Fetches(chosen, wanted.fetch_list, wanted.fetch_info, wanted.print_period)
    with contextlib.ExitStack() as ends:  # each ends what was begun, also where the next cannot begin
        steps = ends.enter_context(
            contextlib.closing(_Steps(executor, compiled or chosen, scope or global_scope(), num_threads))
        )
        handler = HandlerThread(wanted.fetch_handler, chosen) if wanted.fetch_handler is not None else None
        if handler is not None:
            ends.callback(handler.close)
        run = ends.enter_context(
            contextlib.closing(dataset.open_for_training() if trains else dataset.open_for_inference())
        )
        saves = Saves(wanted.checkpoints, chosen, dataset.position)
        run = _prefetched(run, steps.first, ends) if num_threads == 1 else run
        prints = wanted.debug or handler is not None or bool(wanted.fetch_list)
        progress = ends.enter_context(contextlib.closing(PassProgress(run.fraction, shows_line=not prints)))
        pass_ = _Pass(run, {v.name for v in chosen.feeds()}, fetches, handler, saves, progress)
        if trains:
            steps.first.begin_together()
        pass_.train(steps.steps, Profile(steps.first) if wanted.debug else None)
        if trains:
            saves.data_ended()
            steps.first.end_together()
        saves.ended(dataset.between_passes())


def _num_threads(thread: int, dataset: Dataset) -> int:
    if thread < 0:
        raise SpecError(f"thread is {thread!r}; expected a number of threads, or 0 for that of dataset.set_thread")
    return thread or dataset.thread_num


def _allowed_threads(program: Program, num_threads: int, *, is_compiled: bool) -> int:
    """Return how many threads train: one where a step belongs to more than this thread."""
    if num_threads == 1:
        return 1
    if is_compiled:
        text = "train_from_dataset: a CompiledProgram runs each batch on its replicas, one batch at a time"
        warn_once(_log, text)
        return 1
    if any(op.type in REMOTE_TYPES or op.role & (Role.RPC | Role.DIST) for op in program.operators):
        why = "this program exchanges gradients with other processes, so one thread trains, on all cores"
        warn_once(_log, f"train_from_dataset: {why}; {num_threads} threads were asked for")
        return 1
    return num_threads


def _prefetched(run: Run, core: DataParallel, ends: contextlib.ExitStack) -> Run:
    """Return a pass that starts lookups of the next batch's rows while a step runs, where there are any to start."""
    rows = RowsAhead(core.program, core.num_replicas)
    if not rows or not rows.inputs <= {slot.name for slot in run.slots}:
        return run
    ends.callback(rows.close)
    return ends.enter_context(
        contextlib.closing(RunAhead(run, lambda batch: rows.start(feed_of(batch, run.slots, rows.inputs))))
    )


class _Steps:
    """One executor for each thread, and the function that runs a step on it."""

    def __init__(self, executor: Any, program: Any, scope: Scope, num_threads: int) -> None:
        self._own: list[DataParallel] = []
        if isinstance(program, CompiledProgram) or num_threads == 1:
            self.first = self._compiled(executor, program, scope)
            self.steps: list[Step] = [_step_of(self.first)]
            return
        memory = ReplicaMemory(scope, self._gpus(executor.place))
        for _ in range(num_threads):
            core = DataParallel(
                program,
                memory,
                mode="all_reduce",
                num_replicas=1,
                num_threads=1,
                choice=choice_of(BuildStrategy()),
                name="train" if any(op.role & Role.BACKWARD for op in program.operators) else "test",
                cores=max(1, num_cores() // num_threads),
            )
            self._own.append(core)
        self.first = self._own[0]
        lowering = threading.Lock()
        self.steps = [_one_at_a_time_when_new(core, lowering) for core in self._own]

    def _compiled(self, executor: Any, program: Any, scope: Scope) -> DataParallel:
        given = isinstance(program, CompiledProgram)
        compiled: CompiledProgram = program if given else CompiledProgram(program)
        executor._remotes.note(compiled._program)  # its close leaves the servers
        core = compiled._core_for(scope, executor.place)
        if not given:
            self._own.append(core)
        return core

    @staticmethod
    def _gpus(place: object) -> Devices:
        return devices_of(gpus_for(f"Executor({place!r})", [place])) if isinstance(place, CUDAPlace) else ()

    def close(self) -> None:
        """Stop the engines that were made here."""
        for core in self._own:
            core.close()


def _step_of(core: DataParallel) -> Step:
    return lambda feed, names: results(core.program, names, core.run(feed, names), True, True)


def _one_at_a_time_when_new(core: DataParallel, lowering: threading.Lock) -> Step:
    """Return the step of a thread; a plan is made for new sizes, and persistables are bound, while no other is."""
    seen: set[tuple[Any, ...]] = set()

    run = _step_of(core)

    def step(feed: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        key = (*(tuple(value.shape) for value in feed.values()), *names)
        if key in seen:
            return run(feed, names)
        with lowering:
            found = run(feed, names)
        seen.add(key)
        return found

    return step


class _Pass:
    """Threads that take batches until there are no more."""

    def __init__(
        self,
        run: Run,
        inputs: set[str],
        fetches: Fetches,
        handler: HandlerThread | None,
        saves: Saves,
        progress: PassProgress,
    ) -> None:
        self._run, self._inputs, self._fetches, self._handler = run, inputs, fetches, handler
        self._saves, self._progress = saves, progress
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._trace = telemetry.input_trace()

    def train(self, steps: Sequence[Step], profile: Profile | None) -> None:
        """Return when all have ended. The calling thread is the first. Raises the first error."""
        others = [
            threading.Thread(target=self._guarded, args=(step, i), name=f"penstock-hogwild-{i}", daemon=True)
            for i, step in enumerate(steps[1:], 1)
        ]
        for thread in others:
            thread.start()
        try:
            self._first(steps[0], profile)
        except BaseException:
            self._end()
            raise
        finally:  # nothing is left to take, or they were stopped: they end their step
            for thread in others:
                thread.join()
        if self._error is not None:
            raise self._error

    def _guarded(self, step: Step, thread: int) -> None:
        try:
            while not self._stop.is_set() and self._one(step, (), thread=thread) is not None:
                pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the thread's boundary: `train` raises it
            with self._lock:
                self._error = self._error or error
            self._end()

    def _end(self) -> None:
        self._stop.set()
        self._run.stop()  # wakes threads that wait for data

    def _first(self, step: Step, profile: Profile | None) -> None:
        num_batches = 0
        while self._error is None:
            names = self._fetches.names(num_batches + 1)
            watched = self._handler.names if self._handler is not None else ()
            begin = time.perf_counter()
            found = self._one(step, (*names, *watched), profile)
            if found is None:
                break
            num_batches += 1
            rows, values = found
            self._fetches.show(num_batches, values[: len(names)])
            if self._handler is not None:
                self._handler.see(values[len(names) :])
            if profile is not None:
                profile.step(rows, time.perf_counter() - begin)
            self._progress.update()
        if profile is not None:
            profile.show()

    def _one(
        self, step: Step, names: Sequence[str], profile: Profile | None = None, *, thread: int = 0
    ) -> tuple[int, list[Any]] | None:
        found = None
        if not self._saves.begin():
            return None
        try:
            found = self._train_one(step, names, profile, thread)
        finally:
            self._saves.end(trained=found is not None)
        return found

    def _train_one(
        self, step: Step, names: Sequence[str], profile: Profile | None, thread: int
    ) -> tuple[int, list[Any]] | None:
        begin, begin_ns = time.perf_counter(), time.time_ns()
        batch = self._run.take()
        if batch is None:
            return None
        taken_ns = time.time_ns()
        feed = feed_of(batch, self._run.slots, self._inputs)
        end_ns = time.time_ns()
        if self._trace is not None:
            if not self._run.gathers:
                self._trace.add(Work.WAIT, thread, begin_ns, taken_ns)
            self._trace.add(Work.BATCH, thread, begin_ns if self._run.gathers else taken_ns, end_ns)
        if profile is not None:
            profile.read(time.perf_counter() - begin)
        found = step(feed, names)
        self._run.used(batch)
        self._progress.trained(len(batch))
        return len(batch), found
