"""Links between Markdown files lead to a file, and to a heading where they name one; each page is in the navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]+)?\)")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as code hosts and MkDocs make them."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", without_code, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return frozenset(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text).strip()) for text in plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor[1:] not in anchors(target)):
            broken.append(path + anchor)
    assert not broken


def _leaves(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from _leaves(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from _leaves(value)


def test_navigation_has_every_page_once() -> None:
    nav = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    docs = ROOT / "docs"
    assert sorted(nav) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
