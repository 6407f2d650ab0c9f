"""record: have every step of a running job sent whole for some seconds, not a sample of them."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json
from penstock.command.profile import connect
from penstock.protocol.recording import MAX_S


def record(
    job: JobName,
    seconds: Annotated[int, typer.Option("--seconds", min=1, max=MAX_S, help="for how long")] = 5,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Record every step of a running job for some seconds.

    The dashboard marks these steps in its strip and on its timeline. Recording costs the job some processor time.
    """
    with connect(url, token) as client:
        found = client.record(find(client, job)["id"], seconds)
    if json:
        emit_json(dict(found))
        return
    for one in found["processes"]:
        said = one["error"] or f"was asked to record every step for {found['seconds']} s"
        print(f"{one['role']} {one['index']}: {said}")
