"""submit, jobs, job, logs, cancel, wait, exchange, why."""

from __future__ import annotations

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from penstock.command import follow
from penstock.command.options import Env, JobName, Json, NoEnv, Timeout, Token, Url
from penstock.command.output import (
    describe,
    duration,
    emit_json,
    emit_table,
    is_over,
    label,
    note,
    printable,
    why_in_a_line,
)
from penstock.command.profile import connect
from penstock.errors import SpecError, Unavailable
from penstock.protocol.exchange import Cell, Sums
from penstock.protocol.states import JobState

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.protocol.rest import Job, LogChunk, Replica

LOG_POLL_S = 0.3
"""What comes within it is printed at once; and how often a server is asked that does not hold a request back."""
LOG_WAIT_S = 20.0


def submit(
    file: Annotated[Path, typer.Argument(help="job description, YAML or JSON")],
    wait: Annotated[bool, typer.Option("--wait", help="wait for the end; exit 1 if the job does not succeed")] = False,
    timeout: Timeout = None,
    env: Env = None,
    no_env: NoEnv = False,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Submit a job. Its workdir is packed and sent along. Prints the job's id."""
    from penstock.command.passing import given, with_environment  # loads pydantic and yaml
    from penstock.command.specfile import load, prepare

    spec, sentences = with_environment(load(file), {} if no_env else os.environ, given(env or ()))
    for sentence in sentences:
        note(sentence)
    with connect(url, token) as client:
        job = client.submit(prepare(client, spec, folder=file.parent), key=uuid.uuid4().hex)
        note(f"{job['name']}: {client.url}/jobs/{job['id']}")
        if not wait:
            emit_json(job) if json else print(job["id"])
            return
        _wait_and_exit(client, job["id"], timeout, json)


def list_jobs(
    state: Annotated[str | None, typer.Option("--state", help="only jobs in this state, e.g. RUNNING")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="at most this many, newest first")] = 50,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    unknown = [one for one in (state.upper().split(",") if state else ()) if one not in list(JobState)]
    if unknown:
        raise SpecError(f"--state has no {unknown[0]}; it is one of {', '.join(JobState)}", got=state)
    with connect(url, token) as client:
        found = [job for _, job in zip(range(limit), client.jobs(state=state and state.upper()), strict=False)]
    if json:
        emit_json(found)
        return
    rows = [[job["id"], job["name"], job["state"], _progress(job), why_in_a_line(job)] for job in found]
    emit_table(["JOB", "NAME", "STATE", "PROGRESS", "WHY"], rows, empty="there are no jobs; 'penstock submit FILE'")


def _progress(job: Job) -> str:
    progress = job["progress"]
    if progress is None or not progress["total"]:
        return "-"
    share = f"{100 * progress['done'] / progress['total']:.0f}%"
    return share if job["eta_s"] is None or is_over(job) else f"{share}, {duration(job['eta_s'])} left"


def show_job(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show one job: state, why, figures and replicas."""
    with connect(url, token) as client:
        found = find(client, job)
    if json:
        emit_json(found)
        return
    print(f"{found['id']}  {_attempts(found)}\n{describe(found)}")
    if not describe(found).endswith(found["why"]):
        print(printable(found["why"]))
    rows = [[label(r), r["state"], r["host"] or "-", str(r["pid"] or "-"), _outcome(r)] for r in found["replicas"]]
    emit_table(["REPLICA", "STATE", "HOST", "PID", "ENDED"], rows, empty="no replicas yet")


def _attempts(job: Job) -> str:
    parts = [f"attempt {job['attempt']}"]
    allowed = job["restarts"] + job["restarts_left"] + sum(job.get("restarts_left_by_class", {}).values())
    if allowed:
        parts.append(f"{job['restarts']} of {allowed} restarts used")
    if job["next_attempt_at"] is not None:
        parts.append(f"next attempt not before {job['next_attempt_at']}")
    return " · ".join(parts)


def _outcome(replica: Replica) -> str:
    if replica["signal"] is not None:
        return f"signal {replica['signal']}"
    return "-" if replica["exit_code"] is None else f"exit code {replica['exit_code']}"


def logs(
    job: JobName,
    follow_on: Annotated[bool, typer.Option("-f", "--follow", help="go on until the job has ended")] = False,
    replica: Annotated[
        str | None, typer.Option("--replica", help="only this one: an id, or role and index such as trainer/0")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="of an earlier attempt (default: the newest)")
    ] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Print what the job's processes have written. Several replicas: each line says which."""
    with connect(url, token) as client:
        found = find(client, job)
        reader = LogReader(client, json=json)
        away = follow.Away()
        while True:
            try:
                if attempt is not None:
                    found = {**found, "replicas": client.replicas(found["id"], attempt=attempt)}
                chosen = _chosen(found, replica, follow_on)
                # Looked at before the logs are read: what is over has written its last line, so what came is all.
                over = is_over(found)
                if not reader.print_new(found, chosen):
                    if not follow_on or over:
                        break
                    await_more(client, found, chosen, reader)
                found = client.job(found["id"])
                away.answered()
            except Unavailable as error:
                if not follow_on:
                    raise
                away.silent(error)
                time.sleep(LOG_POLL_S)
        reader.close()


class Pushing(Protocol):
    """Holds requests back until there is something new; `Client` does."""

    def logs(self, job_id: str, replica_id: str, *, offset: int = 0, wait_s: float = 0.0) -> LogChunk:
        """Return the piece that begins at a byte offset, once there is one or the job has changed."""
        ...

    def job(self, job_id: str, *, wait_s: float = 0.0, since: int | None = None) -> Job:
        """Return the job, once its version is another."""
        ...


def await_more(client: Pushing, job: Job, chosen: Sequence[Replica], reader: LogReader) -> None:
    """Wait until a log of the job grows, or the job changes. Raises Unavailable."""
    began = time.monotonic()
    waited_for = reader.going_on(chosen)
    if waited_for is None:
        client.job(job["id"], wait_s=LOG_WAIT_S, since=job["version"])
    else:
        replica_id, offset = waited_for
        client.logs(job["id"], replica_id, offset=offset, wait_s=LOG_WAIT_S)
    time.sleep(max(0.0, LOG_POLL_S - (time.monotonic() - began)))


def _chosen(job: Job, replica: str | None, follow_on: bool) -> list[Replica]:
    chosen = [item for item in job["replicas"] if replica is None or _is(item, replica)]
    if replica is not None and not chosen and not follow_on:
        raise SpecError(f"job {job['id']} has no replica {replica!r}; it has {_names(job)}")
    return chosen


def _is(replica: Replica, wanted: str) -> bool:
    return wanted in (replica["id"], f"{replica['role']}/{replica['index']}")


def _names(job: Job) -> str:
    return ", ".join(f"{r['role']}/{r['index']}" for r in job["replicas"]) or "none yet"


def cancel(
    job: JobName,
    wait: Annotated[bool, typer.Option("--wait", help="wait until all its processes are gone")] = False,
    timeout: Timeout = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """End a job. A job that has ended stays as it is."""
    with connect(url, token) as client:
        found = client.cancel(find(client, job)["id"])
        if wait:
            with follow.display_for(quiet=json) as display:
                found = follow.wait(client, found["id"], display, timeout_s=timeout)
    emit_json(found) if json else print(describe(found))


def wait_for(job: JobName, timeout: Timeout = None, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Wait until a job has ended. Exit code 0 if it succeeded, 1 if not, 7 after --timeout."""
    with connect(url, token) as client:
        _wait_and_exit(client, find(client, job)["id"], timeout, json)


def _wait_and_exit(client: Client, job_id: str, timeout: float | None, json: bool) -> None:
    with follow.display_for() as display:
        job = follow.wait(client, job_id, display, timeout_s=timeout)
    emit_json(job) if json else print(f"{job['id']} {job['state']}")
    raise typer.Exit(follow.exit_of_job(job))


def find(client: Client, name: str) -> Job:
    """Return the job with this id, else the newest with this name. Raises NotFound."""
    from penstock.client import NotFound  # loaded by connect already

    try:
        uuid.UUID(name)
    except ValueError:
        for job in client.jobs(name=name):
            return job
        raise NotFound(f"there is no job {name!r} on {client.url}; 'penstock jobs' lists them") from None
    try:
        return client.job(name)
    except NotFound as error:
        raise NotFound(f"there is no job {name} on {client.url}; 'penstock jobs' lists them") from error


HEAD = ["TRAINER", "PSERVER", "SENT_BYTES", "RECEIVED_BYTES", "WAIT_S", "RETRIES", "STALENESS", "CALLS"]


def exchange(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show what each trainer and pserver of a job exchanged since its attempt began; --json: of each block."""
    with connect(url, token) as client:
        found = client.exchange(find(client, job)["id"])
    if json:
        emit_json({**found, "cells": [asdict(cell) for cell in found["cells"]]})
        return
    emit_table(HEAD, rows_of(found["cells"]), empty="nothing has been exchanged with parameter servers")


def rows_of(cells: list[Cell]) -> list[list[str]]:
    """Return the table: one row for each trainer and pserver, its blocks summed."""
    sums: dict[tuple[int, int], Sums] = defaultdict(Sums)
    for cell in cells:
        sums[cell.trainer, cell.pserver].add(cell)
    return [[str(trainer), str(pserver), *_figures(sums[trainer, pserver])] for trainer, pserver in sorted(sums)]


def _figures(sums: Sums) -> list[str]:
    wait = f"{sums.wait_ns / 1e9:.3f}"
    counts = (sums.sent_bytes, sums.received_bytes, wait, sums.retries, sums.staleness, sums.calls)
    return [str(count) for count in counts]


def why(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Say why the steps of a job take as long as they do: causes with measurements, the largest first."""
    with connect(url, token) as client:
        found = client.why(find(client, job)["id"])
    if json:
        emit_json(dict(found))
        return
    for finding in found["findings"]:
        print(finding["sentence"])
    if not found["findings"]:
        print("no step has been reported yet")


class LogSource(Protocol):
    """Gives pieces of logs; `Client` does."""

    def logs(self, job_id: str, replica_id: str, *, offset: int = 0) -> LogChunk:
        """Return the piece that begins at a byte offset. Raises Unavailable."""
        ...


class LineCutter:
    """Cuts the texts of several logs into lines: what has no end yet waits for it. No I/O."""

    def __init__(self) -> None:
        self._rest: dict[str, str] = {}

    def add(self, name: str, text: str) -> list[str]:
        """Return the lines that are whole now. A carriage return inside a line stays in it."""
        *whole, rest = (self._rest.get(name, "") + text).split("\n")
        self._rest[name] = rest
        return whole

    def flush(self) -> list[tuple[str, str]]:
        """Return (name, what never got an end) of each log that has some."""
        rest, self._rest = self._rest, {}
        return [(name, text) for name, text in rest.items() if text]


class LogReader:
    """Prints what is new, from where it stopped; of a replica of an attempt before as well, until its log has ended."""

    def __init__(self, client: LogSource, *, json: bool) -> None:
        self._client = client
        self._json = json
        self._offsets: dict[str, int] = {}
        self._known: dict[str, Replica] = {}
        self._finished: set[str] = set()
        self._at_end: set[str] = set()
        self._lines = LineCutter()

    def print_new(self, job: Job, chosen: Sequence[Replica]) -> bool:
        """Print the next piece of each log; return whether there was any. Raises Unavailable in between."""
        self._known.update({replica["id"]: replica for replica in chosen})
        current = {replica["id"] for replica in chosen}
        labelled = len(chosen) > 1
        more = False
        for replica_id, replica in self._known.items():
            if replica_id in self._finished:
                continue
            offset = self._offsets.get(replica_id, 0)
            piece = self._client.logs(job["id"], replica_id, offset=offset)
            if piece["eof"]:
                self._at_end.add(replica_id)
            if piece["next_offset"] == offset:
                if replica_id not in current and piece["eof"]:
                    self._finished.add(replica_id)
                continue
            self._offsets[replica_id] = piece["next_offset"]
            self._print(replica, piece, labelled=labelled)
            more = True
        return more

    def going_on(self, chosen: Sequence[Replica]) -> tuple[str, int] | None:
        """Return a replica whose log has not ended, and up to where it was read; None if there is none."""
        for replica in chosen:
            if replica["id"] not in self._at_end:
                return replica["id"], self._offsets.get(replica["id"], 0)
        return None

    def close(self) -> None:
        """Print lines that never got an end."""
        for replica_id, text in self._lines.flush():
            print(f"[{label(self._known[replica_id])}] {text}", flush=True)

    def _print(self, replica: Replica, piece: LogChunk, *, labelled: bool) -> None:
        if self._json:
            emit_json({**piece, "role": replica["role"], "index": replica["index"]})
        elif labelled:
            for line in self._lines.add(replica["id"], piece["text"]):
                print(f"[{label(replica)}] {line}", flush=True)
        else:
            print(piece["text"], end="", flush=True)
