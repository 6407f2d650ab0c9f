"""Phrases that documents, code and its messages do not use: each has a term of the field, which readers search for."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
SOURCES = {
    "core": ("py", "pyi", "cpp", "h"),
    "server": ("py",),
    "worker": ("py",),
    "alembic": ("py",),
    "bench": ("py",),
    "tools": ("py",),
    "web/src": ("ts", "tsx"),
}
GENERATED = {"api.d.ts", "constants.ts"}
TERMS = {
    r"stands? still": "hangs",
    r"hears? of|heard of": "is notified",
    r"told": "sent, reported, notified",
    r"last will": "orphan reaper",
    r"without a word": "silently, or without leaving the group",
    r"in company": "in parallel",
    r"in turns": "interleaved",
    r"asked for early|rows ahead": "prefetched",
    r"ha(s|ve|d) a word|a word where": "logs a warning",
    r"ask(s|ed)? again|patien(t|ce)": "retry, back-off, deadline, timeout",
    r"who is missing": "ranks that have not arrived",
    r"(is|are|was|were) away": "is unreachable",
    r"beats?": "heartbeat",
    r"desks?": "dispatcher",
    r"logbooks?|journals?|ledgers?": "write-ahead log, applied index",
    r"strangers?": "not a member",
    r"say goodbye": "send GOODBYE, leave the group",
    r"somebody|anybody|everybody": "the process, thread or rank",
    r"nobody|no one": "no process, thread or rank",
    r"whoever": "the process, thread or rank that",
}
ALLOWED = {
    r'"beat"': "the type of a message",
    r"journal\\?\.": "the name of a log file",
    r"journal_mode": "SQLite's",
    r"stop_patience_s": "a setting of the server",
    r"rows_ahead": "a documented module",
    r"keys are away": "cuckoo hashing",
    r"somebody `away`": "cuckoo hashing",
}
_ALLOWED = re.compile("|".join(ALLOWED), re.IGNORECASE)
_MARGIN = re.compile(r"^\s*(#|//+|/?\*+)", re.MULTILINE)


def _sources() -> list[Path]:
    folders = ((ROOT / folder, suffixes) for folder, suffixes in SOURCES.items())
    found = chain.from_iterable(folder.rglob(f"*.{suffix}") for folder, suffixes in folders for suffix in suffixes)
    return [path for path in found if path.name not in GENERATED]


def _found(text: str) -> list[str]:
    plain = " ".join(_MARGIN.sub("", _ALLOWED.sub("", text)).lower().replace("_", " ").split())
    hits = ((match[0], term) for phrase, term in TERMS.items() if (match := re.search(rf"\b({phrase})\b", plain)))
    return [f"{phrase!r}: use {term!r}" for phrase, term in hits]


@pytest.mark.parametrize("path", sorted([*PAGES, *_sources()]), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_uses_terms_of_the_field(path: Path) -> None:
    assert _found(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("A rank stands\nstill.", "stands still"),
        ("# A rank stands\n# still.", "stands still"),
        ("raise Unavailable(f'{server} is away')", "is away"),
        ("def is_told(self):", "told"),
    ],
)
def test_phrase_is_found_in_prose_and_code(text: str, phrase: str) -> None:
    assert [found.partition(":")[0] for found in _found(text)] == [repr(phrase)]


def test_allowed_names_are_not_reported() -> None:
    assert _found('type: Literal["beat"] = "beat"; stop_patience_s') == []
