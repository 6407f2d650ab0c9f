"""`python -m tools.chaos`: agents in network namespaces, jobs, and random faults; then a verdict.

    python -m tools.chaos [--seconds 600] [--seed N] [--nodes 4] [--jobs 30] [--folder DIR]

Exit status: 0 no invariant broken and no line of log lost or doubled, 1 otherwise, 2 namespaces cannot be made here.
The seed is printed first: it gives the same jobs and the same faults at the same times again.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tools.chaos.faults import Faults
from tools.chaos.history import History, Limits, Violation
from tools.chaos.invariants import check
from tools.chaos.plan import Fault, Plan, PlannedJob, make_plan
from tools.chaos.world import World
from tools.hosts.namespaces import Namespaces, NamespacesUnavailable

from penstock.errors import PenstockError

LIMITS = Limits(ttl_s=4.0, grace_s=12.0, stop_s=5.0, slack_s=20.0)
PROGRESS_S = 10.0
END_S = 420.0
"""For jobs to end once nothing disturbs them: those that failed soon after each other have pauses up to 128 s."""
STREAMS_S = 60.0


class Run:
    """One run of a plan in a world."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world, self._plan = world, plan
        self._faults = Faults(world, random.Random(plan.seed))
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._began = time.monotonic()
        self.done: Counter[str] = Counter()
        self.jobs: dict[str, str] = {}
        self._waiting = list(plan.jobs)

    def play(self) -> None:
        """Carry out the plan, and undo what is left of it."""
        for fault in self._plan.faults:
            self._at(fault.at, lambda fault=fault: self._fault(fault))  # type: ignore[misc] # bound early
        shown = 0.0
        while self._now() < self._plan.for_s:
            while self._due and self._due[0][0] <= self._now():
                heapq.heappop(self._due)[2]()
            self._submit_due()
            if self._now() >= shown:
                self._show()
                shown += PROGRESS_S
            time.sleep(0.1)
        for _, _, what in sorted(self._due, key=lambda one: one[:2]):
            what()
        self._due.clear()

    def finish(self) -> None:
        """Wait until every job has ended, and its log has come."""
        limit = time.monotonic() + END_S
        while time.monotonic() < limit:
            self._submit_due()
            if not self._waiting and all(map(self._world.is_over, self.jobs.values())):
                break
            self._show()
            time.sleep(PROGRESS_S / 2)
        limit = time.monotonic() + STREAMS_S
        while time.monotonic() < limit and any(v.invariant == "I8" for v in check(self._world.history(is_final=True))):
            time.sleep(2.0)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), what))

    def _fault(self, fault: Fault) -> None:
        if self._now() >= self._plan.for_s:
            return
        end = self._faults.begin(fault)
        if end is not None:
            self.done[fault.what] += 1
            self._at(fault.at + fault.for_s, end)

    def _submit_due(self) -> None:
        while self._waiting and self._waiting[0].at <= self._now() and not self._faults.is_server_down:
            try:
                self.jobs[self._waiting[0].name] = self._submit(self._waiting[0])
            except PenstockError:  # the server is down: by the same key it makes no second job later
                return
            self._waiting.pop(0)

    def _submit(self, job: PlannedJob) -> str:
        with self._world.client() as client:
            if job.more == "checkpoints":
                return self._world.submit_checkpointing(
                    client, job.name, steps=job.lines, pause_s=job.pause_s, **job.spec
                )
            return self._world.submit_with(
                client, job.name, lines=job.lines, pause_s=job.pause_s, code=job.code, more=job.more, **job.spec
            )

    def _show(self) -> None:
        text = "the server is down"
        with contextlib.suppress(PenstockError):
            if not self._faults.is_server_down:
                text = self._states()
        print(f"{self._now():5.0f} s  {sum(self.done.values())} faults; {text}", flush=True)

    def _states(self) -> str:
        with self._world.client() as client:
            states = Counter(job["state"] for job in client.jobs())
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no jobs"


def main(argv: list[str] | None = None) -> int:
    """Run chaos. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description="Random faults, then a verdict.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen (600)")
    parser.add_argument("--seed", type=int, default=None, help="of jobs and faults (random)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=None, help="where state and logs stay (a temporary folder)")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    print(f"seed {seed}, {given.seconds:g} s, {given.nodes} nodes, {given.jobs} jobs; state in {folder}", flush=True)
    plan = make_plan(seed, for_s=given.seconds, num_nodes=given.nodes, num_jobs=given.jobs)
    try:
        with Namespaces(given.nodes + 1) as network:
            world = World(folder, num_nodes=given.nodes, limits=LIMITS, network=network)
            with world:
                run = Run(world, plan)
                run.play()
                run.finish()
                history = world.history(is_final=True)
    except NamespacesUnavailable as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    return verdict(plan, run, history, check(history))


def verdict(plan: Plan, run: Run, history: History, found: list[Violation]) -> int:
    """Print what came of a run; return the exit status."""
    print("faults: " + ", ".join(f"{count} {what}" for what, count in sorted(run.done.items())))
    states = Counter(job.state for job in history.jobs)
    print("jobs: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    lines = sum(len(log.numbers) for log in history.logs)
    lost, doubled = lost_and_doubled(history)
    print(f"{len(history.replicas)} replicas, {len(history.processes)} processes, {len(history.events)} events")
    print(f"log: {lines} lines, {lost} lost, {doubled} doubled")
    stored = sum(len(one.stored) for one in history.series)
    missing = sum(len(set(one.written) - set(one.stored)) for one in history.series)
    unsent = sum(len(one.unsent) for one in history.series)
    print(f"series: {stored} points, {missing} missing, {unsent} of these unsent by killed processes")
    for violation in found:
        print(f"violation: {violation}")
    print(f"seed {plan.seed}: {len(found)} violations")
    return 1 if found or lost or doubled else 0


def lost_and_doubled(history: History) -> tuple[int, int]:
    """Return how many lines of log are not there, and how many are there more than once."""
    wrote: Counter[str] = Counter()
    for seen in history.processes:
        wrote[seen.replica_id] = max(wrote[seen.replica_id], seen.wrote)
    lost = sum(len(set(range(wrote[log.replica_id])) - set(log.numbers)) for log in history.logs)
    return lost, sum(len(log.numbers) - len(set(log.numbers)) for log in history.logs)


if __name__ == "__main__":
    sys.exit(main())
