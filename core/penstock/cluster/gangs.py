"""The gangs of a cluster, in a file: what was asked for outlives the process that asked.

A gang is written before it is launched, without a handle; `launch` is idempotent by name, so a process that was killed
in between launches it once more and gets the handle of the first time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.errors import SpecError
from penstock.process.private import write_private


@dataclass(slots=True)
class Gang:
    """`handle`: '' until it was launched. `ended`: its pilots that have ended; `drained`: those drained from here.

    `seen_before`: when nodes of its pilots' names were last seen before the launch: those of predecessors.
    `has_joined`, `was_cancelled`: whether a pilot of it did, or was; the end of others makes the next launch wait.
    """

    name: str
    count: int
    why: str
    handle: str = ""
    ended: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    seen_before: dict[str, str] = field(default_factory=dict)
    has_joined: bool = False
    was_cancelled: bool = False

    def pilots(self) -> list[str]:
        """Return the names of the pilots that have not ended."""
        return [name for index in range(self.count) if (name := f"{self.name}-{index}") not in self.ended]


@dataclass(slots=True)
class Gangs:
    """All gangs. `token`: the join token, `token_id`: by which it is revoked, `token_until`: seconds since 1970."""

    token: str = ""
    token_id: str = ""
    token_until: float = 0.0
    gangs: list[Gang] = field(default_factory=list)

    def free_name(self, cluster: str) -> str:
        """Return the first name that no gang has: names are reused, so that nodes do not pile up."""
        taken = {gang.name for gang in self.gangs}
        number = 0
        while f"{cluster}-{number}" in taken:
            number += 1
        return f"{cluster}-{number}"


def load(path: Path) -> Gangs:
    """Read the file. Raises SpecError if it is damaged."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Gangs(**{**fields, "gangs": [Gang(**gang) for gang in fields["gangs"]]})
    except FileNotFoundError:
        return Gangs()
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(f"{path} is damaged ({error}); cancel its pilots by hand, and remove it") from error


def save(path: Path, gangs: Gangs) -> None:
    """Replace the file in one step; only its owner may read it."""
    write_private(path, json.dumps(asdict(gangs), indent=1))
