"""advise: settings ranked by their predicted step time, and the job submitted anew with one of them.

Of a job with parameter servers also numbers of servers and trainers, modes and links, ranked by samples/s: their ranks
go on where those of the settings end.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table, note
from penstock.command.profile import connect
from penstock.errors import SpecError
from penstock.protocol.masking import MASK

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.protocol.rest import Advice, AdvisedCluster, AdvisedSetting, Job

HEAD = ("rank", "setting", "step ms", "samples/s", "busy", "why")
CLUSTER_HEAD = ("rank", "servers, trainers", "step ms", "samples/s", "waits", "why")


def advise(
    job: JobName,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="submit the job anew with the setting of this rank")
    ] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Rank settings of a job by predicted step time, and its servers and trainers by predicted samples/s."""
    with connect(url, token) as client:
        found = find(client, job)
        answer = client.advice(found["id"])
        if run is not None:
            _run(client, found, answer, run, json=json)
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
    clusters = answer.get("clusters", [])  # a server of the version before answers none
    if clusters:
        print()
        emit_table(CLUSTER_HEAD, cluster_rows_of(clusters, len(answer["options"])), empty="")
    if answer.get("clusters_note"):
        note(answer["clusters_note"])


def rows_of(options: list[AdvisedSetting]) -> list[list[str]]:
    """Return the table; the current setting is marked."""
    return [
        [
            str(rank), f"{one['name']}{' (now)' if one['current'] else ''}", f"{one['step_ms']:.2f}",
            f"{one['samples_per_s']:.0f}", f"{one['busy']:.0%}", one["reason"],
        ]
        for rank, one in enumerate(options, 1)
    ]  # fmt: skip


def cluster_rows_of(clusters: list[AdvisedCluster], before: int) -> list[list[str]]:
    """Return the table of servers and trainers; `before`: ranks that come before theirs."""
    return [
        [
            str(rank), f"{one['name']}{' (now)' if one['current'] else ''}", f"{one['step_ms']:.2f}",
            f"{one['samples_per_s']:.0f}", f"{one['wait_ms'] / one['step_ms']:.0%}", one["reason"],
        ]
        for rank, one in enumerate(clusters, before + 1)
    ]  # fmt: skip


def _run(client: Client, job: Job, answer: Advice, rank: int, *, json: bool) -> None:
    """Submit the job anew with what a rank names. Raises SpecError if that cannot be."""
    options, clusters = answer["options"], answer.get("clusters", [])
    if rank > len(options) + len(clusters):
        ranked = f"{len(options)} settings{f' and {len(clusters)} clusters' if clusters else ''}"
        raise SpecError(f"--run is {rank}, but {ranked} are ranked; give a number from 1 on", got=rank)
    spec = job["spec"]
    if rank <= len(options):
        name, env = options[rank - 1]["name"], options[rank - 1]["env"]
        _check(job, " ".join(f"{name}={value}" for name, value in env.items()), "--env ")
        changed: dict[str, Any] = {**spec, "env": {**(spec.get("env") or {}), **env}}
    else:
        wanted = clusters[rank - 1 - len(options)]
        name = wanted["name"]
        if not wanted["can_run"]:
            raise SpecError(
                f"rank {rank} is {name!r}, which a job's specification cannot ask for: the script sets the mode, and "
                "hosts have their links; ranks that differ in servers and trainers alone can be run",
                got=rank,
            )
        changed = resized(spec, wanted["pservers"], wanted["trainers"])
        _check(job, f"{wanted['pservers']} servers and {wanted['trainers']} trainers", "")
    made = client.submit(changed, key=uuid.uuid4().hex)
    note(f"{made['name']} with {name}: {client.url}/jobs/{made['id']}")
    if json:
        emit_json(dict(made))
    else:
        print(made["id"])


def resized(spec: Mapping[str, Any], pservers: int, trainers: int) -> dict[str, Any]:
    """Return a specification with other numbers of servers and trainers; what each of them needs stays."""
    return {
        **spec,
        "pservers": {**(spec.get("pservers") or {}), "count": pservers},
        "trainers": {**(spec.get("trainers") or {}), "count": trainers},
    }


def _check(job: Job, wanted: str, option: str) -> None:
    """Raise SpecError if the job cannot be submitted anew from its specification. `option`: before each value."""
    if job["kind"] == "attached":
        raise SpecError(f"job {job['name']!r} was started by hand; start its script with {wanted}")
    hidden = [name for name, value in (job["spec"].get("env") or {}).items() if value == MASK]
    if hidden:
        given = " ".join(f"{option}{one}" for one in wanted.split()) if option else wanted
        raise SpecError(
            f"the value of {', '.join(hidden)} is not shown, so a copy of the job would lack it; submit its file with "
            f"{given}"
        )
