"""`penstock demo`: a server, an agent, the example as a job, and what came out of it."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.command import follow
from penstock.command.exits import Exit
from penstock.command.output import emit_json, is_over, note
from penstock.command.passing import with_environment, without_settings
from penstock.command.specfile import load, prepare
from penstock.command.stack import Stack
from penstock.errors import SpecError
from penstock.machine.network import open_browser
from penstock.process.signals import Stopped, stopped_by_signal
from penstock.protocol.jobspec import JobSpec, Resources, memory_bytes

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.protocol.rest import Job, Node, Series

EXAMPLE = Path("examples") / "ctr_flights" / "job.yaml"
TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Demo:
    """What was asked for. `job`: another job file than the example's.

    `options`: of its script, None for those that stay as they are. `env`: variables over those of its file.
    `no_env`: exported settings reach neither the job nor its node.
    """

    exit_when_done: bool
    options: Mapping[str, int | None]
    env: Mapping[str, str]
    no_env: bool
    open_browser: bool
    json: bool
    job: Path | None


def run(settings: Demo, *, host: str, port: int, state_dir: Path | None) -> Exit:
    """Run the demo to its end or to a signal; everything that it started is gone when it returns."""
    file = settings.job or example()
    spec = _asked_for(load(file), settings)
    environ = without_settings(os.environ) if settings.no_env else os.environ
    job: Job | None = None
    try:
        with (
            stopped_by_signal(),
            _folder(state_dir) as folder,
            Stack(folder, host=host, port=port, agent=True, environ=environ) as stack,
        ):
            spec, nodes = _fitted(stack.client, spec)
            fields = prepare(stack.client, spec, folder=file.parent)
            job = stack.client.submit(fields, key=uuid.uuid4().hex)
            if fits(spec, nodes):
                _invite(stack, settings, job["id"])
                with follow.display_for() as display:
                    job = follow.wait(stack.client, job["id"], display, check=stack.check)
            else:
                job = _until_explained(stack, job)
            _finish(stack, job, settings)
            if not settings.exit_when_done and is_over(job):
                note(f"still serving at {stack.url}; Ctrl-C stops it")
                stack.serve()
    except Stopped as signal:
        note(f"stopped by {signal}")
        return Exit.JOB_FAILED if settings.exit_when_done else Exit.OK
    return follow.exit_of_job(job)


def _asked_for(spec: JobSpec, settings: Demo) -> JobSpec:
    """Return the job with the options and the environment of the command; what passes, and what does not, is noted."""
    entrypoint = spec.entrypoint
    for option, value in settings.options.items():
        if value is not None:
            entrypoint = with_option(entrypoint, option, value)
    spec, sentences = with_environment(spec, {} if settings.no_env else os.environ, settings.env)
    for sentence in sentences:
        note(sentence)
    return spec.model_copy(update={"entrypoint": entrypoint})


@contextmanager
def _folder(state_dir: Path | None) -> Iterator[Path]:
    if state_dir is not None:
        yield state_dir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _fitted(client: Client, spec: JobSpec) -> tuple[JobSpec, list[Node]]:
    """Return the job as small as the nodes ask for, which is printed, and the nodes."""
    nodes = [node for node in client.nodes() if node["state"] == "READY"]
    spec, said = clamp(spec, nodes)
    for sentence in said:
        note(sentence)
    return spec, nodes


def _until_explained(stack: Stack, job: Job) -> Job:
    """Return a job that no node can ever hold once the server says why it waits, or has done something else with it."""
    while job["state"] in ("CREATED", "QUEUED") and "asks for" not in job["why"]:
        stack.check()
        time.sleep(follow.POLL_S)
        job = stack.client.job(job["id"])
    return job


def _invite(stack: Stack, settings: Demo, job: str) -> None:
    link = stack.login_link(job)
    note(f"\n  Watch it live: {link}\n")
    if settings.open_browser and (why := open_browser(link)) is not None:
        note(f"no browser was opened: {why}")


def _finish(stack: Stack, job: Job, settings: Demo) -> None:
    result = outcome(stack, job)
    if job["state"] != "SUCCEEDED":
        note(f"{job['why']}\n{_log_tail(stack.client, job)}")
    if settings.json:
        emit_json(result)
        return
    figures = (f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, float))
    print(" · ".join([str(result["state"]), *figures, str(result["url"])]), flush=True)


def outcome(stack: Stack, job: Job) -> dict[str, Any]:
    """Return the demo's figures; those that the job never reported are null."""
    series = stack.client.metrics(job["id"], "test_auc", "samples_per_s")
    auc, rate = _values(series, "test_auc"), _values(series, "samples_per_s")
    return {
        "state": job["state"],
        "auc": max(auc, default=None),
        "auc_first_pass": auc[0] if auc else None,
        "samples_per_s": statistics.median(rate) if rate else None,
        "url": f"{stack.url}/jobs/{job['id']}",
    }


