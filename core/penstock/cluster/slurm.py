"""Pilots on Slurm: a gang is a job array, whose tasks are scheduled on their own; its handle is the array's job id.

A task may be requeued (`scontrol requeue`, a failed node): it starts again under its name, and joins as the same node.
Slurm sends SIGTERM ahead of the time limit, at which the pilot ends what it runs; by then its own time is over,
unless the limit was shortened meanwhile. The folder of the token and the interpreter have to be on every node, as
users' home folders are. Needs the commands of Slurm, 21.08 or newer; accounting is not needed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cluster.provisioner import EngineAway, Phase, Pilot, Request
from penstock.errors import SpecError

COMMAND_LIMIT_S = 30.0
LEEWAY_S = 60.0
"""How much longer than its pilot a task may run: the pilot joins first, and ends what it runs last."""
SLACK_S = 5.0
"""Beyond KillWait, until a node has forgotten a task that was taken from it."""
WORTH_S = 30.0
"""What a release has to save: clocks here and of slurmctld may differ by as much, and none is put off forever."""
_HELD_BACK = ("PENDING", "BeginTime")
UNKNOWN_JOB = "Invalid job id"
_PENDING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})


@dataclass(frozen=True, slots=True)
class Slurm:
    """`options`: further arguments of sbatch, such as `--partition=gpu`. `python`: the interpreter on the nodes.

    `signal_s`: how long before the limit Slurm sends SIGTERM; it may be up to 60 s more. `log_dir`: of the pilots'
    logs. `pilot_dir`: on the nodes, for the pilots' own folders. `environ`: of the commands, None for this process's.
    """

    python: str
    log_dir: Path
    options: tuple[str, ...] = ()
    signal_s: float = 30.0
    pilot_dir: str = "${TMPDIR:-/tmp}"
    environ: Mapping[str, str] | None = None
    engine: str = "Slurm"

    def plan(self, request: Request) -> str:
        """Return the command and the script."""
        return f"{shlex.join(self._sbatch(request))}\n\n{self.script(request)}"

    def launch(self, request: Request) -> str:
        """Submit an array, unless there is one of this name that has not ended."""
        known = self._run("squeue", "-h", "--me", "-t", "pending,running", f"--name={request.name}", "-o", "%F")
        if known:
            return known.split()[0]
        self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        answer = self._run(*self._sbatch(request), stdin=self.script(request))
        return answer.strip().partition(";")[0]  # with federations the cluster follows

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        """Ask squeue, which knows ended tasks for MinJobAge (5 minutes unless configured).

        A requeued task, which Slurm holds back for two minutes, is released earlier: jobs wait for it. Not at once:
        a node that still ends the task that was taken from it refuses to start it again ("already running"), upon
        which Slurm holds the task until someone releases it, and drains the node.
        """
        try:
            columns = "%j|%K|%T|%r|%N|%S"
            answer = self._run("squeue", "-h", "-r", "-t", "all", "-j", handle, "-o", columns, SLURM_TIME_FORMAT="%s")
        except SpecError as error:
            if UNKNOWN_JOB in str(error):
                return ()
            raise
        lines = answer.splitlines()
        held = {index: start_s for line in lines if line for index, start_s in held_back(line)}
        if held:
            wait_s = read_kill_wait(self._run("scontrol", "show", "config")) + SLACK_S
            now_s = time.time()
            for index, start_s in held.items():
                if start_s - now_s > wait_s + WORTH_S:
                    self._run("scontrol", "update", f"JobId={handle}_{index}", f"StartTime=now+{wait_s:.0f}")
        return tuple(read_pilot(line) for line in lines if line)

    def cancel(self, handle: str, names: Collection[str] = ()) -> None:
        """Cancel tasks, or the array."""
        targets = [f"{handle}_{name.rpartition('-')[2]}" for name in sorted(names)] or [handle]
        try:
            self._run("scancel", *targets)
        except SpecError as error:
            if UNKNOWN_JOB not in str(error):
                raise

    def script(self, request: Request) -> str:
        """Return the batch script. The shell becomes the agent, so that Slurm's signal for the shell reaches it."""
        agent = shlex.join([self.python, "-m", "penstock_worker", *request.agent_arguments()])
        return f"""#!/bin/sh
umask 077
PENSTOCK_JOIN_TOKEN=$(cat {shlex.quote(str(request.token_file))}) || exit 1
export PENSTOCK_JOIN_TOKEN
folder=$(mktemp -d "{self.pilot_dir}/penstock-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID-XXXXXX") || exit 1
exec {agent} --name "$SLURM_JOB_NAME-$SLURM_ARRAY_TASK_ID" --state-dir "$folder"
"""

    def _sbatch(self, request: Request) -> list[str]:
        shape = request.shape
        minutes = -(-(request.ttl_s + LEEWAY_S) // 60)
        return [
            "sbatch", "--parsable", f"--job-name={request.name}", f"--array=0-{request.count - 1}", "--nodes=1",
            "--ntasks=1", f"--cpus-per-task={shape.cpus}", f"--mem={shape.memory_mib}M",
            *([f"--gpus-per-task={shape.gpus}"] if shape.gpus else []),
            f"--time={minutes:.0f}", f"--signal=B:TERM@{self.signal_s:.0f}", "--requeue", "--open-mode=append",
            f"--output={self.log_dir}/%x-%a.log", *self.options,
        ]  # fmt: skip

    def _run(self, *command: str, stdin: str = "", **more: str) -> str:
        """Run a command of Slurm, with these variables beside its environment.

        Raises EngineAway if Slurm cannot be reached, SpecError if it refuses.
        """
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False,
                env={**(os.environ if self.environ is None else self.environ), **more},
            )  # fmt: skip
        except FileNotFoundError as error:
            raise SpecError(f"there is no {command[0]} on PATH: run this where Slurm's commands are") from error
        except subprocess.TimeoutExpired as error:
            raise EngineAway(f"{command[0]} has not answered within {COMMAND_LIMIT_S:g} s") from error
        if done.returncode:
            raise _refusal(command, done.stderr.strip() or f"exit status {done.returncode}")
        return done.stdout


def _refusal(command: Sequence[str], said: str) -> EngineAway | SpecError:
    signs = ("Unable to contact", "Connection refused", "Socket timed out", "munge")
    is_unreachable = any(text in said for text in signs)
    text = f"{command[0]} failed: {said}"
    return EngineAway(text) if is_unreachable else SpecError(text)


def held_back(line: str) -> Iterator[tuple[str, float]]:
    """Yield index and start of a task that waits for a time, given its line of squeue (see read_pilot)."""
    _, index, state, reason, _, start_s = line.split("|")
    if (state, reason) == _HELD_BACK and start_s.isdecimal():
        yield index, float(start_s)


def read_kill_wait(config: str) -> float:
    """Return KillWait of `scontrol show config`: how many seconds a task has between SIGTERM and SIGKILL."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    if found is None:
        raise SpecError("scontrol show config names no KillWait")
    return float(found[1])


def read_pilot(line: str) -> Pilot:
    """Return what a line of `squeue -o %j|%K|%T|%r|%N|%S` says: name, index, state, reason, node, start in seconds."""
    name, index, state, reason, node, _ = line.split("|")
    where = f" on {node}" if node else ""
    if state in _PENDING:
        phase, detail = Phase.PENDING, reason
    elif state in _RUNNING:
        phase, detail = Phase.RUNNING, f"{state.lower()}{where}"
    else:
        phase, detail = Phase.ENDED, f"{state}{where}" + (f": {reason}" if reason not in ("None", state) else "")
    return Pilot(f"{name}-{index}", phase, detail)
