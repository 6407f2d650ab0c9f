"""Preemption at a step boundary: what the agent writes for a replica's processes, and what they answer. Stdlib only.

1. The server preempts an attempt: the job's spec has `checkpoint`, and every process of it runs. The replicas are in
   `preempted` of the agents' desired sets, with the seconds that they have (`checkpoint.preempt_grace_s`).
2. Each agent writes a *notice* beside the replica's telemetry socket: until when, on CLOCK_BOOTTIME, and why. A file
   and no signal: it reaches every process of a replica, interrupts nothing, and ends nothing that does not look for it.
3. A `CheckpointManager` looks for it after each step. The trainers agree on a step, save it, append the *answer* (that
   step) to the notice, and exit with `STATUS`.
4. The agent reports the step (`states.SAVED_AT`). At the notice's end the guard ends what still runs by SIGTERM, and by
   SIGKILL after `stop_grace_s`, whether an agent lives or not.

The file holds a line of JSON for the notice and one for each answer. It is the job's, which may put anything there: its
processes take it for a notice, and agents read nothing but answers from it. Agent and guard go by a file of the
agent's own with the same first line (`penstock_worker.notices`). Both go with the replica's folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS = 75
"""Exit status of a process that has saved and ended for a notice: EX_TEMPFAIL of sysexits.h, which is tried again."""


MAX_BYTES = 4096
"""So much of either file is read: a notice and about 60 answers."""

MAX_WHY_CHARS = 500
MAX_STEP = 10**18


@dataclass(frozen=True, slots=True)
class Notice:
    """`until`: when the replica is ended, seconds of CLOCK_BOOTTIME. `why`: for people."""

    until: float
    why: str


def notice_path(socket: str | Path) -> Path:
    """Return where the notice to the processes of a telemetry socket lies."""
    return Path(socket).with_suffix(".preempt")


def encode(until: float, why: str) -> bytes:
    """Return the content of a notice. A long `why` is cut, so that answers stay within `MAX_BYTES`."""
    return _line({"until": until, "why": why if len(why) <= MAX_WHY_CHARS else why[: MAX_WHY_CHARS - 1] + "…"})


def encode_answer(step: int) -> bytes:
    """Return what is appended once the checkpoint of a step is written."""
    return _line({"saved": step})


def decode(content: bytes) -> Notice | None:
    """Return the notice that a file holds, None if it holds none. Never raises, whatever the bytes are."""
    fields = _fields(content[:MAX_BYTES].split(b"\n", 1)[0])
    until, why = fields.get("until"), fields.get("why")
    if not isinstance(until, int | float) or isinstance(until, bool) or not isinstance(why, str):
        return None
    try:
        end = float(until)
    except OverflowError:
        return None
    return Notice(end, why) if math.isfinite(end) else None


def decode_answer(content: bytes) -> int | None:
    """Return the step of the last answer in a file, None without one. Never raises, whatever the bytes are."""
    found = [_fields(line).get("saved") for line in content[:MAX_BYTES].split(b"\n")]
    steps = [step for step in found if type(step) is int and 0 <= step < MAX_STEP]
    return steps[-1] if steps else None


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or nested too deep
        return {}
    return found if isinstance(found, dict) else {}