def _values(series: dict[str, Series], name: str) -> list[float]:
    found = series[name]["value"] if name in series else []
    return [value for value in found if math.isfinite(value)]


def _log_tail(client: Client, job: Job) -> str:
    lines: list[str] = []
    for replica in job["replicas"]:
        offset, text = 0, ""
        while True:
            piece = client.logs(job["id"], replica["id"], offset=offset)
            if piece["next_offset"] == offset:
                break
            offset, text = piece["next_offset"], (text + piece["text"])[-TAIL_BYTES:]
        lines.extend(f"  [{replica['role']} {replica['index']}] {line}" for line in text.splitlines()[-12:])
    return "\n".join(lines)


def with_option(entrypoint: list[str], option: str, value: int) -> list[str]:
    """Return the entrypoint with this value after `option`, which is added if it is not there."""
    if option not in entrypoint[:-1]:
        return [*entrypoint, option, str(value)]
    at = entrypoint.index(option) + 1
    return [*entrypoint[:at], str(value), *entrypoint[at + 1 :]]


def example() -> Path:
    """Return the example's job file: of the checkout, else of the installed package. Raises SpecError."""
    package = Path(penstock.__file__).resolve().parent
    places = [package.parents[1] / EXAMPLE, package / EXAMPLE]
    for path in places:
        if path.is_file():
            return path
    raise SpecError(f"the example is not installed: no {' and no '.join(str(path) for path in places)}")


THREADS = "CPU_NUM"  # how many places a ParallelExecutor takes


def clamp(spec: JobSpec, nodes: Sequence[Node]) -> tuple[JobSpec, list[str]]:
    """Return the job with no trainer larger than the largest node, and a sentence for each figure that was lowered."""
    if not nodes:
        return spec, []
    cpus, memory = max(node["cpus"] for node in nodes), max(node["memory_bytes"] for node in nodes)
    trainers, env = spec.trainers, dict(spec.env)
    said = []
    if trainers.cpus > cpus:
        said.append(f"this node has {cpus} CPU{'s' * (cpus != 1)}; trainers.cpus is lowered from {trainers.cpus}")
        trainers = trainers.model_copy(update={"cpus": cpus})
    if memory_bytes(trainers.memory) > memory:
        said.append(f"this node has {memory / 2**30:.3g} GiB; trainers.memory is lowered from {trainers.memory}")
        trainers = trainers.model_copy(update={"memory": str(memory)})
    threads = env.get(THREADS, "")
    most = trainers.cpus or cpus
    if threads.isdecimal() and int(threads) > most:
        said.append(f"{THREADS} is lowered from {threads} to {most}")
        env[THREADS] = str(most)
    return spec.model_copy(update={"trainers": trainers, "env": env}), said


def fits(spec: JobSpec, nodes: Sequence[Node]) -> bool:
    """True if the nodes that are there could hold the job. It may be placed or not; False: never, however it waits."""
    roles = [role for role in (spec.trainers, spec.pservers) if role.count]
    return all(any(_holds(node, role) for node in nodes) for role in roles) and _hold_together(roles, nodes)


def _holds(node: Node, role: Resources) -> bool:
    return role.cpus <= node["cpus"] and role.gpus <= node["gpus"] and memory_bytes(role.memory) <= node["memory_bytes"]


def _hold_together(roles: Sequence[Resources], nodes: Sequence[Node]) -> bool:
    return (
        sum(role.count * role.cpus for role in roles) <= sum(node["cpus"] for node in nodes)
        and sum(role.count * role.gpus for role in roles) <= sum(node["gpus"] for node in nodes)
        and sum(role.count * memory_bytes(role.memory) for role in roles) <= sum(n["memory_bytes"] for n in nodes)
    )
