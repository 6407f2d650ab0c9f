"""The rule about a job in which no step ends: which trainers have not finished one, or which server all wait for."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.diagnosis.case import Case, ms, named
from penstock.diagnosis.servers import WAITS, servers
from penstock.diagnosis.sums import Finding, Trainer

SILENT_S = 4.0
SILENT_TURNS = 20
STUCK = 0.9
"""Share of a turn that trainers without a step wait for one server, if they are stuck on it."""


def stalled(case: Case, stepping: Sequence[Trainer]) -> list[Finding]:
    """Return the finding, if steps are expected and do not come."""
    if not case.sums.running:
        return []
    limit_s = max(SILENT_S, SILENT_TURNS * case.turn_ns / 1e9)
    silent = [one for one in stepping if one.silent_s > limit_s]
    evaluating = [one for one in silent if one.evaluates]
    if evaluating or not silent:  # the others wait for it
        return _evaluation(evaluating)
    first = min(one.last_step for one in silent)
    behind = [one for one in silent if one.last_step == first]
    longest = max(one.silent_s for one in behind)
    some = len(behind) < len(stepping)
    who = named([one.index for one in behind]) if some else "no trainer"
    verb = "has not finished" if len(behind) == 1 and some else "have not finished" if some else "has finished"
    server = None if some else next((one for one in servers(case, stepping) if one.share >= STUCK), None)
    on = "" if server is None else f": they wait for {server.place}"
    sentence = (
        f"{who} {verb} step {first + 1} for {longest:.0f} s; a step takes {ms(case.turn_ns)}"
        if some
        else f"no trainer has finished a step for {longest:.0f} s, since step {first}{on};"
        f" a step takes {ms(case.turn_ns)}"
    )
    at = ("events", who, {}) if server is None else ("sync", server.place, WAITS)
    return [
        Finding(cause="stalled", sentence=sentence, share=1.0, ms=longest * 1e3, tab=at[0], place=at[1], query=at[2])
    ]


def _evaluation(evaluating: Sequence[Trainer]) -> list[Finding]:
    if not evaluating:
        return []
    who, longest = named([one.index for one in evaluating]), max(one.silent_s for one in evaluating)
    sentence = f"{who} evaluate{'s' if len(evaluating) == 1 else ''}: no step has trained for {longest:.0f} s"
    return [Finding(cause="evaluation", sentence=sentence, share=1.0, ms=longest * 1e3, place=who, tab="graph")]
