"""passes: what each graph pass removed, added and changed in a graph that a job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, emit_table
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.protocol.graphdoc import GraphDocument
    from penstock.protocol.graphstages import PassFacts

HEAD = ["PASS", "BEFORE", "AFTER", "REMOVED", "ADDED", "CHANGED", "TYPES"]
_SHOWN_TYPES = 3
_EMPTY = "no graph, or one whose passes were not recorded"
GraphHash = Annotated[str, typer.Option("--graph", help="hash of a graph; default: the newest that trains")]


def passes(job: JobName, graph: GraphHash = "", url: Url = None, token: Token = None, json: Json = False) -> None:
    """Show what each graph pass removed, added and changed; --json: all types, and passes that changed nothing."""
    from dataclasses import asdict

    from penstock.protocol.graphstages import facts

    with connect(url, token) as client:
        document = _document(client, find(client, job)["id"], graph)
    found = [] if document is None else facts(document)
    if json:
        unchanged = [] if document is None or document.passes is None else document.passes.unchanged
        emit_json({"passes": [asdict(one) for one in found], "unchanged": unchanged})
        return
    emit_table(HEAD, [row_of(one) for one in found], empty=_EMPTY)


def row_of(one: PassFacts) -> list[str]:
    """Return the row of a pass. TYPES: the most frequent of what it removed, added and changed."""
    signed = (("-", one.removed), ("+", one.added), ("~", one.changed))
    types = [(f"{sign}{kind}", count) for sign, counts in signed for kind, count in counts.items()]
    top = sorted(types, key=lambda pair: -pair[1])[:_SHOWN_TYPES]
    numbers = [str(sum(counts.values())) for _, counts in signed]
    return [one.title, str(one.before), str(one.after), *numbers, " ".join(f"{kind}:{count}" for kind, count in top)]


def _document(client: Client, job_id: str, graph: str) -> GraphDocument | None:
    """The graph that was named, else the newest that trains, else the newest; None if the job has none."""
    from penstock.protocol.graphdoc import GraphDocument

    if graph:
        return GraphDocument.model_validate(client.graph(graph))
    uses = sorted(client.graphs(job_id), key=lambda use: use["first_seen_at"], reverse=True)
    newest = None
    for one in dict.fromkeys(use["hash"] for use in uses):
        document = GraphDocument.model_validate(client.graph(one))
        if any(op.role in ("backward", "optimize") for op in document.ops):
            return document
        newest = newest or document
    return newest
