"""advise: settings ranked by their predicted step time, and the job submitted anew with one of them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table, note
from penstock.command.profile import connect
from penstock.errors import SpecError
from penstock.protocol.masking import MASK

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.protocol.rest import AdvisedSetting, Job

HEAD = ("rank", "setting", "step ms", "samples/s", "busy", "why")


def advise(
    job: JobName,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="submit the job anew with the setting of this rank")
    ] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Rank settings of a job by the step time that a simulation of its recorded steps predicts."""
    with connect(url, token) as client:
        found = find(client, job)
        answer = client.advice(found["id"])
        if run is not None:
            _run(client, found, _chosen(answer["options"], run), json=json)
            return
    if json:
        emit_json(dict(answer))
        return
    emit_table(HEAD, rows_of(answer["options"]), empty="no setting can be simulated")
    note(
        f"recorded steps: {answer['sampled_steps']}, cores: {answer['cores']}; a step takes "
        f"{answer['step_ms']:.2f} ms now. 'penstock advise {job} --run RANK' submits the job with a setting"
    )
    if answer["left_out"]:
        note(f"too large to be simulated: {'; '.join(answer['left_out'])}")


def rows_of(options: list[AdvisedSetting]) -> list[list[str]]:
    """Return the table; the current setting is marked."""
    return [
        [
            str(rank), f"{one['name']}{' (now)' if one['current'] else ''}", f"{one['step_ms']:.2f}",
            f"{one['samples_per_s']:.0f}", f"{one['busy']:.0%}", one["reason"],
        ]
        for rank, one in enumerate(options, 1)
    ]  # fmt: skip


def _chosen(options: list[AdvisedSetting], rank: int) -> AdvisedSetting:
    if rank > len(options):
        raise SpecError(f"--run is {rank}, but {len(options)} settings are ranked; give a number from 1 on", got=rank)
    return options[rank - 1]


def _run(client: Client, job: Job, option: AdvisedSetting, *, json: bool) -> None:
    spec = job["spec"]
    if job["kind"] == "attached":
        values = " ".join(f"{name}={value}" for name, value in option["env"].items())
        raise SpecError(f"job {job['name']!r} was started by hand; start its script with {values}")
    hidden = [name for name, value in (spec.get("env") or {}).items() if value == MASK]
    if hidden:
        raise SpecError(
            f"the value of {', '.join(hidden)} is not shown, so a copy of the job would lack it; submit its file with "
            + " ".join(f"--env {name}={value}" for name, value in option["env"].items())
        )
    made = client.submit({**spec, "env": {**(spec.get("env") or {}), **option["env"]}}, key=uuid.uuid4().hex)
    note(f"{made['name']} with {option['name']}: {client.url}/jobs/{made['id']}")
    if json:
        emit_json(dict(made))
    else:
        print(made["id"])
