"""Start a job of parameter servers on this host: the same script, as servers and as trainers.

    python -m penstock.distributed.launch_ps --server_num 2 --worker_num 2 train.py --epochs 3

Each process finds its place in the environment (PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, TRAINING_ROLE,
PADDLE_TRAINER_ID, POD_IP, PADDLE_PORT), which PaddleCloudRoleMaker reads. Output goes to workerlog.N and serverlog.N in
the log folder; what trainer 0 writes is shown as well. The first process that fails ends the job: it is named, with the
end of its log, and its exit status is the launcher's (128 + the signal's number for a signal). Ctrl-C stops everything.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.command.children import Stopped, ignore_signals, stopped_by_signal
from penstock.distributed.group import Group, stop
from penstock.distributed.local_job import Draining, Failed, Finished, Plan, planned, status_text, verdict
from penstock.distributed.ports import check_free, free_ports
from penstock.errors import SpecError
from penstock.fleet.position import endpoints_problem

_POLL_S = 0.05
_TAIL_LINES = 20
_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="python -m penstock.distributed.launch_ps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--server_num", type=_count, metavar="N", help="parameter servers to start (2, or as many as --endpoints)")
    add("--worker_num", type=_count, default=2, metavar="N", help="trainers to start (%(default)s)")
    where = found.add_mutually_exclusive_group()
    where.add_argument(
        "--started_port", "--start_port", type=_port, metavar="PORT",
        help="port of server 0; the others follow (default: free ports)",
    )  # fmt: skip
    where.add_argument("--endpoints", metavar="HOST:PORT,…", help="where the servers listen, all on this host")
    add("--node_ip", default="127.0.0.1", metavar="HOST", help="address of this host, for --started_port (%(default)s)")
    add("--log_dir", type=Path, default=Path("logs"), metavar="DIR", help="folder of the log files (%(default)s)")
    add(
        "--print_config", type=_claim, nargs="?", const=True, default=True, metavar="true|false",
        help="show the processes before they start (%(default)s); with false they start all the same",
    )  # fmt: skip
    add("--server_grace_s", type=float, default=30.0, metavar="S",
        help="how long servers may take to end after the last trainer (%(default)s)")  # fmt: skip
    add("--stop_s", type=float, default=10.0, metavar="S", help="seconds from SIGTERM to SIGKILL (%(default)s)")
    add("script", type=Path, help="the training script")
    add("script_args", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 1 to 65535")
    return int(text)


def _claim(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def endpoints_of(args: argparse.Namespace) -> list[str]:
    """Return where the servers are to listen. Raises SpecError for what cannot be, or a port that is taken."""
    if args.endpoints:
        found = [part.strip() for part in args.endpoints.split(",")]
        problem = endpoints_problem(found)
        if problem:
            raise SpecError(f"--endpoints is {args.endpoints!r}: {problem}", pointer="--endpoints")
        if args.server_num not in (None, len(found)):
            raise SpecError(
                f"--endpoints has {len(found)} entries, but --server_num is {args.server_num}", pointer="--server_num"
            )
    else:
        count = args.server_num or 2
        first = args.started_port
        try:
            ports = free_ports(args.node_ip, count) if first is None else list(range(first, first + count))
        except OSError as error:
            raise SpecError(
                f"no server can listen at {args.node_ip}: {error.strerror}. --node_ip is an address of this host",
                pointer="--node_ip",
            ) from error
        if ports[-1] > 65535:
            raise SpecError(f"--started_port {first} leaves no room for {count} ports", pointer="--started_port")
        found = [f"{args.node_ip}:{port}" for port in ports]
    check_free(found)
    return found


class Job:
    """The running processes of a plan."""

    def __init__(self, plan: Plan, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.plan = plan
        self._command = command
        self._environ = environ
        self._groups: list[Group] = []
        self._ended: list[tuple[int, int]] = []
        self._started = time.monotonic()

    def start(self) -> None:
        """Start all processes, servers first."""
        for process in self.plan.processes:
            env = {**self._environ, **{k: v for k, v in process.env.items() if v is not None}}
            for name in (k for k, v in process.env.items() if v is None):
                env.pop(name, None)
            self._groups.append(Group(self._command, env=env, log=process.log))

    def wait(self, grace_s: float) -> Failed | Finished:
        """Wait until the job is over, passing on what trainer 0 writes."""
        until: float | None = None
        while True:
            self._look()
            found = verdict(self.plan, self._ended, grace_over=until is not None and time.monotonic() >= until)
            if isinstance(found, (Failed, Finished)):
                return found
            if isinstance(found, Draining) and until is None:
                until = time.monotonic() + grace_s
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float) -> None:
        """End what still runs, and pass on the rest of trainer 0's output."""
        stop(self._groups, timeout_s)
        while self._pass_on():
            pass

    def tail(self, place: int) -> str:
        """Return the end of a process's log."""
        return "\n".join(f"  {line}" for line in self._groups[place].tail(_TAIL_LINES))

    def _look(self) -> None:
        self._pass_on()
        known = {place for place, _ in self._ended}
        for place, group in enumerate(self._groups):
            status = group.status()
            if status is None or place in known:
                continue
            self._ended.append((place, status))
            seconds = time.monotonic() - self._started
            how = "has finished" if status == 0 else f"ended with {status_text(status)}"
            _say(f"{self.plan.processes[place].name} {how} after {seconds:.1f} s")

    def _pass_on(self) -> int:
        first = next(place for place, p in enumerate(self.plan.processes) if p.kind == "trainer")
        output = self._groups[first].new_output() if first < len(self._groups) else b""
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
        return len(output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the job to its end and return the exit status. Raises SpecError before anything was started."""
    if not args.script.is_file():
        raise SpecError(f"there is no script {str(args.script)!r} in {Path.cwd()}", pointer="script")
    defaults = {
        "PENSTOCK_JOB_ID": f"launch-{os.getpid()}-{secrets.token_hex(4)}",
        "PENSTOCK_PS_TOKEN": secrets.token_hex(16),
        "PENSTOCK_PS_SAVE_DIRS": str(Path.cwd()),
    }
    plan = planned(endpoints_of(args), args.worker_num, args.log_dir, environ, defaults=defaults)
    args.log_dir.mkdir(parents=True, exist_ok=True)
    if args.print_config:
        _say(f"{' '.join([str(args.script), *args.script_args])}\n{plan.described()}")
    job = Job(plan, [sys.executable, str(args.script), *args.script_args], environ)
    try:
        with stopped_by_signal():
            try:
                job.start()
                found = job.wait(args.server_grace_s)
            finally:
                ignore_signals()  # a second Ctrl-C must not leave processes behind
                job.stop(args.stop_s)
    except Stopped as stopped:
        _say(f"stopped by {stopped}")
        return 128 + signal.Signals[str(stopped)].value
    return _report(job, found, args.server_grace_s)


def _report(job: Job, found: Failed | Finished, grace_s: float) -> int:
    if isinstance(found, Failed):
        process, how = job.plan.processes[found.place], status_text(found.status)
        _say(f"{process.name} failed with {how}; the end of {process.log}:\n{job.tail(found.place)}")
        return found.exit_status
    for place in found.lingering:
        _say(
            f"{job.plan.processes[place].name} still served {grace_s:g} s after the last trainer had ended, and was "
            "stopped. Do the trainers call fleet.stop_worker() or exe.close()?"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, run the job, return the exit status."""
    args = parser().parse_args(argv)
    try:
        return run(args, os.environ)
    except SpecError as error:
        _say(f"launch_ps: {error}")
        return _USAGE


if __name__ == "__main__":
    sys.exit(main())
