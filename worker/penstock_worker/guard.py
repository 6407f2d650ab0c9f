"""The process above one replica: it starts the entrypoint, waits, and leaves nothing behind.

    python -P -m penstock_worker.guard FOLDER

reads FOLDER/guard-order.json, runs the entrypoint in a session of its own with stdout and stderr appended to
FOLDER/log, and when the entrypoint and *everything that it started* is gone, writes FOLDER/exit.json. It is a child
subreaper, so processes that detach themselves still stand below it and end with it. Standard library only, so that it
starts fast.

SIGTERM or SIGINT: stop (SIGTERM to all, SIGKILL after `stop_grace_s`). SIGUSR1: SIGKILL at once.
Without news from agent or server it goes on, unless the job asked for a stop (`on_disconnect`): then the guard has a
lease, and stops the replica by itself when that and its grace are over. It also stops it at the end of a notice of
preemption (`penstock.protocol.preemption`). `step` decides, `main` does.

How the replica ended is written into space that was reserved before it started: a disk that it filled must not make
its end unknown, since an end that is unknown is followed by another attempt.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from penstock.process import cell, proc
from penstock.process.hiding import hide
from penstock_worker import lease, notices
from penstock_worker.accounts import Account, privately

ORDER, STARTED, EXIT, LOG, LOCK = "guard-order.json", "guard.json", "exit.json", "log", "guard.lock"
LEFTOVER_GRACE_S = 1.0  # what an entrypoint that has ended left running gets this long after SIGTERM
WATCH_S, END_S = 0.25, 0.02
UNWRITTEN_S, AGAIN_S = 600.0, 1.0  # how long, and how often, an end that cannot be written is tried again
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


@dataclass(frozen=True, slots=True)
class Order:
    """What to run. `lease`: path of the lease file, or ''; `lease_end`: boot time of its end, until it is read.

    `hidden`: paths that it is not to see. `limits`: fields of `cell.Limits`; `name`: of its control group.
    `account`: fields of the `Account` that it runs as; None: the guard's own user. `notice`: path of `notices.FILE`.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    stop_grace_s: float
    lease: str
    lease_end: float
    hidden: list[str] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    account: dict[str, Any] | None = None
    notice: str = ""


class Phase(Enum):
    """Of the replica. ENDING: SIGTERM was sent; KILLING: SIGKILL is sent until nothing is left."""

    RUNNING = "running"
    ENDING = "ending"
    KILLING = "killing"
    DONE = "done"


class Ask(Enum):
    """What a signal asked for."""

    NOTHING = 0
    STOP = 1
    KILL = 2


