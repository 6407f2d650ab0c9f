"""A command that an agent runs, in a real Chromium: its metrics are shown where others have a graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer, stop
from tests.e2e.inspection import axe_source, complaints

expect.set_options(timeout=30_000)
REPORTS = """
import penstock
for step in range(5):
    penstock.log(accuracy=0.2 * step, step=step)
for step in (2, 4):
    rows = [["cat", 0.5 * step, step], ["dog", 0.25, None], ["eel", 0.75, 10]]
    table = penstock.Table(["label", "share", "errors"], rows)
    penstock.log({"eval/worst": table, "weights": penstock.Histogram(range(10 * step), 8)}, step=step)
print("has reported")
"""


@pytest.fixture
def node(server: RunningServer, tmp_path: Path) -> Iterator[None]:
    """A real agent."""
    token = server.call("POST", "/join-tokens")["token"]
    command = [sys.executable, "-m", "penstock_worker", "--url", server.url, "--state-dir", str(tmp_path / "agent")]
    process = subprocess.Popen([*command, "--join-token", token], stderr=subprocess.DEVNULL)
    yield
    stop(process)


def test_command_is_shown_by_its_metrics_and_logs(open_page: Open, server: RunningServer) -> None:
    page = open_page(f"/jobs/{submit(server)}").page
    expect(page.get_by_role("heading", name="Metrics")).to_be_visible()
    expect(page.get_by_text("A command reports what it wants to have drawn")).to_be_visible()
    for tab in ("graph", "timeline", "sync"):
        expect(page.get_by_test_id(f"tab-{tab}")).to_have_count(0)
    expect(page.get_by_role("heading", name="SSA graph")).to_have_count(0)


def test_a_command_job_has_a_chart_and_explains_a_missing_graph(
    open_page: Open, server: RunningServer, node: None
) -> None:
    job_id = submit(server)
    page = open_page(f"/jobs/{job_id}").page
    expect(page.get_by_role("region", name="accuracy").locator("b")).to_have_text("0.8000")
    page.reload()  # so that the older table is not there yet when it is chosen
    expect(page.get_by_role("region", name="accuracy").locator("canvas")).to_be_visible()
    check_tables(page)
    page.goto(f"{server.url}/jobs/{job_id}?tab=graph")
    expect(page.get_by_text("A command has no graph")).to_be_visible()
    page.get_by_test_id("tab-logs").click()
    expect(page.get_by_text("has reported")).to_be_visible()


def check_tables(page: Page) -> None:
    """Its table is sorted by a click on a column, the one before is shown by the slider, and so is a histogram."""
    card = page.get_by_test_id("media").filter(has=page.get_by_text("eval/worst"))
    expect(card.get_by_test_id("media-step")).to_have_text("step 4 · 2 of 2")
    labels = card.locator("tbody td:first-child")
    expect(labels).to_have_text(["cat", "dog", "eel"])
    card.get_by_role("button", name="errors").click()
    expect(labels).to_have_text(["cat", "eel", "dog"])
    card.get_by_role("button", name="errors").click()
    expect(card.get_by_role("columnheader", name="errors")).to_have_attribute("aria-sort", "descending")
    expect(labels).to_have_text(["eel", "cat", "dog"])
    card.get_by_role("slider").press("ArrowLeft")
    expect(card.get_by_test_id("media-step")).to_have_text("step 2 · 1 of 2")
    expect(card.locator("tbody td:nth-child(3)").first).to_have_text("10")
    weights = page.get_by_test_id("media").filter(has=page.get_by_text("weights"))
    expect(weights.get_by_role("img")).to_have_attribute("aria-label", "weights: 40 values from 0.000 to 39.00")
    expect(weights.locator("rect")).to_have_count(8)
    page.evaluate(axe_source())
    for theme in ("dark", "light"):
        assert [one for width in (1440, 390) for one in complaints(page, width, theme, [])] == []


def submit(server: RunningServer) -> str:
    spec = {
        "name": "report", "mode": "command", "entrypoint": [sys.executable, "-c", REPORTS],
        "trainers": {"count": 1, "cpus": 0, "memory": "1MiB"},
    }  # fmt: skip
    job_id: str = server.call("POST", "/jobs", {"spec": spec})["id"]
    return job_id
