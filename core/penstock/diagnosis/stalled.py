"""The rule about a job in which no step ends: which trainers have not finished one, or which server all wait for."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.diagnosis.case import Case, ms, named, where
from penstock.diagnosis.servers import WAITS, servers
from penstock.diagnosis.sums import Finding, OpSum, Trainer

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
    op = _last_reported(behind)
    within = "" if op is None else f", last reported in `{op.name}`{where(op)}"
    sentence = (
        f"{who} {verb} step {first + 1} for {longest:.0f} s{within}; a step takes {ms(case.turn_ns)}"
        if some
        else f"no trainer has finished a step for {longest:.0f} s, since step {first}{on}{within};"
        f" a step takes {ms(case.turn_ns)}"
    )
    tab, place, query = ("graph" if op else "events", who, {}) if server is None else ("sync", server.place, WAITS)
    return [
        Finding(cause="stalled", sentence=sentence, share=1.0, ms=longest * 1e3, tab=tab, place=place, query=query,
                op=op.index if op and server is None else None, graph=behind[0].graph)
    ]  # fmt: skip


def _last_reported(behind: Sequence[Trainer]) -> OpSum | None:
    """Return the operator that was under way in the newest reports, if it is one and the same in those of all.

    Of several in one process what computes counts: exchanges may wait beside it for what others compute.
    """
    found: list[OpSum] = []
    for one in behind:
        ops = [op for op in one.ops if op.index in one.unfinished]
        found += sorted(ops, key=lambda op: (op.role == "communication", op.index))[:1]
    same = len(found) == len(behind) and len({op.name for op in found}) == 1
    return found[0] if same else None


def _evaluation(evaluating: Sequence[Trainer]) -> list[Finding]:
    if not evaluating:
        return []
    who, longest = named([one.index for one in evaluating]), max(one.silent_s for one in evaluating)
    sentence = f"{who} evaluate{'s' if len(evaluating) == 1 else ''}: no step has trained for {longest:.0f} s"
    return [Finding(cause="evaluation", sentence=sentence, share=1.0, ms=longest * 1e3, place=who, tab="graph")]
