"""The tour of docs/tour.md, walked on a real job in a real Chromium: from "why is it slow" to the cause, and mended.

`PENSTOCK_TOUR_PICTURES=1` writes the pictures of docs/images/tour-*.png.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import ROOT, Open, RunningServer, stop
from tests.support.waiting import until

PICTURES = ROOT / "docs" / "images"
TOUR = ROOT / "docs" / "tour.md"
WAIT_MS = 60_000

Start = Callable[..., str]


def script() -> str:
    """Return the program that the tour shows."""
    found = re.search(r"```python\n(.*?)```", TOUR.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def start(server: RunningServer, tmp_path: Path) -> Iterator[Start]:
    """Run the program as an attached job; return the job's id."""
    running: list[subprocess.Popen[bytes]] = []

    def run(name: str, *options: str) -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(script())
        own = {"PENSTOCK_URL": server.url, "PENSTOCK_TOKEN": server.token, "PENSTOCK_JOB_NAME": name, "CPU_NUM": "1"}
        command = [sys.executable, str(file), *options]
        running.append(subprocess.Popen(command, env={**os.environ, **own}, stderr=subprocess.DEVNULL))

        def ids() -> list[str]:
            return [job["id"] for job in server.call("GET", "/jobs")["items"] if job["name"] == name]

        until(lambda: bool(ids()), f"a job {name}", 60)
        return ids()[0]

    yield run
    for process in running:
        stop(process)


def _picture(page: Page, number: int) -> None:
    if os.environ.get("PENSTOCK_TOUR_PICTURES"):
        page.wait_for_timeout(1500)  # a moment more of curves
        page.screenshot(path=str(PICTURES / f"tour-{number}.png"))


@pytest.mark.soak
def test_the_tour_leads_from_a_slow_job_to_its_cause(open_page: Open, server: RunningServer, start: Start) -> None:
    job = start("slow")
    page = open_page(f"/jobs/{job}").page
    first = page.get_by_test_id("diagnosis").get_by_role("link").first
    expect(first).to_contain_text(
        re.compile(r"input: \d+\s% of the step waits for data: .* between steps"), timeout=WAIT_MS
    )
    page.wait_for_function("() => window.__penstock.lossPoints() > 300", timeout=WAIT_MS)
    _picture(page, 1)
    first.click()
    expect(page.get_by_test_id("tab-metrics")).to_have_attribute("aria-selected", "true")
    _picture(page, 2)
    page.goto(f"{server.url}/jobs/{job}?tab=timeline")
    expect(page.get_by_test_id("timeline-summary")).to_contain_text("compute", timeout=WAIT_MS)
    expect(page.get_by_test_id("strip-text")).to_contain_text(re.compile(r"of .*\d\d sampled steps"), timeout=WAIT_MS)
    page.keyboard.press("[")
    expect(page.get_by_test_id("strip-text")).to_contain_text("replay of step")
    _picture(page, 3)
    page.goto(f"{server.url}/jobs/{job}?tab=graph")
    page.wait_for_function("() => window.__penstock.litOperators().length > 10", timeout=WAIT_MS)
    _picture(page, 4)
    mended = start("mended", "--parse-once")
    page.goto(f"{server.url}/jobs/{mended}")
    page.wait_for_function("() => window.__penstock.lossPoints() > 300", timeout=WAIT_MS)
    expect(page.get_by_test_id("diagnosis")).not_to_contain_text("waits for data")
    _picture(page, 5)
