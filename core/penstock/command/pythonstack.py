"""stack: where the Python processes of a running replica are, without stopping them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json
from penstock.command.profile import connect
from penstock.errors import SpecError
from penstock.identity import Role

if TYPE_CHECKING:
    from penstock.protocol.rest import Job, PythonProcess, PythonStacks, Replica


def stack(
    job: JobName,
    rank: Annotated[int, typer.Option("--rank", min=0, help="index of the trainer")] = 0,
    role: Annotated[Role, typer.Option("--role", help="trainer or pserver")] = "trainer",
    skip: Annotated[int, typer.Option("--skip", min=0, max=1 << 20, help="processes to pass over")] = 0,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show where each Python thread of a running process is. The process is not stopped.

    A line of the job's own code is marked by >.
    """
    with connect(url, token) as client:
        found = find(client, job)
        taken = client.stacks(found["id"], replica_of(found, role, rank)["id"], skip)
    if json:
        emit_json(dict(taken))
        return
    for line in lines_of(taken):
        print(line)


def replica_of(job: Job, role: str, index: int) -> Replica:
    """Return the newest process of the newest attempt. Raises SpecError that says which there are."""
    newest = [one for one in job["replicas"] if one["attempt"] == job["attempt"]]
    found = [one for one in newest if one["role"] == role and one["index"] == index]
    if found:
        return max(found, key=lambda one: one["stream"])
    there = ", ".join(sorted({f"{one['role']} {one['index']}" for one in newest})) or "none yet"
    raise SpecError(f"job {job['name']!r} has no {role} {index}; its processes: {there}", got=index)


def lines_of(taken: PythonStacks) -> Iterator[str]:
    """Give the lines of the text."""
    for process in taken["processes"]:
        yield f"{taken['role']} {taken['index']}, process {process['pid']}: {process['command']}"
        if process["error"]:
            yield f"  {process['error']}"
        yield from _threads(process)
    if taken["num_left"]:
        shown = taken["skip"] + len(taken["processes"])
        yield f"{taken['num_left']} more Python processes of it are not shown: ask for them with --skip {shown}"


def _threads(process: PythonProcess) -> Iterator[str]:
    for thread in process["threads"]:
        marks = [mark for mark, holds in (("active", thread["active"]), ("holds the GIL", thread["owns_gil"])) if holds]
        yield f"  thread {thread['name'] or thread['os_thread_id']}{': ' if marks else ''}{', '.join(marks)}"
        for frame in thread["frames"]:
            yield f"  {'>' if frame['own'] else ' '}   {frame['name']} ({frame['file']}:{frame['line']})"
