"""exchange: what each trainer and parameter server of a job have exchanged."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table
from penstock.command.profile import connect
from penstock.protocol.exchange import Cell, Sums

HEAD = ["TRAINER", "PSERVER", "SENT_BYTES", "RECEIVED_BYTES", "WAIT_S", "RETRIES", "STALENESS", "CALLS"]


def exchange(job: JobName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show what each trainer and pserver of a job exchanged since its attempt began; --json: of each block."""
    with connect(url, token) as client:
        found = client.exchange(find(client, job)["id"])
    if json:
        emit_json({**found, "cells": [asdict(cell) for cell in found["cells"]]})
        return
    emit_table(HEAD, rows_of(found["cells"]), empty="nothing has been exchanged with parameter servers")


def rows_of(cells: list[Cell]) -> list[list[str]]:
    """Return the table: one row for each trainer and pserver, its blocks summed."""
    sums: dict[tuple[int, int], Sums] = defaultdict(Sums)
    for cell in cells:
        sums[cell.trainer, cell.pserver].add(cell)
    return [[str(trainer), str(pserver), *_figures(sums[trainer, pserver])] for trainer, pserver in sorted(sums)]


def _figures(sums: Sums) -> list[str]:
    wait = f"{sums.wait_ns / 1e9:.3f}"
    counts = (sums.sent_bytes, sums.received_bytes, wait, sums.retries, sums.staleness, sums.calls)
    return [str(count) for count in counts]
