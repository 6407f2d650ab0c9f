"""The actors of a gang. They are sent to Ray by value, so Penstock need not be importable in Ray's own interpreter.

`Pilot`: runs an agent as a child process, never within the actor, and ends it in order. `Gang`: makes placement group
and pilots, learns how these end, and gives the place back when the last one has. Both outlive the process that launched
them. If the actor of a gang is lost, Ray starts it again elsewhere, and it finds group and pilots by name.

Standard library and Ray only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

STARTS = 3
"""How often a pilot starts an agent that has failed."""
RESTARTS = 3
"""How often Ray starts a pilot again that was killed, or whose node was lost."""
AGAIN_S = 2.0
END_S = 40.0
"""From the request that a pilot end until its actor is killed: an agent ends what it runs within 20 s."""
KEPT_S = 20.0
"""How long a gang that is over can be asked how its pilots ended."""
WATCH_S = 0.5
_FINAL = {2: "its options are refused", 4: "the server refuses it"}
"""Exit status of agents that the next one would have, too."""
_log = logging.getLogger(__name__)


class Plan(TypedDict):
    """A gang. `handle`: the actor's name; `bundle`: resources of a pilot; `agent`: arguments; `environ`: secrets."""

    gang: str
    handle: str
    count: int
    bundle: dict[str, float]
    strategy: str
    python: str
    agent: list[str]
    environ: dict[str, str]
    pilot_dir: str
    lock: str


