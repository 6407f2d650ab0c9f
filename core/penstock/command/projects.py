"""plan, project list|set: where a job would go, and who may use how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.command.options import Json, Token, Url
from penstock.command.output import emit_json, emit_table, printable
from penstock.command.profile import connect

project_commands = typer.Typer(no_args_is_help=True, help="Projects: their shares and quotas.")


def plan(
    file: Annotated[Path, typer.Argument(help="job description, YAML or JSON")],
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Say where a job would be placed now, or why it would wait; nothing is submitted. Exit 1 if it would wait."""
    from penstock.command.specfile import load, sent  # loads pydantic and yaml

    fields = {name: value for name, value in sent(load(file)).items() if name not in ("workdir", "snapshot")}
    with connect(url, token) as client:
        found = client.plan(fields)
    if json:
        emit_json(found)
    else:
        print(printable(found["why"]))
        rows = [[one["name"], one["state"], str(one["replicas"]), one["reason"]] for one in found["nodes"]]
        emit_table(["NODE", "STATE", "REPLICAS", "REASON"], rows, empty="there are no nodes")
    raise typer.Exit(0 if found["would_start"] else 1)


@project_commands.command("list")
def list_projects(url: Url = None, token: Token = None, json: Json = False) -> None:
    """List the projects that have a share or quotas of their own, or jobs that run or wait."""
    with connect(url, token) as client:
        found = client.projects()
    if json:
        emit_json(found)
        return
    rows = [
        [
            one["name"], f"{one['share']:g}", _of(one["cpus_used"], one["max_cpus"]),
            _of(one["gpus_used"], one["max_gpus"]), _of(one["jobs"], one["max_jobs"]), str(one["waiting"]),
        ]
        for one in found
    ]  # fmt: skip
    emit_table(["PROJECT", "SHARE", "CPUS", "GPUS", "JOBS", "WAITING"], rows, empty="there are no projects")


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used}/{limit}"


@project_commands.command("set")
def set_project(
    name: Annotated[str, typer.Argument(help="of the project")],
    share: Annotated[float, typer.Option("--share", min=0.001, help="its due, beside those of other projects")] = 1.0,
    cpus: Annotated[int | None, typer.Option("--cpus", min=0, help="at most so many at once (default: any)")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="at most so many at once (default: any)")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=0, help="at most so many at once (default: any)")] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Give a project a share and quotas, in place of all that it has. What runs goes on."""
    with connect(url, token) as client:
        found = client.set_project(name, share=share, max_cpus=cpus, max_gpus=gpus, max_jobs=jobs)
    emit_json(found) if json else print(found["name"])
