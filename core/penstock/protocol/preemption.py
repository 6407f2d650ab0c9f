"""Preemption at a step boundary: what the agent writes for a replica's processes, and what they answer. Stdlib only.

1. The server preempts an attempt: the job's spec has `checkpoint`, and every process of it runs. The replicas are in
   `preempted` of the agents' desired sets, with the seconds that they have (`checkpoint.preempt_grace_s`).
2. Each agent writes a *notice* beside the replica's telemetry socket: until when, on CLOCK_BOOTTIME, and why. A file
   and no signal: it reaches every process of a replica, interrupts nothing, and ends nothing that does not look for it.
3. A `CheckpointManager` looks for it after each step. The trainers agree on a step, save it, append the *answer* (that
   step) to the notice, and exit with `STATUS`.
4. The agent reports the step (`states.SAVED_AT`). At the notice's end the guard ends what still runs by SIGTERM, and by
   SIGKILL after `stop_grace_s`, whether an agent lives or not.

The file holds a line of JSON for the notice and one for each answer; it goes with the replica's folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS = 75
"""Exit status of a process that has saved and ended for a notice: EX_TEMPFAIL of sysexits.h, which is tried again."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`until`: when the replica is ended, seconds of CLOCK_BOOTTIME. `saved`: the step of the answer, None without."""

    until: float
    why: str
    saved: int | None = None


def notice_path(socket: str | Path) -> Path:
    """Return where the notice to the processes of a telemetry socket lies."""
    return Path(socket).with_suffix(".preempt")


def encode(until: float, why: str) -> bytes:
    """Return the content of a notice."""
    return _line({"until": until, "why": why})


def encode_answer(step: int) -> bytes:
    """Return what is appended once the checkpoint of a step is written."""
    return _line({"saved": step})


def decode(content: bytes) -> Notice | None:
    """Return what a file holds, None if it is no notice. Other lines are skipped: a script may have written them."""
    first, *others = content.split(b"\n")
    fields = _fields(first)
    until, why = fields.get("until"), fields.get("why")
    if not isinstance(until, float | int) or not isinstance(why, str):
        return None
    answers = [step for line in others if type(step := _fields(line).get("saved")) is int and step >= 0]
    return Notice(float(until), why, answers[-1] if answers else None)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
