"""A node in the test's own process: the agent's decisions over a simulated machine.

What decides is the product's: `reconcile`, `life`, `Outgoing`, `LogTail`, `FrameBuffer`, `Spool`, and the messages.
What they act on is simulated: processes that write lines and end, guards that can be killed, a folder that outlives
the agent. Time is the caller's.
"""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from penstock.protocol import preemption
from penstock.protocol.agent import (
    Desired,
    DesiredSet,
    FromServer,
    Heartbeat,
    LeaseRenewed,
    LogAck,
    ReplicaReport,
    Welcome,
)
from penstock.protocol.frames import Frame, Kind, decode_header, encode
from penstock_worker import messages
from penstock_worker.buffer import FrameBuffer
from penstock_worker.logtail import LogTail
from penstock_worker.outgoing import Outgoing
from penstock_worker.reconcile import Forget, Observed, Start, Stop, reconcile
from penstock_worker.replica import Replica, life
from penstock_worker.spool import Spool


class Machine:
    """What a replica is on its node, whether or not there is an agent: a process, its guard, its files."""

    def __init__(self, desired: Desired, folder: Path) -> None:
        self.desired, self.folder = desired, folder
        self.exit: dict[str, object] | None = None
        self.is_started = False
        self.wrote = 0
        self.stop_asked = False
        self.points: set[int] = set()  # of a series, which the agent took
        folder.mkdir(parents=True)

    @property
    def is_alive(self) -> bool:
        return self.is_started and self.exit is None

    def start(self) -> None:
        """Start guard and process."""
        assert not self.is_started, f"{self.desired.replica_id} is started a second time"
        self.is_started = True

    def write(self, lines: int) -> None:
        """Have the process write lines, numbered on."""
        with (self.folder / "log").open("a") as log:
            log.writelines(f"{number}\n" for number in range(self.wrote, self.wrote + lines))
        self.wrote += lines

    def end(self, state: str, *, exit_code: int | None = None, signal: int | None = None, detail: str = "") -> None:
        """Have the process end, as the guard (or, without one, the agent) writes it down."""
        assert self.is_alive
        self.exit = {"state": state, "exit_code": exit_code, "signal": signal, "detail": detail}


class Held:
    """What the agent holds of a replica in memory: a source of messages. Made anew when the agent restarts."""

    def __init__(self, machine: Machine) -> None:
        self.machine, desired = machine, machine.desired
        self.desired = desired
        self.report = ReplicaReport(
            replica_id=desired.replica_id, epoch=desired.epoch, state="PREPARING", pid=None, exit_code=None,
            signal=None, detail="",
        )  # fmt: skip
        self.draining = self.confirmed = self.stopping = False
        self.notice: preemption.Notice | None = None
        self.end_due_at: float | None = None
        self.ended_at = float("inf")  # never so long ago that it is forgotten without an acknowledgement
        self.log = LogTail(machine.folder / "log")
        self.frames = FrameBuffer(stream=desired.stream, epoch=desired.epoch)
        self.spool = Spool(machine.folder / "spool")
        for payload in self.spool.load():
            self.frames.push(decode_header(payload), payload)

    def look(self) -> None:
        """Follow the machine: the process runs, or has ended."""
        if self.machine.exit is not None and not self.report.terminal:
            self.report = self.report.model_copy(update=self.machine.exit)
        elif self.machine.is_alive and self.report.state == "PREPARING":
            self.report = self.report.model_copy(update={"state": "RUNNING", "pid": 7})

    def point(self) -> None:
        """Take a point of a series from the process: on the disk first."""
        step = self.machine.wrote
        body = {"step": step, "time_ns": step, "values": {"loss": 1.0}}
        payload = encode(Frame(Kind.SCALARS, self.desired.stream, self.desired.epoch, step, body=body))
        self.frames.push(decode_header(payload), payload)
        assert self.spool.append(payload)
        self.machine.points.add(step)


@dataclass(eq=False)
class Wire:
    """One connection: what is on its way. Each side may find it broken before the other does."""

    node: SimulatedNode
    to_server: deque[str | bytes] = field(default_factory=deque)
    to_agent: deque[str] = field(default_factory=deque)
    is_cut: bool = False  # nothing more comes through, and neither side was notified


