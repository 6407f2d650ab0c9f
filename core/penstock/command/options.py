"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="PENSTOCK_URL", help="address of the server (default: the one of 'penstock up')"),
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="PENSTOCK_TOKEN", help="bearer token (default: the local server's admin token)"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="id of a job, or its name (the newest of that name)")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="give up after this long (exit 7)")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="folder for everything that is kept")]
Host = Annotated[str, typer.Option("--host", help="address to listen on")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="port to listen on; 0: any free one")]
