"""Discrete-event simulation of a graph on the engine's workers: how long a step takes, and what bounds it. Pure.

The rules are those of the engine (docs/engine.md). One worker runs the order that sealing a plan computes: of the ready
operators the one with the lowest index. Several have a queue each; a worker continues with the first successor that
became ready and is at home on it, else takes the newest of its own queue, else the oldest of another's. A worker that
has spun for `SPIN_NS` parks, and costs `WAKE_NS` to wake.

Running operators share the cores evenly: with more of them than cores each gets cores / operators of one. Beside that
an operator is slowed by `stretch` while others run, since they share caches and memory.

Source of the constants: `bench engine` (an operator's and a cross-thread edge's cost) and engine.cpp (the spin).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

HANDLE_NS = 100.0
HANDOVER_NS = 1_000.0
SPIN_NS = 20_000.0
WAKE_NS = 30_000.0


@dataclass(frozen=True, slots=True)
class Task:
    """An operator to run. `cost_ns`: alone on a core; `stretch`: the factor while others run; `home`: -1 for none."""

    name: str
    cost_ns: float
    before: tuple[int, ...] = ()
    home: int = -1
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step. `busy_ns`: of each worker; `path`: indices of the tasks that bound it, in order; `start_ns`: of all."""

    span_ns: float
    busy_ns: tuple[float, ...]
    path: tuple[int, ...]
    start_ns: tuple[float, ...]


@dataclass(slots=True)
class _Worker:
    number: int
    queue: deque[int] = field(default_factory=deque)
    task: int = -1
    left_ns: float = 0.0
    delay_ns: float = 0.0  # until it begins: a hand-over, or a wake-up
    idle_since: float = 0.0
    busy_ns: float = 0.0


def simulate(tasks: Sequence[Task], *, workers: int, cores: int, handle_ns: float = HANDLE_NS) -> Simulated:
    """Run `tasks`, whose edges go forward, once. `handle_ns`: what scheduling adds to each.

    Raises ValueError for an edge that does not go forward. Time: O(tasks x workers).
    """
    for index, task in enumerate(tasks):
        if any(not 0 <= one < index for one in task.before):
            raise ValueError(f"task {index} ({task.name}) comes after {task.before}; edges go forward")
    return _Run(tasks, max(1, workers), max(1, cores), handle_ns).run()


