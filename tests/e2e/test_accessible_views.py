"""Every view, dark and light, wide and narrow: axe-core finds no violation, and nothing overflows sideways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import ROOT, Open
from tests.e2e.feeder import TRACEBACK, Feeder, exchange

Feed = Callable[..., Feeder]
VIEWS = ("overview", "graph", "graph&view=table", "timeline", "sync", "metrics", "advice", "logs", "events", "config")
PAGES = ("/", "/?state=failed&q=nothing", "/nodes", "/tokens", "/webhooks", "/no/such/page")
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
# Regions of scrolled tables are reachable by keyboard; contrast of disabled and of canvas text is not axe's to see.
RUN = """async (rules) => {
  const only = rules.length ? { runOnly: { type: "rule", values: rules } } : {};
  const found = await axe.run(document, { resultTypes: ["violations"], ...only });
  const html = (one) => one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ");
  return found.violations.map((one) => `${one.id}: ${html(one)}`);
}"""
WIDE = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    if not AXE.is_file():
        pytest.fail("web/node_modules/axe-core is missing. Run: cd web && npm ci")
    return Path(AXE).read_text()


@pytest.fixture
def job(feed: Feed) -> str:
    """A running job of two trainers and two parameter servers that has reported some of everything."""
    trainers = [feed("accessible", index=index) for index in range(2)]
    servers = [feed("accessible", role="pserver", index=index) for index in range(2)]
    for trainer in trainers:
        trainer.graph()
        trainer.steps(40, sampled=True)
        trainer.scalar("test_auc", 0.77)
        trainer.log("loaded\nTraceback: none\n")
    exchange(trainers, 40, len(servers))
    return trainers[0].job_id


@pytest.fixture
def failed(feed: Feed) -> str:
    """A job that failed with a traceback."""
    feeder = feed("broken")
    feeder.log(TRACEBACK)
    feeder.close(error="ValueError: no rows")
    return feeder.job_id


def _complaints(page: Page, width: int) -> list[str]:
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_timeout(100)
    found = page.evaluate(RUN, [])
    if page.evaluate(WIDE) > 0:
        found.append("the page is wider than its window")
    page.emulate_media(color_scheme="light")  # changes nothing but colours
    found += page.evaluate(RUN, ["color-contrast"])
    page.emulate_media(color_scheme="dark")
    return [f"{width} px: {one}" for one in found]


def test_no_view_violates_a_rule_of_accessibility(open_page: Open, job: str, failed: str, axe: str) -> None:
    page = open_page("/", viewport={"width": 1440, "height": 844}, color_scheme="dark").page
    base = page.url.rstrip("/")
    found: dict[str, Any] = {}
    for path in [*PAGES, f"/jobs/{failed}", *(f"/jobs/{job}?tab={view}" for view in VIEWS)]:
        page.set_viewport_size({"width": 1440, "height": 844})
        page.goto(base + path)
        expect(page.locator("main:not([aria-busy=true])").first).to_be_visible()
        page.evaluate(axe)  # once for both widths: the views follow the window without being loaded anew
        if complaints := [one for width in (1440, 390) for one in _complaints(page, width)]:
            found[path.replace(job, "JOB")] = complaints
    assert not found, "\n".join(f"{path}: {complaint}" for path, all_of in found.items() for complaint in all_of)
