"""Phrases that the documentation does not use: each has a term of the field, which a reader would search for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
TERMS = {
    "stands still": "hangs",
    "hears of": "is notified",
    "is told": "receives",
    "are told": "receive",
    "last will": "orphan reaper",
    "without a word": "silently, or without leaving the group",
    "in company": "in parallel",
    "in turns": "interleaved",
    "asked for early": "prefetched",
    "has a word": "logs a warning",
    "a stranger": "not a member",
    "somebody": "the process, thread or rank",
    "anybody": "the process, thread or rank",
    "everybody": "all processes, threads or ranks",
    "nobody": "no process, thread or rank",
    "whoever": "the process, thread or rank that",
}


NUMBERED_ROW = re.compile(r"^\| \d+ \|.*$", re.MULTILINE)  # docs/fluid-parity.md: rows follow Fluid's specification


def _found(text: str) -> list[str]:
    plain = " ".join(NUMBERED_ROW.sub("", text).lower().split())
    return [f"{phrase!r}: use {term!r}" for phrase, term in TERMS.items() if re.search(rf"\b{phrase}\b", plain)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_uses_terms_of_the_field(page: Path) -> None:
    assert _found(page.read_text(encoding="utf-8")) == []


def test_phrase_is_found_across_lines_with_its_term() -> None:
    assert _found("A rank stands\nstill.") == ["'stands still': use 'hangs'"]
