"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.settings import TOKEN, URL

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar=URL.name, help="address of the server, or several: a,b (default: that of 'penstock up')"
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar=TOKEN.name, help="bearer token (default: the local server's admin token)"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="id of a job, or its name (the newest of that name)")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="give up after this long (exit 7)")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="variable of the job, over those of its file; several times"),
]
NoEnv = Annotated[bool, typer.Option("--no-env", help="pass no exported settings to the job (docs/environment.md)")]
StateDir = Annotated[Path | None, typer.Option("--state-dir", help="folder for everything that is stored")]
Host = Annotated[str, typer.Option("--host", help="address to listen on")]
LAST_PORT = 65535


def port_number(text: str | int) -> int:
    """Return a port to listen on. Raises BadParameter, which names the option."""
    if not str(text).isdecimal() or int(text) > LAST_PORT:
        raise typer.BadParameter(f"{str(text)!r} is no port number from 0 to {LAST_PORT}")
    return int(text)


def memory_option(text: str) -> int:
    """Return bytes, of an amount such as '8GiB'. Raises BadParameter."""
    from penstock.protocol.jobspec import memory_bytes  # pydantic: most commands do without

    try:
        return memory_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Port = Annotated[
    int, typer.Option("--port", parser=port_number, metavar="PORT", help="port to listen on; 0: any free one")
]
