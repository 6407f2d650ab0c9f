"""completeness: what became of the telemetry that a job produced, and whether all of it is accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table, note
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.protocol.rest import CountedRows, RowsGone

HEAD = ["KIND", "PRODUCED", "SHOWN", "SAMPLED_OUT", "DROPPED", "REMOVED", "NOT_SENT", "UNACCOUNTED", "WHY"]


def completeness(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show what became of a job's telemetry: produced = shown + sampled out + dropped; --json: each process, too."""
    with connect(url, token) as client:
        found = client.completeness(find(client, job)["id"])
    if json:
        emit_json(dict(found))
        return
    emit_table(HEAD, [row_of(one) for one in found["rows"]], empty="the job has produced no telemetry that is counted")
    for text in found["notes"]:
        note(f"! {text}")


def row_of(one: CountedRows) -> list[str]:
    """Return the row of a kind. REMOVED: by retention; UNACCOUNTED: - if the others add up to what was produced."""
    numbers = [one["produced"], one["shown"], one["sampled_out"], _total(one["dropped"]), _total(one["expired"])]
    why = ", ".join(f"{gone['rows']} {gone['text']}" for gone in [*one["dropped"], *one["expired"]]) or "-"
    unaccounted = "-" if one["unexplained"] == 0 else str(one["unexplained"])
    return [one["kind"], *map(str, numbers), str(one["pending"]), unaccounted, why]


def _total(gone: list[RowsGone]) -> int:
    return sum(one["rows"] for one in gone)
