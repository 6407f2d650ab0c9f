"""exchange: what each trainer and parameter server of a job have exchanged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.client import ExchangeCell

HEAD = ["TRAINER", "PSERVER", "SENT_BYTES", "RECEIVED_BYTES", "WAIT_S", "RETRIES", "STALENESS", "CALLS"]
_SUMMED = ("sent_bytes", "received_bytes", "wait_ns", "retries", "staleness", "calls")


def exchange(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show what each trainer and pserver of a job exchanged since its attempt began; --json: of each block."""
    with connect(url, token) as client:
        found = client.exchange(find(client, job)["id"])
    if json:
        emit_json(found)
        return
    emit_table(HEAD, rows_of(found["cells"]), empty="nothing has been exchanged with parameter servers")


def rows_of(cells: list[ExchangeCell]) -> list[list[str]]:
    """Return the table: one row for each trainer and pserver, its blocks summed."""
    sums: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for cell in cells:
        figures: Mapping[str, object] = cell
        counts = {name: count for name in _SUMMED if isinstance(count := figures[name], int)}
        sums[cell["trainer"], cell["pserver"]].update(counts)
    return [[str(trainer), str(pserver), *_figures(sums[trainer, pserver])] for trainer, pserver in sorted(sums)]


def _figures(sums: Counter[str]) -> list[str]:
    return [f"{sums[name] / 1e9:.3f}" if name == "wait_ns" else str(sums[name]) for name in _SUMMED]
