"""Findings: what a report about a machine consists of, each a line with a level and what to do. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Level = Literal["ok", "warning", "error"]
"""`warning`: works, but slower, with less, or not for every job. `error`: jobs or commands fail."""
_ORDER: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `advice`: what to do; empty if nothing needs to be done."""

    name: str
    level: Level
    detail: str
    advice: str = ""


class MachineReading(Protocol):
    """Something that was read from a machine. `finding` is a pure function of it."""

    def finding(self) -> Finding:
        """Judge the reading."""


def worst(findings: Iterable[Finding]) -> Level:
    """Return the highest level; ok if there is no finding."""
    return max((found.level for found in findings), key=_ORDER.index, default="ok")


def to_mend(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return those that are not ok."""
    return tuple(found for found in findings if found.level != "ok")


def size(num_bytes: int) -> str:
    """Return bytes as text: 64 MiB, 1.5 GiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes >> 20} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"