class Pilot:
    """Runs the agent of one pilot, and reports its end to the gang, which then kills this actor."""

    def __init__(self, plan: Plan, index: int) -> None:
        self._plan, self._index = plan, index
        self._lock = threading.Lock()
        self._is_ending = False
        self._raylet = os.getppid()
        self._tether: subprocess.Popen[bytes] | None = None
        self._self = ray.get_runtime_context().current_actor
        # of this thread the kernel's signal at the end of a parent depends: it lives as long as the process
        threading.Thread(target=self._run, daemon=True).start()

    def end(self) -> None:
        """End the agent in order, which takes 20 s at most; does not wait for it."""
        with self._lock:
            self._is_ending = True
            if self._tether is not None:
                self._tether.terminate()

    def _run(self) -> None:
        how = self._serve()
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # Ray's head is unreachable
                try:
                    gang = ray.get_actor(self._plan["handle"])
                except ValueError:  # it was killed for good
                    ray.kill(self._self)
                    return
                ray.get(gang.ended.remote(self._index, how), timeout=END_S)
            time.sleep(AGAIN_S)  # this actor is killed meanwhile

    def _serve(self) -> str:
        """Start the agent until it has ended in order, was asked to, or failed for good. Returns how it ended."""
        for start in range(1, STARTS + 1):
            try:
                folder = self._folder()
                status = self._agent(folder)
            except OSError as error:  # no such interpreter, a full disk
                how = f"its agent cannot be started: {error}"
                _log.error("%s (start %d of %d)", how, start, STARTS)
                time.sleep(AGAIN_S)
                continue
            if status is None or status == 0 or self._is_ending:
                shutil.rmtree(folder, ignore_errors=True)
                return "was cancelled" if self._is_ending else "its agent has ended"
            how = f"its agent failed: exit status {status} ({_FINAL.get(status, f'start {start} of {STARTS}')})"
            _log.error("%s; its state is in %s", how, folder)
            if status in _FINAL:
                break
            time.sleep(AGAIN_S)
        return how

    def _agent(self, folder: Path) -> int | None:
        with self._lock:
            if self._is_ending:
                return None
            try:
                # a session of its own, since Ray may end the process group of a worker at once
                self._tether = subprocess.Popen(
                    self._command(folder), env=self._environ(), stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._tether.wait(WATCH_S)
            if os.getppid() != self._raylet:
                self.end()
                self._tether.wait()
                os._exit(1)  # Ray starts this pilot elsewhere, and does not end workers that outlive their raylet

    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"penstock-{self._plan['handle']}.{self._index}-", dir=self._dir()))

    def _command(self, folder: Path) -> list[str]:
        plan = self._plan
        python = plan["python"] or sys.executable
        lock = Path(self._dir(), f"{plan['lock']}-{os.getuid()}-{plan['gang']}-{self._index}.lock")
        agent = [python, "-m", "penstock_worker", *plan["agent"], "--name", f"{plan['gang']}-{self._index}"]
        tether = [python, "-m", "penstock.process.tether", str(os.getpid()), str(lock)]
        return [*tether, *agent, "--state-dir", str(folder)]

    def _environ(self) -> dict[str, str]:
        """Return the worker's environment without what Ray has set for its workers."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        kept.pop("OMP_NUM_THREADS", None)
        return {**kept, **self._plan["environ"]}

    def _dir(self) -> str:
        return os.path.expandvars(self._plan["pilot_dir"]) or tempfile.gettempdir()


class Gang:
    """Keeps a gang. `ended` is called by pilots, the rest by the provisioner."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._ended: dict[int, str] = {}
        self._deadlines: dict[int, float] = {}
        self._raylet = os.getppid()
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            self._make()
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self) -> dict[int, str]:
        """Return the pilots that have ended, and how."""
        with self._lock:
            return dict(self._ended)

    def ended(self, index: int, how: str) -> None:
        """Take the end of a pilot: its actor is not started again."""
        with self._lock:
            self._ended.setdefault(index, how)
        self._kill(index)

    def cancel(self, indices: list[int]) -> None:
        """End pilots in order; those whose group has no room yet at once."""
        is_placed = self._state() not in ("", "PENDING")
        for index in indices:
            with self._lock:
                if index in self._ended or index in self._deadlines:
                    continue
                self._deadlines[index] = time.monotonic() + END_S
            if is_placed:
                with contextlib.suppress(ValueError):
                    ray.get_actor(self._name(index)).end.remote()
            else:
                self.ended(index, "was cancelled before it had room")

    def _name(self, index: int) -> str:
        return f"{self._plan['handle']}.{index}"

    def _make(self) -> None:
        plan = self._plan
        group = ray.util.placement_group(
            [plan["bundle"]] * plan["count"], plan["strategy"], name=plan["handle"], lifetime="detached"
        )
        resources = plan["bundle"]
        for index in range(plan["count"]):
            ray.remote(Pilot).options(
                name=self._name(index), lifetime="detached", max_restarts=RESTARTS, max_task_retries=-1,
                num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), memory=resources["memory"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(plan, index)  # fmt: skip

    def _watch(self) -> None:
        while len(self.report()) < self._plan["count"]:
            time.sleep(WATCH_S)
            if os.getppid() != self._raylet:
                os._exit(1)  # Ray starts this gang elsewhere: there must not be two that keep it
            try:
                self._look()
            except ray.exceptions.RayError as error:  # Ray's head is unreachable
                _log.warning("%s: %s", self._plan["handle"], error)
        _insist(self._give_back)
        time.sleep(KEPT_S)
        _insist(self._leave)

    def _look(self) -> None:
        """Find the pilots that have gone without a report, and kill those that take too long to end."""
        known, now = set(ray.util.list_named_actors()), time.monotonic()
        for index in range(self._plan["count"]):
            if index in self.report():
                continue
            if self._name(index) not in known:
                self.ended(index, f"its actor is gone: it was killed, or lost {RESTARTS + 1} times")
            elif now > self._deadlines.get(index, now):
                self.ended(index, f"was killed: it had not ended {END_S:g} s after it was cancelled")

    def _give_back(self) -> None:
        with contextlib.suppress(ValueError):
            ray.util.remove_placement_group(ray.util.get_placement_group(self._plan["handle"]))

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(self._plan["handle"]))

    def _state(self) -> str:
        try:
            group = ray.util.get_placement_group(self._plan["handle"])
        except ValueError:
            return ""
        table: dict[str, Any] = ray.util.placement_group_table(group)
        return str(table.get("state", ""))

    def _kill(self, index: int) -> None:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(self._name(index)))


def _insist(act: Callable[[], None]) -> None:
    """Act until Ray has answered."""
    while True:
        try:
            return act()
        except ray.exceptions.RayError as error:
            _log.warning("%s", error)
        time.sleep(AGAIN_S)