class SimulatedNode:
    """One node. `machines` is its disk; everything else is lost when the agent crashes."""

    def __init__(self, node_id: str, folder: Path) -> None:
        self.node_id, self.folder = node_id, folder
        self.machines: dict[str, Machine] = {}
        self.former: list[Machine] = []  # forgotten: their logs were acknowledged
        self.agents = 0
        self.is_up = False
        self._forget_memory()

    def _forget_memory(self) -> None:
        self.held: dict[str, Held] = {}
        self.desired: dict[str, Desired] | None = None
        self.wire: Wire | None = None
        self.outgoing: Outgoing | None = None
        self.ttl_s, self.heartbeat_at, self.heard_at = 5.0, 0.0, 0.0

    # The agent

    def start_agent(self) -> None:
        """Start the agent, which adopts what it finds."""
        self.is_up = True
        self.agents += 1
        for replica_id, machine in list(self.machines.items()):
            if not machine.is_started and machine.exit is None:  # it never came to a guard
                del self.machines[replica_id]
                shutil.rmtree(machine.folder)
                continue
            self.held[replica_id] = Held(machine)
            self.held[replica_id].look()

    def crash_agent(self) -> None:
        """Kill the agent. Its connection is broken on this side; the server may not know."""
        self.is_up = False
        for held in self.held.values():
            held.spool.close()
        self._forget_memory()

    def connect(self) -> Wire:
        """Open a connection, and send the hello."""
        self.wire = Wire(self)
        reports = [held.report for held in self.held.values()]
        hello = messages.hello(
            version="1", boot_id="b", reports=reports, address="127.0.0.1", ports=[20_000, 20_001, 20_002],
            instance=f"{self.node_id}/{self.agents}",
        )  # fmt: skip
        self.wire.to_server.append(hello.encode())
        return self.wire

    def drop(self) -> None:
        """Find the connection broken."""
        self.wire = self.outgoing = None

    def take(self, text: str, now: float) -> None:
        """Take one message of the server."""
        self.heard_at = now
        self._on_message(messages.parse(text), now)

    def _on_message(self, message: FromServer, now: float) -> None:
        match message:
            case Welcome(log_offsets=offsets, lease_ttl_s=ttl_s):
                self.ttl_s, self.heartbeat_at = ttl_s, 0.0
                self.outgoing = Outgoing(self.held, offsets)
            case DesiredSet(replicas=replicas):
                self.desired = {one.replica_id: one for one in replicas}
            case LeaseRenewed(stored=stored):
                assert self.outgoing is not None
                self.outgoing.heartbeat_answered(stored=stored)
                for held in self.held.values():
                    held.spool.trim(held.frames.unconfirmed())
            case LogAck(replica_id=replica_id, log_offset=offset, full=full):
                assert self.outgoing is not None
                self.outgoing.log_acked(replica_id, offset, full=full)
        self.reconcile()

    def reconcile(self) -> None:
        """Carry out what is decided: preparing takes until `prepare`, stopping until `obey`."""
        for held in self.held.values():
            held.look()
        if self.desired is None:
            return
        observed = {key: Observed(held.desired.epoch, life(cast("Replica", held))) for key, held in self.held.items()}
        for instruction in reconcile(self.desired, observed):
            match instruction:
                case Start(desired):
                    machine = Machine(desired, self.folder / desired.replica_id)
                    self.machines[desired.replica_id] = machine
                    self.held[desired.replica_id] = Held(machine)
                case Stop(replica_id):
                    self.held[replica_id].stopping = True
                    self.machines[replica_id].stop_asked = True
                case Forget(replica_id):
                    held = self.held.pop(replica_id)
                    held.spool.close()
                    self.former.append(self.machines.pop(replica_id))
                    shutil.rmtree(held.machine.folder)

    def turn(self, now: float) -> None:
        """Send what is due, if there is a connection that was greeted."""
        self.reconcile()
        if self.wire is None or self.outgoing is None:
            return
        if now - self.heard_at >= self.ttl_s:  # every heartbeat is answered: silence is a dead connection
            self.drop()
            return
        self.wire.to_server.extend(self.outgoing.turn(now))
        if now >= self.heartbeat_at and not self.outgoing.awaiting:
            self.heartbeat_at = now + self.ttl_s / 3
            self.outgoing.heartbeat_sent(now)
            self.wire.to_server.append(Heartbeat().encode())

    # The machine

    def prepare(self) -> None:
        """Have the agent start what it has prepared, or end what it is to stop before that."""
        for held in self.held.values():
            machine = held.machine
            if machine.is_started or machine.exit is not None:
                continue
            if machine.stop_asked:
                machine.exit = {"state": "KILLED", "exit_code": None, "signal": None, "detail": "stopped before"}
            else:
                machine.start()
        self.reconcile()

    def obey(self) -> None:
        """Have guards end what they were asked to stop. A guard that got the signal needs no agent for that."""
        for machine in self.alive():
            if machine.stop_asked:
                machine.end("KILLED", signal=15, detail="stopped")

    def alive(self) -> list[Machine]:
        """Return the processes that run."""
        return [machine for machine in self.machines.values() if machine.is_alive]

    def write(self, machine: Machine, lines: int) -> None:
        """Have a process write lines, and send a point to the agent if there is one."""
        machine.write(lines)
        held = self.held.get(machine.desired.replica_id)
        if held is not None:
            held.point()
