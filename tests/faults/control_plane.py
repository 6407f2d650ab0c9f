"""Server and agents under random faults, in one process: the invariants hold after every step, and at last all ends.

Hypothesis draws the steps: messages are delivered one by one, late, twice, or never, since connections break or are
half open; agents and the server crash and come back; processes and guards are killed; clocks jump. The services,
tables and decisions are the product's (`simulated_server`, `simulated_node`).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.faults.simulated_node import Machine, SimulatedNode, Wire
from tests.faults.simulated_server import SimulatedServer
from tests.server.harness import FakeClock
from tools.chaos.history import History, LogSeen, ProcessSeen, SeriesSeen
from tools.chaos.invariants import check

from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import TERMINAL_JOB

NODES = st.sampled_from([0, 1])
LUCK = st.sampled_from([True, True, True, False])
CALM_ROUNDS = 400


class Jumping(FakeClock):
    """A clock whose wall time a test moves apart from its monotonic time."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0

    def now(self) -> Any:
        real, self.elapsed_s = self.elapsed_s, self.elapsed_s + self.jumped_s
        try:
            return super().now()
        finally:
            self.elapsed_s = real


class ControlPlane(RuleBasedStateMachine):
    """Two nodes of four CPUs, and a server."""

    template: Path
    """A migrated database, to begin each run with."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-machine-"))
        self.clock = Jumping()
        self.server = SimulatedServer(self.folder / "server", self.template, self.clock)
        self.nodes: list[SimulatedNode] = []
        self.wires: list[Wire] = []  # also those that the agent has given up
        self.jobs: list[str] = []
        self.machines: dict[str, Machine] = {}

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(step)

    @initialize()
    def begin(self) -> None:
        self.do(self.server.start())
        for number in range(2):
            node_id = self.do(self.server.join(f"node{number}"))
            node = SimulatedNode(node_id, self.folder / f"node{number}")
            self.nodes.append(node)
            node.start_agent()
            self._connect(node)
        self.settle_down(2)

    # What a user does

    @precondition(lambda self: self.server.runtime is not None and len(self.jobs) < 6)
    @rule(
        trainers=st.integers(1, 3), pservers=st.integers(0, 1), restarts=st.integers(0, 3),
        on=st.sampled_from([["infra"], ["infra", "user"], []]), cpus=st.integers(1, 2),
        window_s=st.sampled_from([None, 20.0]),
        budgets=st.sampled_from([{}, {}, {"user": {"max_restarts": 1}, "preempted": {"max_restarts": 1}},
                                 {"infra": {"max_restarts": 2, "window_s": 20.0, "first_pause_s": 0.0}}]),
        max_wait_s=st.sampled_from([None, None, 30.0]),
    )  # fmt: skip
    def submit(
        self, trainers: int, pservers: int, restarts: int, on: list[str], cpus: int, window_s: float | None = None,
        budgets: dict[str, Any] | None = None, max_wait_s: float | None = None,
    ) -> None:  # fmt: skip
        spec = {
            "name": f"job{len(self.jobs)}", "entrypoint": ["true"], "mode": "pserver" if pservers else "command",
            "trainers": {"count": trainers, "cpus": cpus, "memory": "16MiB"},
            "pservers": {"count": pservers, "cpus": 1, "memory": "16MiB"},
            "restart": {"max_restarts": restarts, "on": on, "window_s": window_s, "budgets": budgets or {}},
            "stop_grace_s": 1.0, "max_wait_s": max_wait_s,
        }  # fmt: skip
        self.jobs.append(self.do(self.server.submit(JobSpec.model_validate(spec))))

    @precondition(lambda self: self.server.runtime is not None and self.jobs)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        self.do(self.server.cancel(self.jobs[which % len(self.jobs)]))

    # The server

    @precondition(lambda self: self.server.runtime is not None)
    @rule(what=st.sampled_from(["schedule", "publish", "watch", "store"]))
    def step(self, what: str) -> None:
        self.do(self.server.step(what))

    @rule(luck=LUCK)
    def crash_server(self, luck: bool) -> None:
        if self.server.runtime is None:
            self.do(self.server.start())
        elif not luck:
            self.do(self.server.crash())
            for wire in list(self.wires):
                self._cut(wire)

    # Agents

    @rule(number=NODES, luck=LUCK)
    def crash_agent(self, number: int, luck: bool) -> None:
        if not self.nodes[number].is_up:
            self.nodes[number].start_agent()
        elif not luck:
            self.nodes[number].crash_agent()

    @rule(number=NODES)
    def turn(self, number: int) -> None:
        self._turn(self.nodes[number])

    def _turn(self, node: SimulatedNode) -> None:
        """Have an agent do what is due: connect, prepare, send."""
        if not node.is_up:
            return
        if node.wire is None and self.server.runtime is not None:
            self._connect(node)
        node.turn(self.clock.monotonic())
        self._note()

    def _connect(self, node: SimulatedNode) -> None:
        self.wires.append(node.connect())

    @rule(number=NODES)
    def prepare(self, number: int) -> None:
        if self.nodes[number].is_up:
            self.nodes[number].prepare()

    @rule(number=NODES)
    def obey(self, number: int) -> None:
        self.nodes[number].obey()

    # Processes

    @rule(number=NODES, which=st.integers(0, 7), lines=st.integers(1, 3))
    def write(self, number: int, which: int, lines: int) -> None:
        machine = self._one(number, which)
        if machine is not None:
            self.nodes[number].write(machine, lines)

    @rule(number=NODES, which=st.integers(0, 7), how=st.sampled_from(["ok", "ok", "fails", "killed", "guard killed"]))
    def end(self, number: int, which: int, how: str) -> None:
        machine = self._one(number, which)
        if machine is not None:
            _end(machine, how)

    def _one(self, number: int, which: int) -> Machine | None:
        alive = self.nodes[number].alive()
        return alive[which % len(alive)] if alive else None

    # The network

    @rule(which=st.integers(0, 7), count=st.integers(1, 12))
    def deliver(self, which: int, count: int) -> None:
        """Deliver messages of one connection to the server, also of one that its agent has given up."""
        if self.wires:
            self._deliver(self.wires[which % len(self.wires)], count)

    @rule(number=NODES, count=st.integers(1, 12))
    def answer(self, number: int, count: int) -> None:
        """Deliver messages of the server to an agent."""
        self._answer(self.nodes[number], count)

    @rule(which=st.integers(0, 7))
    def repeat(self, which: int) -> None:
        """Have a report, a piece of a log or a frame reach the server twice."""
        wire = self.wires[which % len(self.wires)] if self.wires else None
        if (
            wire is None
            or not wire.to_server
            or '"beat"' in str(wire.to_server[0])
            or '"hello"' in str(wire.to_server[0])
        ):
            return
        wire.to_server.appendleft(wire.to_server[0])
        self._deliver(wire, 1)

    @rule(number=NODES)
    def lose_connection(self, number: int) -> None:
        """Have an agent find its connection broken; the server finds out later, or by the next hello."""
        self.nodes[number].drop()

    @rule(which=st.integers(0, 7))
    def close(self, which: int) -> None:
        """Have the server find a connection broken; what was on its way is lost."""
        if self.wires:
            wire = self.wires.pop(which % len(self.wires))
            self.server.close(wire)
            wire.is_cut = True

    def _deliver(self, wire: Wire, count: int) -> None:
        while count and wire.to_server and not wire.is_cut and self.server.runtime is not None:
            count -= 1
            if not self.do(self.server.receive(wire, wire.to_server.popleft())):
                self._cut(wire)
        self._flush(wire)

    def _flush(self, wire: Wire) -> None:
        if not wire.is_cut and self.server.runtime is not None and not self.server.send(wire):
            self._cut(wire)

    def _cut(self, wire: Wire) -> None:
        wire.is_cut = True
        if wire in self.wires:
            self.wires.remove(wire)

    def _answer(self, node: SimulatedNode, count: int) -> None:
        wire = node.wire
        if wire is None:
            return
        if self.server.runtime is None or wire.is_cut:
            self._cut(wire)
            node.drop()
            return
        self._flush(wire)
        while count and wire.to_agent and node.wire is wire:
            count -= 1
            node.take(wire.to_agent.popleft(), self.clock.monotonic())
        self._note()

    # Time

    @rule(seconds=st.sampled_from([0.5, 2.0, 2.0, 6.0, 11.0, 20.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-3600.0, -5.0, 5.0, 3600.0]))
    def jump(self, seconds: float) -> None:
        self.clock.jumped_s += seconds

    @precondition(lambda self: self.server.runtime is not None)
    @rule(rounds=st.integers(1, 3))
    def work(self, rounds: int) -> None:
        """Have all parts that are up do what is due."""
        self.settle_down(rounds)

    # What holds

    def _note(self) -> None:
        for node in self.nodes:
            self.machines.update(node.machines)

    @invariant()
    def invariants_hold(self) -> None:
        if self.server.runtime is not None and self.nodes and self.server.is_changed:
            self.server.is_changed = False
            broken = check(self.seen())
            assert not broken, "; ".join(map(str, broken))

    def seen(self) -> History:
        """Return the history without what takes time: its clock jumps."""
        self._note()
        found: History = self.do(self.server.history())
        events = tuple(replace(event, at=0.0) for event in found.events)
        processes = tuple(
            ProcessSeen(replica_id, number, 0.0, 0.0, machine.wrote)
            for number, (replica_id, machine) in enumerate(self.machines.items())
            if machine.is_started
        )
        return replace(found, events=events, processes=processes)

    def settle_down(self, rounds: int, *, is_end: bool = False) -> None:
        """Let everything work, without a fault."""
        for _ in range(rounds):
            for what in ("schedule", "publish", "watch", "store"):
                self.do(self.server.step(what))
            for node in self.nodes:
                for wire in [one for one in self.wires if one.node is node]:
                    self._deliver(wire, 1000)
                self._answer(node, 1000)
                node.prepare()
                node.obey()
                for machine in node.alive() if is_end else ():
                    node.write(machine, 1)
                    _end(machine, "ok")
                self._turn(node)
            self.clock.advance(1.0)

    def settle_messages(self, rounds: int) -> None:
        """Have agents and server exchange what is due, and nothing else."""
        for _ in range(rounds):
            for node in self.nodes:
                self._answer(node, 1000)
                self._turn(node)
            for wire in list(self.wires):
                self._deliver(wire, 1000)

    def teardown(self) -> None:
        try:
            if self.nodes:
                self._end_well()
        finally:
            if self.server.runtime is not None:
                self.do(self.server.crash())
            self.loop.close()
            shutil.rmtree(self.folder)

    def _end_well(self) -> None:
        """Heal everything: each job ends, each log and series is whole, nothing runs that is not wanted."""
        if self.server.runtime is None:
            self.do(self.server.start())
        for node in self.nodes:
            if not node.is_up:
                node.start_agent()
        for _ in range(CALM_ROUNDS // 4):
            self.settle_down(4, is_end=True)
            last = self.seen()
            if all(job.state in TERMINAL_JOB for job in last.jobs) and not any(n.machines for n in self.nodes):
                break
        logs = tuple(LogSeen(log.replica_id, log.numbers, is_over=True) for log in last.logs)
        broken = check(replace(last, logs=logs, series=self._series(last), is_final=True))
        assert not broken, "; ".join(map(str, broken))
        assert [job for job in last.jobs if job.state not in TERMINAL_JOB] == []
        assert [machine.desired.replica_id for node in self.nodes for machine in node.machines.values()] == []

    def _series(self, last: History) -> tuple[SeriesSeen, ...]:
        """Return the series of attempts whose first trainers reported their ends."""
        found = []
        for replica in last.replicas:
            machine = self.machines.get(replica.id)
            if machine is None or (replica.role, replica.index) != ("trainer", 0) or replica.state == "LOST":
                continue
            stored = self.do(self.server.points(replica.job_id, replica.attempt))
            written = tuple(sorted(machine.points))
            found.append(SeriesSeen(replica.job_id, replica.attempt, tuple(stored), written, 0))
        return tuple(found)


def _end(machine: Machine, how: str) -> None:
    match how:
        case "ok":
            machine.end("EXITED", exit_code=0)
        case "fails":
            machine.end("EXITED", exit_code=1)
        case "killed":
            machine.end("EXITED", signal=9)
        case _:
            machine.end("KILLED", detail="the guard process of this replica vanished")