@dataclass(frozen=True, slots=True)
class State:
    """`cause`: why the guard ends a replica that would run on; empty if the entrypoint ended by itself."""

    phase: Phase = Phase.RUNNING
    deadline: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen. `others`: processes below the guard, without the entrypoint. `notice_end`: of a preemption."""

    now: float
    main: bool
    others: bool
    ask: Ask
    lease_end: float
    notice_end: float = math.inf


def step(state: State, facts: Facts, *, stop_grace_s: float) -> tuple[State, signal.Signals | None]:
    """Return the next state and the signal that everything below the guard gets, if any."""
    if not facts.main and not facts.others:
        return State(Phase.DONE, cause=state.cause), None
    if state.phase is Phase.RUNNING:
        return _from_running(facts, stop_grace_s)
    if state.phase is Phase.KILLING or facts.ask is Ask.KILL or facts.now >= state.deadline:
        return State(Phase.KILLING, cause=state.cause), signal.SIGKILL
    return state, None


def _from_running(facts: Facts, stop_grace_s: float) -> tuple[State, signal.Signals | None]:
    if not facts.main:
        return State(Phase.ENDING, facts.now + min(LEFTOVER_GRACE_S, stop_grace_s)), signal.SIGTERM
    if facts.ask is Ask.KILL:
        return State(Phase.KILLING, cause="stopped"), signal.SIGKILL
    if facts.ask is Ask.STOP:
        return State(Phase.ENDING, facts.now + stop_grace_s, "stopped"), signal.SIGTERM
    if facts.now >= facts.lease_end:
        return State(Phase.ENDING, facts.now + stop_grace_s, "lease expired"), signal.SIGTERM
    if facts.now >= facts.notice_end:
        return State(Phase.ENDING, facts.now + stop_grace_s, "preempted"), signal.SIGTERM
    return State(), None


@dataclass(slots=True)
class Outcome:
    """How the entrypoint ended: exit code or signal number, and a sentence where there is more to say."""

    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""


def main(folder: Path) -> int:
    """Run the replica of `folder` to its end. Returns 0, or 1 if another guard has this folder."""
    with open(folder / LOCK, "w", encoding="utf-8", opener=privately) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not filelock: a guard loads the standard library only
        except BlockingIOError:
            return 1
        if (folder / EXIT).exists():
            return 1
        order = Order(**json.loads((folder / ORDER).read_text(encoding="utf-8")))
        proc.prctl(proc.PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        _write_started(folder, None)
        lease.reserve(folder / STARTED)  # again, for when the entrypoint runs
        bounds = cell.make(order.name, cell.Limits(**order.limits))
        try:
            state, outcome = _run(folder, order, bounds)
            if outcome.exit_code != 0 and not state.cause:
                outcome.detail = bounds.out_of_memory() or outcome.detail
        finally:
            bounds.remove()
        fields = {
            "state": "KILLED" if state.cause else "EXITED",
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "detail": outcome.detail or state.cause,
            "ended_at": time.time(),
        }
        _write_exit(folder / EXIT, fields)
    return 0


def _write_exit(path: Path, fields: dict[str, Any]) -> None:
    """Write how the replica ended; try again while that fails. Raises OSError after `UNWRITTEN_S`."""
    give_up_at = lease.now() + UNWRITTEN_S
    while True:
        try:
            lease.write_reserved(path, fields)
        except OSError:
            if lease.now() >= give_up_at:
                raise
            time.sleep(AGAIN_S)
        else:
            return


def _run(folder: Path, order: Order, bounds: cell.Cell) -> tuple[State, Outcome]:
    pid, failure = _spawn(order, folder / LOG, bounds)
    if failure is not None:
        if pid:
            os.waitpid(pid, 0)
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"penstock: {failure.detail}\n")
        return State(Phase.DONE), failure
    _write_started(folder, pid, bounds.note())
    state, outcome, lease_end = State(), Outcome(), order.lease_end if order.lease else math.inf
    main_alive, notice_end = True, math.inf
    while state.phase is not Phase.DONE:
        ask = _wait(WATCH_S if state.phase is Phase.RUNNING and main_alive else END_S)
        main_alive = _reap(pid, outcome) and main_alive
        current = lease.read(Path(order.lease)) if order.lease else None
        lease_end = lease_end if current is None else current.end
        # The walk over /proc is only needed when the replica ends.
        below = proc.descendants(os.getpid()) if not main_alive or state.phase is not Phase.RUNNING else []
        others = any(child != pid for child in below)
        notice_end = end_of_notice(order.notice, notice_end)
        facts = Facts(lease.now(), main_alive, others, ask, lease_end, notice_end)
        state, number = step(state, facts, stop_grace_s=order.stop_grace_s)
        if number is not None:
            proc.send(proc.descendants(os.getpid()), number)
    return state, outcome


def end_of_notice(path: str, before: float) -> float:
    """Return when the notice of a preemption ends, on the clock of leases; infinity without one.

    `before`: what was read last. A notice that was given stays, whatever becomes of the file.
    """
    found = notices.read(Path(path)) if path else None
    return before if found is None else min(before, found.until)


def _write_started(folder: Path, child: int | None, limits: str = "") -> None:
    fields = {
        "pid": os.getpid(),
        "start_ticks": proc.start_ticks(os.getpid()),
        "boot_id": proc.boot_id(),
        "child": child,
        "limits": limits,
    }
    lease.write_reserved(folder / STARTED, fields)


def _wait(timeout_s: float) -> Ask:
    """Wait for a signal, and return what all pending ones ask for together."""
    ask = Ask.NOTHING
    got = signal.sigtimedwait(SIGNALS, timeout_s)
    while got is not None:
        if got.si_signo == signal.SIGUSR1:
            ask = Ask.KILL
        elif got.si_signo in (signal.SIGTERM, signal.SIGINT) and ask is Ask.NOTHING:
            ask = Ask.STOP
        got = signal.sigtimedwait(SIGNALS, 0)
    return ask


def _reap(main_pid: int, outcome: Outcome) -> bool:
    """Reap every child that has ended; return whether the entrypoint was not among them."""
    running = True
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return running
        if pid == 0:
            return running
        if pid == main_pid:
            running = False
            if os.WIFSIGNALED(status):
                outcome.signal = os.WTERMSIG(status)
            else:
                outcome.exit_code = os.waitstatus_to_exitcode(status)


def _spawn(order: Order, log: Path, bounds: cell.Cell) -> tuple[int, Outcome | None]:
    """Start the entrypoint. Returns its pid (0: there was none), and the failure if it could not be executed."""
    wrong = _unusable(order)
    if wrong:
        return 0, Outcome(127, detail=wrong)
    reader, writer = os.pipe()  # closed by a successful exec
    end_with_guard = proc.end_with_parent(signal.SIGKILL)  # without the guard nothing heeds the lease
    without_secrets = hide(order.hidden) if order.hidden else None
    pid = os.fork()
    if pid == 0:
        _become(order, log, writer, bounds, end_with_guard, without_secrets)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        failed = pipe.read()
    return pid, _start_failure(order, int(failed)) if failed else None


def _unusable(order: Order) -> str:
    """Return what no process can be given: the kernel takes neither NUL nor what is no text. Empty if all is well."""
    fields = {f"entrypoint[{i}]": text for i, text in enumerate(order.argv)}
    for key, value in order.env.items():
        fields |= {f"name {key!r} in env": key, f"env[{key!r}]": value}
    for place, text in fields.items():
        try:
            if b"\0" in os.fsencode(text):
                return f"{place} is {text!r}, which holds a NUL character; leave it out of the job"
        except UnicodeEncodeError as error:
            return f"{place} is {text!r}, which no process can be given ({error.reason}); correct the job"
    return ""


def _become(
    order: Order,
    log: Path,
    writer: int,
    bounds: cell.Cell,
    end_with_guard: Callable[[], None],
    without_secrets: Callable[[], str] | None,
) -> NoReturn:
    """In the forked child: turn into the entrypoint, or report the error number and end."""
    try:
        os.setsid()
        bounds.enter()
        end_with_guard()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        wrong = "" if without_secrets is None else without_secrets()
        if wrong:
            os.write(2, f"penstock: this job can read the files of its agent and server: {wrong}\n".encode())
        if order.account is not None:
            Account(**order.account).become()
            end_with_guard()  # which was cleared by that
        os.chdir(order.cwd)
        os.execvpe(order.argv[0], order.argv, order.env)
    except OSError as error:
        os.write(writer, str(error.errno or errno.EIO).encode())
    finally:
        os._exit(127)


def _start_failure(order: Order, number: int) -> Outcome:
    """Describe what is wrong with the entrypoint, with the exit code that a shell would give."""
    program, path = order.argv[0], order.env.get("PATH", "")
    where = f"in the working folder {order.cwd}" if "/" in program else f"on PATH {path!r}"
    if number == errno.ENOENT:
        return Outcome(127, detail=f"entrypoint {program!r} not found {where}; correct 'entrypoint' in the job")
    if number in (errno.EACCES, errno.EPERM):
        return Outcome(126, detail=f"entrypoint {program!r} may not be executed ({where}); is its x bit set?")
    return Outcome(126, detail=f"entrypoint {program!r} could not be started ({where}): {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
