"""audit: who changed what on the server."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.command.options import Json, Token, Url
from penstock.command.output import emit_json, emit_table
from penstock.command.profile import connect

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def since_time(text: str, now_s: float) -> float:
    """Return seconds since 1970, of an age such as '90m' or '7d', or of a time (ISO 8601; UTC without a zone).

    Raises BadParameter.
    """
    age = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if age is not None:
        return max(0.0, now_s - int(age[1]) * _UNIT_S[age[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither an age (90m, 7d) nor a time (2026-01-31T12:00)") from error
    return max(0.0, (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())


def audit(
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="an age (90m, 7d) or a time; default: all")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="TOKEN", help="id or name of the token that asked")] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", metavar="ID", help="what was changed: a job, token, node, project")
    ] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """List who changed what, newest first, and which addresses sent too many wrong tokens. Needs the scope admin."""
    since_s = None if since is None else since_time(since, time.time())
    with connect(url, token) as client:
        found = list(client.audit(token=by, subject=subject, since_s=since_s))
    if json:
        emit_json(found)
        return
    rows = [
        [
            one["at"], one["token_name"] or "-", one["peer"] or "-", f"{one['method']} {one['route']}",
            one["subject"] or "-", str(one["status"]), str(one["count"]),
        ]
        for one in found
    ]  # fmt: skip
    header = ["TIME", "TOKEN", "PEER", "CALL", "SUBJECT", "STATUS", "COUNT"]
    emit_table(header, rows, empty="the audit log has no such entries")
