"""Runs the processes of a plan to their end: starts them, watches, names the first that fails, and leaves none."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.distributed.local_job import Draining, Failed, Finished, Plan, status_text, verdict
from penstock.errors import SpecError
from penstock.process.group import LoggedGroup, stop, wait_for_an_end
from penstock.process.reaper import OrphanReaper
from penstock.process.signals import Stopped, ignore_signals, signals_held, stopped_by_signal

_POLL_S = 0.05
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Manner:
    """How a job is run. `server_grace_s`: how long servers may go on after the last trainer of this host.

    `stop_s`: from SIGTERM to SIGKILL. `shows_ends`: whether each end is reported, and not only a failure.
    """

    stop_s: float
    server_grace_s: float = 0.0
    shows_ends: bool = True


class _Job:
    """The running processes of a plan."""

    def __init__(self, plan: Plan, command: Sequence[str], environ: Mapping[str, str], manner: Manner) -> None:
        self.plan = plan
        self._command = command
        self._environ = environ
        self._manner = manner
        self._groups: list[LoggedGroup] = []
        self._ended: list[tuple[int, int]] = []
        self._started = time.monotonic()

    def start(self, reaper: OrphanReaper) -> None:
        """Start all processes in the order of the plan."""
        for process in self.plan.processes:
            env = {**self._environ, **{k: v for k, v in process.env.items() if v is not None}}
            for name in (k for k, v in process.env.items() if v is None):
                env.pop(name, None)
            with signals_held():
                self._groups.append(LoggedGroup(self._command, env=env, log=process.log))
                reaper.add(self._groups[-1].pid)

    def wait(self) -> Failed | Finished:
        """Wait until the job is over, passing on what the first trainer writes."""
        until: float | None = None
        while True:
            self._look()
            found = verdict(self.plan, self._ended, grace_over=until is not None and time.monotonic() >= until)
            if isinstance(found, (Failed, Finished)):
                return found
            if isinstance(found, Draining) and until is None:
                until = time.monotonic() + self._manner.server_grace_s
            # At once, and not at the next look: the others of a job often fail a moment after the first.
            wait_for_an_end([g for place, g in enumerate(self._groups) if place not in self._over()], _POLL_S)

    def stop(self) -> None:
        """End what still runs, and pass on the rest of the first trainer's output."""
        stop(self._groups, self._manner.stop_s)
        while self._pass_on():
            pass

    def report(self, found: Failed | Finished) -> int:
        """Print how the job ended, and return the exit status."""
        if isinstance(found, Failed):
            process, how = self.plan.processes[found.place], status_text(found.status)
            tail = "\n".join(f"  {line}" for line in self._groups[found.place].tail(_TAIL_LINES))
            log = f"the end of {process.log}:\n{tail}" if tail else f"it wrote nothing to {process.log}"
            print_line(f"{process.name} failed with {how}; {log}")
            return found.exit_status
        for place in found.lingering:
            print_line(
                f"{self.plan.processes[place].name} still served {self._manner.server_grace_s:g} s after the last "
                "trainer had ended, and was stopped. Do the trainers call fleet.stop_worker() or exe.close()?"
            )
        return 0

    def _over(self) -> set[int]:
        """Return the places of those that were seen to end."""
        return {place for place, _ in self._ended}

    def _look(self) -> None:
        self._pass_on()
        over = self._over()
        for place, group in enumerate(self._groups):
            status = group.status()
            if status is None or place in over:
                continue
            self._ended.append((place, status))
            if self._manner.shows_ends:
                seconds = time.monotonic() - self._started
                how = "has finished" if status == 0 else f"ended with {status_text(status)}"
                print_line(f"{self.plan.processes[place].name} {how} after {seconds:.1f} s")

    def _pass_on(self) -> int:
        first = next(place for place, p in enumerate(self.plan.processes) if p.kind == "trainer")
        output = self._groups[first].new_output() if first < len(self._groups) else b""
        try:
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            _discard(sys.stdout)
        return len(output)


def print_line(text: str) -> None:
    """Print a launcher's own line on stderr."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)


def _discard(stream: IO[str]) -> None:
    """Go on though the reader of a stream has ended (`launch … | head`): the log files have it all."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def supervise(plan: Plan, command: Sequence[str], environ: Mapping[str, str], manner: Manner) -> int:
    """Run a plan on this host to its end, in the main thread, and return the exit status. A signal stops everything.

    Raises SpecError before anything was started if a log file cannot be had.
    """
    with claimed([process.log for process in plan.processes]):
        return _supervise(_Job(plan, command, environ, manner), manner)


def _supervise(job: _Job, manner: Manner) -> int:
    reaper = OrphanReaper(manner.stop_s)
    try:
        with stopped_by_signal():
            try:
                job.start(reaper)
                found = job.wait()
            finally:
                ignore_signals()  # a second Ctrl-C must not leave processes behind
                job.stop()
                reaper.dismiss()
    except Stopped as stopped:
        print_line(f"stopped by {stopped}")
        return 128 + signal.Signals[str(stopped)].value
    return job.report(found)


@contextmanager
def claimed(logs: Sequence[Path]) -> Iterator[None]:
    """Keep log files, and make their folders: two launchers at one file would destroy each other's lines.

    Raises SpecError for a file that cannot be written, or that another launcher has.
    """
    with ExitStack() as stack:
        for log in logs:
            _lock(stack.enter_context(_open(log)), log)
        yield


def _open(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise SpecError(
            f"the log file {log} cannot be written: {error.strerror}. Choose another folder with --log_dir",
            pointer="--log_dir",
        ) from error


def _lock(file: IO[bytes], log: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not filelock: the orphan reaper inherits the lock
    except BlockingIOError as error:
        raise SpecError(
            f"another launcher writes to {log}, or what it has started has not ended yet. Choose another folder with "
            "--log_dir, or wait",
            pointer="--log_dir",
        ) from error
    except OSError as error:
        raise SpecError(
            f"the log file {log} cannot be kept to this launcher: {error.strerror}. Choose a folder with --log_dir "
            "whose file system has locks",
            pointer="--log_dir",
        ) from error
