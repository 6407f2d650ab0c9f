"""tables: what the sparse tables of a job's parameter servers hold, and which ids are updated most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.protocol.rest import SparseTable

HEAD = ["TABLE", "ROWS", "CAPACITY", "BYTES", "PULLED", "FOUND", "PUSHED", "SKEW_ROWS", "SKEW_PUSHES", "HOT"]
_SHOWN_HOT = 3


def tables(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show the sparse tables of a job: rows, bytes, look-ups, ids updated most; --json: each server's part, too."""
    with connect(url, token) as client:
        found = client.tables(find(client, job)["id"])
    if json:
        emit_json(dict(found))
        return
    emit_table(HEAD, [row_of(one) for one in found["tables"]], empty="no parameter server has reported a sparse table")


def row_of(one: SparseTable) -> list[str]:
    """Return the row of a table. FOUND: the share of looked-up ids that had a row."""
    found = "-" if one["pulled"] == 0 else f"{100 * (1 - one['absent'] / one['pulled']):.1f}%"
    hot = " ".join(f"{each['id']}:{100 * each['share']:.1f}%" for each in one["hot"][:_SHOWN_HOT]) or "-"
    sizes = [str(one["rows"]), str(one["capacity"]), str(one["held_bytes"]), str(one["pulled"]), found]
    return [one["name"], *sizes, str(one["pushed"]), f"{one['skew_rows']:.2f}", f"{one['skew_pushes']:.2f}", hot]
