"""One replica on this node: its folder, its guard, its log and its telemetry socket.

Folder (0700), named by the replica's id: `replica.json` the order of the server · `guard-order.json` · `guard.json` who
guards it · `log` stdout and stderr · `exit.json` how it ended · `preemption.json` its notice, if it was given one ·
`work/` the working folder. The folder is the truth: an agent that restarts finds its replicas there (`adopt`), by pid,
start time and boot id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.errors import PenstockError, Unavailable
from penstock.process import cell, proc
from penstock.process.end import open_process_end
from penstock.process.group import ProcessGroup
from penstock.protocol import contract, preemption
from penstock.protocol.agent import Desired, Preemption, ReplicaReport
from penstock.protocol.environment import passes_from_node
from penstock.protocol.states import NOT_SAVED, PREEMPTED, SAVED_AT
from penstock.settings import CHECKPOINT_DIR, CHECKPOINT_EVERY_STEPS, CHECKPOINT_KEEP, PS_LEASE_S
from penstock_worker import guard, lease, notices, ports, relay, snapshots, statedirs
from penstock_worker.accounts import PRIVATE, WAY, Account, privately
from penstock_worker.background import in_thread
from penstock_worker.buffer import FrameBuffer
from penstock_worker.logtail import LogTail
from penstock_worker.reconcile import Life
from penstock_worker.spool import Spool

REPLICA, WORK, SPOOL = "replica.json", "work", "spool"
NEVER_STARTED = "stopped before it was started"
PREPARE_FAILED = 125  # exit code when the replica could not even be prepared
POLL_S = 0.02
PORT_WAIT_S = 5.0
KEEP_UNACKED_S = 600.0  # a server that no longer knows a replica never acknowledges its log
_log = logging.getLogger(__name__)


class Replica:
    """Owned by the agent's event loop. `changed`: called after each change of `report`; `wake`: when frames came."""

    def __init__(
        self, desired: Desired, folder: Path, *, changed: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        self.desired = desired
        self.folder = folder
        self.report = ReplicaReport(
            replica_id=desired.replica_id,
            epoch=desired.epoch,
            state="PREPARING",
            pid=None,
            exit_code=None,
            signal=None,
            detail="",
        )
        self.ended_at = 0.0
        self.end_due_at: float | None = None
        self.draining = False
        self.confirmed = False
        self.stopping = False
        self.notice: preemption.Notice | None = None  # that it was given: to save and to end
        self.preempted_by = ""  # why its node leaves, if it is ended for that
        self.log = LogTail(folder / guard.LOG)
        self.frames = FrameBuffer(stream=desired.stream, epoch=desired.epoch, name=secrets.token_hex(8))
        self._spool = Spool(folder / SPOOL)
        self.relay = relay.Relay(
            relay.socket_path(folder), self.frames, self._spool, stream=desired.stream, epoch=desired.epoch, wake=wake
        )
        self._guard: int | None = None
        self._process: ProcessGroup | None = None
        self._stop_signal = signal.SIGTERM
        self._changed = changed

    async def run(
        self,
        cache: snapshots.SnapshotCache,
        lease_path: Path,
        lease_end: float,
        *,
        hidden: Sequence[Path] = (),
        account: Account | None = None,
    ) -> None:
        """Prepare, start and watch a new replica until it has ended. Never raises for what the job did.

        Cancelled before there is a guard, the replica has ended; later, it goes on and only the watching ends.
        """
        try:
            await self._prepare(cache, lease_path, lease_end, hidden, account)
        except asyncio.CancelledError:
            await self._end(_exit("KILLED", None, NEVER_STARTED))
            raise
        except (PenstockError, OSError) as error:
            _log.warning("replica %s could not be prepared: %s", self.desired.replica_id, error)
            await self._end(_exit("EXITED", PREPARE_FAILED, f"could not be prepared: {error}"))
            return
        if self.stopping:
            await self._end(_exit("KILLED", None, NEVER_STARTED))
            return
        self._process = _start_guard(self.folder)
        self._guard = self._process.pid
        await self.watch()

    async def refuse(self, detail: str) -> None:
        """End a replica that is never started."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._end(_exit("EXITED", PREPARE_FAILED, detail))

    async def _prepare(
        self,
        cache: snapshots.SnapshotCache,
        lease_path: Path,
        lease_end: float,
        hidden: Sequence[Path],
        account: Account | None,
    ) -> None:
        work = self.folder / WORK
        work.mkdir(mode=0o700, parents=True)
        self.folder.chmod(PRIVATE if account is None else WAY)
        for path in (self.folder / guard.STARTED, self.folder / guard.EXIT):
            lease.reserve(path)
        lease.write_json(self.folder / REPLICA, self.desired.model_dump())
        self.relay.account = account
        await self.relay.open()
        if self.desired.snapshot is not None:
            archive = await in_thread(cache.fetch, self.desired.snapshot)
            await in_thread(snapshots.unpack, archive, work)
        root = self.folder.parent.parent
        state_dir = statedirs.state_dir(root, self.desired)
        checkpoint_dir = statedirs.checkpoint_dir(root, self.desired)
        for folder in (state_dir, checkpoint_dir):
            if folder is None:
                continue
            if account is None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                folder.parent.mkdir(mode=WAY, parents=True, exist_ok=True)
                folder.parent.chmod(WAY)
                account.keep(folder)
        if account is not None:
            await in_thread(account.own_fresh, work)
        for port in self.desired.ports:
            await self._until_free(port)
        environ = entrypoint_environment(
            os.environ if account is None else {**os.environ, **account.environ()},
            self.desired,
            socket=str(self.relay.path),
            interpreter=sys.executable,
            state_dir=state_dir,
            checkpoint_dir=checkpoint_dir,
        )
        order = {
            "argv": self.desired.entrypoint,
            "env": environ,
            "cwd": str(work),
            "stop_grace_s": self.desired.stop_grace_s,
            "lease": str(lease_path) if self.desired.on_disconnect == "stop" else "",
            "lease_end": lease_end,
            "hidden": [str(path) for path in hidden],
            "limits": {} if self.desired.limits is None else self.desired.limits.model_dump(),
            "name": self.desired.replica_id,
            "account": None if account is None else asdict(account),
            "notice": str(self.folder / notices.FILE),
        }
        lease.write_json(self.folder / guard.ORDER, order)

    async def _until_free(self, port: int) -> None:
        """Wait a moment for the former process at this port to end. Raises Unavailable if it stays taken."""
        end = lease.now() + PORT_WAIT_S
        while not self.stopping and not ports.is_free(port):
            if lease.now() >= end:
                raise Unavailable(f"port {port} is taken by another process on this node")
            await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        """Follow the guard until the replica has ended, and report what happens."""
        pid = self._guard
        if pid is not None:
            await self._until_started(pid)
            await _until_gone(pid)
        if self._process is not None:
            self._process.reap()
        fields = self._read_exit()
        if not (self.folder / guard.EXIT).exists():
            await in_thread(cell.left_behind(self.desired.replica_id).remove)  # may wait for the last process
        await self._end(fields)

    async def _until_started(self, pid: int) -> None:
        """Wait until the entrypoint runs, or the guard has ended before."""
        while True:
            started = _read(self.folder / guard.STARTED) or {}
            child = started.get("child")
            if child is not None:
                detail = started.get("limits", "")
                self._set(self.report.model_copy(update={"state": "RUNNING", "pid": child, "detail": detail}))
                if self.stopping:
                    proc.send([pid], self._stop_signal)
                return
            if (self.folder / guard.EXIT).exists() or proc.start_ticks(pid) is None:
                return
            await asyncio.sleep(POLL_S)

    def _read_exit(self) -> dict[str, Any]:
        found = _read(self.folder / guard.EXIT)
        if found is not None:
            return found
        # The guard was killed: the entrypoint got SIGKILL with it, and what it started is found by its environment.
        mark = f"PENSTOCK_REPLICA_ID={self.desired.replica_id}"
        proc.send(proc.with_environment(mark), signal.SIGKILL)
        return _exit("KILLED", None, "the guard process of this replica vanished (killed, or the machine restarted)")

    async def _end(self, fields: dict[str, Any]) -> None:
        try:
            if not (self.folder / guard.EXIT).exists():
                lease.write_reserved(self.folder / guard.EXIT, fields)
        except OSError as error:  # a full disk must not take the agent down; only its memory knows the end then
            _log.warning("the end of replica %s could not be written: %s", self.desired.replica_id, error)
        self.ended_at = lease.now()
        self.draining = True
        fields = how_it_ended(fields, self.preempted_by, self.notice, notices.answer(self.relay.notice_path))
        update = {name: fields[name] for name in ("state", "exit_code", "signal", "detail")}
        self._set(self.report.model_copy(update=update))  # before the first await: a cancelled task must not lose it
        try:
            await self.relay.close()
        finally:
            self.draining = False
            self._changed()

    def trim_spool(self) -> None:
        """Take from the disk what the server has stored."""
        self._spool.trim(self.frames.unconfirmed())

    def _set(self, report: ReplicaReport) -> None:
        self.report = report
        self._changed()

    @property
    def saves_first(self) -> bool:
        """Whether it runs, and is to save at a step boundary before it is stopped by a preemption."""
        checkpoint = self.desired.checkpoint
        return self.report.state == "RUNNING" and checkpoint is not None and checkpoint.preempt_grace_s > 0

    @property
    def guard_pid(self) -> int | None:
        """The process id of its guard, from its start on."""
        return self._guard

    def stop(self, *, now: bool = False) -> None:
        """Ask the guard to stop the replica: with its grace, or `now` with SIGKILL. Returns at once."""
        self.stopping = True
        self._stop_signal = signal.SIGUSR1 if now else signal.SIGTERM
        # A guard that has not come to its entrypoint may not have its signals in hand yet: it gets it right after.
        if self._guard is not None and self.report.state == "RUNNING":
            proc.send([self._guard], self._stop_signal)

    def preempt(self, order: Preemption) -> None:
        """Ask the replica to save and to end by itself. One that does not run yet is stopped. Returns at once.

        From here on its guard sees to the end of the notice, also without this agent; so a replica whose guard is of an
        agent of before notices is stopped.
        """
        try:
            if self.report.state == "RUNNING" and self._guard_heeds_notices():
                content = preemption.encode(lease.now() + order.grace_s, order.why)
                notices.write(self.folder, content)
                self.relay.give_notice(content)
                self.notice = preemption.decode(content)
                return
        except OSError as error:  # a full disk
            _log.warning("replica %s is stopped without a notice: %s", self.desired.replica_id, error)
        self.stop()

    def _guard_heeds_notices(self) -> bool:
        order = _read(self.folder / guard.ORDER) or {}
        return order.get("notice") == str(self.folder / notices.FILE)

    def forget(self) -> None:
        """Remove the folder. Only for a replica that has ended."""
        self.relay.abandon()
        self._spool.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def adopt(self, account: Account | None = None) -> bool:
        """Take over what a former agent of this folder started. False if it had not come to a guard yet.

        `account`: as whom it runs.
        """
        self.relay.account = account
        started = _read(self.folder / guard.STARTED)
        self.notice = notices.read(self.folder / notices.FILE)
        self.relay.recall()
        if (self.folder / guard.EXIT).exists():
            await self._end(self._read_exit())
            return True
        if started is None:
            return False
        same_boot = started["boot_id"] == proc.boot_id()
        if same_boot and proc.is_alive(started["pid"], started["start_ticks"]):
            self._guard = started["pid"]
            await self.relay.open()
        return True


def load(folder: Path) -> Desired | None:
    """Return the order that a former agent kept in `folder`, or None if there is no readable one."""
    fields = _read(folder / REPLICA)
    try:
        return None if fields is None else Desired.model_validate(fields)
    except ValidationError as error:
        _log.warning("%s is not readable: %s", folder / REPLICA, error)
        return None


def how_it_ended(
    fields: dict[str, Any], why: str, notice: preemption.Notice | None, saved: int | None
) -> dict[str, Any]:
    """Return how a replica ended, where it was preempted.

    `why`: its node leaves, or ''. `notice`: that this agent, or its former run, has given; `saved`: what its processes
    say that they answered, which counts only with a notice. A training that has completed meanwhile has completed.
    """
    if fields["state"] == "EXITED" and fields["exit_code"] == 0:
        return fields
    if notice is not None and saved is not None:
        return {**fields, "state": "KILLED", "detail": f"{SAVED_AT}{saved}"}
    if fields["state"] != "KILLED" or not (why or notice):
        return fields
    if notice is None:
        return {**fields, "detail": f"{PREEMPTED}{why}"}
    return {**fields, "detail": f"{PREEMPTED}{why or notice.why}{NOT_SAVED}"}


def life(replica: Replica) -> Life:
    """Return how far a replica is, as `reconcile` needs it."""
    if not replica.report.terminal:
        running = Life.ALIVE if replica.notice is None else Life.NOTICED
        return Life.STOPPING if replica.stopping else running
    relayed = replica.log.settled and replica.frames.empty
    if replica.confirmed and (relayed or lease.now() - replica.ended_at > KEEP_UNACKED_S):
        return Life.SETTLED
    return Life.ENDED


def _start_guard(folder: Path) -> ProcessGroup:
    # -P: a module in the current folder must not shadow the standard library of the guard.
    argv = [sys.executable, "-P", "-m", "penstock_worker.guard", str(folder)]
    with open(folder / "guard.err", "wb", opener=privately) as errors:
        return ProcessGroup(argv, cwd="/", stdout=errors, stderr=errors, with_parent=False)  # it outlives the agent


async def _until_gone(pid: int) -> None:
    """Wait for the end of a process, our child or not. Does not reap it."""
    try:
        descriptor = open_process_end(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _exit(state: str, exit_code: int | None, detail: str) -> dict[str, Any]:
    return {"state": state, "exit_code": exit_code, "signal": None, "detail": detail, "ended_at": time.time()}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return fields


DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def entrypoint_environment(
    base: Mapping[str, str], desired: Desired, *, socket: str, interpreter: str, state_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
) -> dict[str, str]:  # fmt: skip
    """Return the variables of one replica. `state_dir`: of a pserver; `checkpoint_dir`: of a job with checkpoints.

    Of the agent's own variables those that `passes_from_node` allows come first: no secret, no place in a job, no
    setting. The job's `env`, which holds what its submitter exported, comes next and
    the contract last, so that a job cannot pose as another replica. PATH starts with the folder of the agent's
    interpreter, so that `python` in a job is the agent's. Output is unbuffered unless the job says otherwise.
    """
    environ = {name: value for name, value in base.items() if passes_from_node(name, value)}
    environ["PYTHONUNBUFFERED"] = "1"
    environ.update(desired.env)
    environ["PATH"] = os.pathsep.join([str(Path(interpreter).parent), environ.get("PATH") or DEFAULT_PATH])
    managed = contract.Managed(
        job_id=desired.job_id,
        job_name=desired.job_name,
        replica_id=desired.replica_id,
        role=desired.role,
        index=desired.index,
        epoch=desired.epoch,
        stream=desired.stream,
        socket=socket,
    )
    environ.update(managed.environ())
    if desired.pserver_job is not None:
        folder = "" if state_dir is None else str(state_dir)
        environ.update(desired.pserver_job.environ(desired.role, desired.index, state_dir=folder))
        environ.setdefault(PS_LEASE_S.name, PS_LEASE_S.default_text)
    if desired.collective_job is not None:
        environ.update(desired.collective_job.environ(desired.index))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, desired.cpus)))  # ranks share the cores of their node
    if desired.checkpoint is not None and checkpoint_dir is not None:
        settings = desired.checkpoint
        names = (CHECKPOINT_DIR.name, CHECKPOINT_EVERY_STEPS.name, CHECKPOINT_KEEP.name)
        for name, value in zip(names, (checkpoint_dir, settings.every_steps, settings.keep), strict=True):
            environ.setdefault(name, str(value))  # a job's `env` may name a folder that all nodes reach
    return environ