class _Run:
    def __init__(self, tasks: Sequence[Task], workers: int, cores: int, handle_ns: float) -> None:
        self.tasks, self.cores, self.handle_ns = tasks, cores, handle_ns
        self.after: list[list[int]] = [[] for _ in tasks]
        self.missing = [len(set(task.before)) for task in tasks]
        for index, task in enumerate(tasks):
            for one in set(task.before):
                self.after[one].append(index)
        self.workers = [_Worker(number) for number in range(workers)]
        self.num_idle, self.num_queued = workers, 0
        self.now = 0.0
        self.left = len(tasks)
        self.start = [0.0] * len(tasks)
        self.cause = [-1] * len(tasks)  # what a task waited for last: an edge, or the one before on its worker
        self.last = -1
        self.ready: list[int] = []  # of one worker: by index

    def run(self) -> Simulated:
        roots = [index for index, count in enumerate(self.missing) if count == 0]
        if len(self.workers) == 1:
            self.ready = list(roots)
            heapq.heapify(self.ready)
        else:
            self._scatter(roots)
        self._hand_out(-1)
        while self.left:
            self._advance()
        busy = tuple(worker.busy_ns for worker in self.workers)
        return Simulated(self.now, busy, self._path(), tuple(self.start))

    def _scatter(self, roots: Sequence[int]) -> None:
        for position in reversed(range(len(roots))):
            home = self._home(roots[position], position * len(self.workers) // len(roots))
            self._put(self.workers[home], roots[position])

    def _put(self, worker: _Worker, index: int) -> None:
        worker.queue.append(index)
        self.num_queued += 1

    def _home(self, index: int, otherwise: int) -> int:
        home = self.tasks[index].home
        return otherwise if home < 0 else home % len(self.workers)

    def _advance(self) -> None:
        """Let time pass until the next worker has done its task, and hand out what became ready."""
        running = [worker for worker in self.workers if worker.task >= 0]
        computing = sum(worker.delay_ns <= 0.0 for worker in running)
        share = min(1.0, self.cores / max(1, computing))
        rates = [
            0.0 if w.delay_ns > 0.0 else share / (self.tasks[w.task].stretch if computing > 1 else 1.0) for w in running
        ]
        first = min(w.left_ns / rate if rate else w.delay_ns for w, rate in zip(running, rates, strict=True))
        self.now += first
        for worker, rate in zip(running, rates, strict=True):
            if rate:
                worker.busy_ns += first
                worker.left_ns -= first * rate
            else:
                worker.delay_ns -= first
        done = [w for w in running if w.delay_ns <= 1e-6 and w.left_ns <= 1e-6]
        for worker in running:
            if worker.delay_ns <= 1e-6:
                worker.delay_ns = 0.0
        for worker in done:
            self._finish(worker)

    def _finish(self, worker: _Worker) -> None:
        index, me = worker.task, worker.number
        worker.task, worker.idle_since = -1, self.now
        self.num_idle += 1
        self.left -= 1
        self.last = index
        following = -1
        for successor in reversed(self.after[index]):
            self.missing[successor] -= 1
            if self.missing[successor]:
                continue
            self.cause[successor] = index
            if len(self.workers) == 1:
                heapq.heappush(self.ready, successor)
                continue
            home = self._home(successor, me)
            if home != me:
                self._put(self.workers[home], successor)
                continue
            if following >= 0:
                self._put(worker, following)
            following = successor
        if following >= 0:
            self._begin(worker, following, index, 0.0)
        self._hand_out(me)

    def _hand_out(self, finisher: int) -> None:
        """Give each idle worker its next task: `finisher` first, which needs no hand-over."""
        if finisher >= 0:
            self._hand_to(self.workers[finisher], is_finisher=True)
        for worker in self.workers:
            if not self.num_idle or not (self.num_queued or self.ready):
                return
            if worker.number != finisher:
                self._hand_to(worker, is_finisher=False)

    def _hand_to(self, worker: _Worker, *, is_finisher: bool) -> None:
        index = self._take(worker.number) if worker.task < 0 else -1
        if index >= 0:
            self._begin(worker, index, self.last if is_finisher else -1, self._delay(worker, is_finisher))

    def _take(self, me: int) -> int:
        if len(self.workers) == 1:
            return heapq.heappop(self.ready) if self.ready else -1
        if not self.num_queued:
            return -1
        if self.workers[me].queue:
            self.num_queued -= 1
            return self.workers[me].queue.pop()
        for step in range(1, len(self.workers)):
            other = self.workers[(me + step) % len(self.workers)]
            # Of an idle worker's queue nothing is taken: it is about to take it itself.
            if other.queue and other.task >= 0:
                self.num_queued -= 1
                return other.queue.popleft()
        return -1

    def _delay(self, worker: _Worker, is_finisher: bool) -> float:
        if is_finisher or self.now == 0.0:
            return 0.0
        return HANDOVER_NS if self.now - worker.idle_since < SPIN_NS else WAKE_NS

    def _begin(self, worker: _Worker, index: int, before: int, delay_ns: float) -> None:
        task = self.tasks[index]
        worker.task, worker.delay_ns = index, delay_ns
        self.num_idle -= 1
        worker.left_ns = max(task.cost_ns, 0.0) + self.handle_ns
        self.start[index] = self.now + delay_ns
        if before >= 0:
            self.cause[index] = before

    def _path(self) -> tuple[int, ...]:
        found, index = [], self.last
        while index >= 0:
            found.append(index)
            index = self.cause[index]
        return tuple(reversed(found))
