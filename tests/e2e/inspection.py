"""What is wrong with a view as it stands in the browser: rules of accessibility, sizes of text, overflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page
from tests.e2e.conftest import ROOT

AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = (1440, 390)
LEAST_PX = 11
Scheme = Literal["dark", "light"]
# Regions of scrolled tables are reachable by keyboard; contrast of disabled and of canvas text is not axe's to see.
RUN = """async (rules) => {
  const only = rules.length ? { runOnly: { type: "rule", values: rules } } : {};
  const found = await axe.run(document, { resultTypes: ["violations"], ...only });
  const html = (one) => one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ");
  return found.violations.map((one) => `${one.id}: ${html(one)}`);
}"""
WIDE = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""
SMALL = """(least) => {
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node !== null; node = walker.nextNode()) {
    const element = node.parentElement;
    if (element === null || node.data.trim() === "" || element.getClientRects().length === 0) continue;
    const size = Number.parseFloat(getComputedStyle(element).fontSize);
    if (size < least) found.add(`${size} px: "${node.data.trim().slice(0, 40)}"`);
  }
  return [...found].slice(0, 5);
}"""


def axe_source() -> str:
    """The source of axe-core."""
    if not AXE.is_file():
        pytest.fail("web/node_modules/axe-core is missing. Run: cd web && npm ci")
    return Path(AXE).read_text()


def complaints(page: Page, width: int, scheme: Scheme, rules: Sequence[str] | None) -> list[str]:
    """Return what is wrong at a width and in a scheme. `rules`: of axe, none for all of them; None: without axe."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_timeout(60)
    found = [] if rules is None else page.evaluate(RUN, list(rules))
    if page.evaluate(WIDE) > 0:
        found.append("the page is wider than its window")
    found += [f"small text, {one}" for one in page.evaluate(SMALL, LEAST_PX)]
    return [f"{width} px {scheme}: {one}" for one in found]
