"""The rule about a job in which no step ends: which trainers have not finished one, or which server all wait for."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.diagnosis.case import Case, ms, named
from penstock.diagnosis.servers import servers
from penstock.diagnosis.sums import Finding, Trainer

SILENT_S = 10.0
SILENT_TURNS = 20
STUCK = 0.9
"""Share of a turn that trainers without a step wait for one server, if they are stuck on it."""


def stalled(case: Case, stepping: Sequence[Trainer]) -> list[Finding]:
    """Return the finding, if steps are expected and do not come."""
    if not case.sums.running:
        return []
    limit_s = max(SILENT_S, SILENT_TURNS * case.turn_ns / 1e9)
    silent = [one for one in stepping if one.silent_s > limit_s]
    if not silent:
        return []
    first = min(one.last_step for one in silent)
    behind = [one for one in silent if one.last_step == first]
    longest = max(one.silent_s for one in behind)
    some = len(behind) < len(stepping)
    who = named([one.index for one in behind]) if some else "no trainer"
    verb = "has not finished" if len(behind) == 1 and some else "have not finished" if some else "has finished"
    server = None if some else next((one for one in servers(case, stepping) if one.cause == "server"), None)
    if server is not None and server.share < STUCK:
        server = None
    on = "" if server is None else f": they wait for {server.place}"
    sentence = (
        f"{who} {verb} step {first + 1} for {longest:.0f} s; a step takes {ms(case.turn_ns)}"
        if some
        else f"no trainer has finished a step for {longest:.0f} s, since step {first}{on};"
        f" a step takes {ms(case.turn_ns)}"
    )
    return [
        Finding(cause="stalled", sentence=sentence, share=1.0, ms=longest * 1e3,
                place=who if server is None else server.place, tab="events" if server is None else "sync")
    ]  # fmt: skip
