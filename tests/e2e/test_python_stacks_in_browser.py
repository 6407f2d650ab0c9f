"""A job that hangs, on a real agent, in a real Chromium: its Python stacks are there on request, and it goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import ROOT, Open, RunningServer, stop
from tests.e2e.inspection import axe_source
from tests.support.waiting import until

expect.set_options(timeout=30_000)
PICTURES = ROOT / "tests" / "artifacts"
HANGS = """
import threading, time
lock = threading.Lock()
lock.acquire()
def waits_for_lock(): lock.acquire()
threading.Thread(target=waits_for_lock, name="reader", daemon=True).start()
def sleeps(): time.sleep(600)
sleeps()
"""


@pytest.fixture
def job(server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """A job on an agent of this test, which waits in a lock and in a sleep."""
    token = server.call("POST", "/join-tokens")["token"]
    command = [sys.executable, "-m", "penstock_worker", "--url", server.url, "--state-dir", str(tmp_path / "agent")]
    process = subprocess.Popen([*command, "--join-token", token], stderr=subprocess.DEVNULL)
    spec = {"name": "hangs", "mode": "command", "entrypoint": [sys.executable, "-c", HANGS],
            "trainers": {"count": 1, "cpus": 0, "memory": "1MiB"}}  # fmt: skip
    job_id = str(server.call("POST", "/jobs", {"spec": spec})["id"])
    until(lambda: server.call("GET", f"/jobs/{job_id}")["state"] == "RUNNING", "a running job", 60)
    yield job_id
    server.call("POST", f"/jobs/{job_id}:cancel")
    stop(process)


def shown(page: Page) -> None:
    """Ask, by keyboard, until both threads have come to where they hang."""
    button, taken = page.get_by_test_id("take-stacks"), page.get_by_test_id("stacks-taken")
    button.focus()

    def both() -> bool:
        page.keyboard.press("Enter")
        page.wait_for_timeout(1100)  # once a second is as often as it is allowed
        text = taken.inner_text() if taken.count() else ""
        return "sleeps" in text and "waits_for_lock" in text

    until(both, "both threads", 60)
    expect(button).to_be_focused()


@pytest.mark.parametrize(("theme", "width"), [("dark", 1440), ("light", 390)])
def test_threads_of_a_job_that_hangs_are_shown(
    open_page: Open, server: RunningServer, job: str, theme: str, width: int
) -> None:
    watched = open_page(f"/jobs/{job}?tab=config", color_scheme=theme, viewport={"width": width, "height": 900})
    watched.expected = ("429",)
    page = watched.page
    shown(page)
    taken = page.get_by_test_id("stacks-taken")
    expect(taken).to_contain_text("trainer 0 at")
    for thread in ("MainThread", "reader"):
        block = taken.locator(".stack-thread").filter(has_text=thread)
        expect(block.locator("mark")).to_have_text("your line")
        expect(block.locator(".stack-own").first).to_contain_text("<string>:")
    page.evaluate(axe_source())
    assert page.evaluate("async () => (await axe.run(document)).violations.map((one) => one.id)") == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    PICTURES.mkdir(exist_ok=True)
    taken.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / f"stacks-{theme}-{width}.png")
    assert server.call("GET", f"/jobs/{job}")["state"] == "RUNNING"


def test_a_link_leads_to_the_stacks(open_page: Open, job: str) -> None:
    page = open_page(f"/jobs/{job}?tab=config#stacks", viewport={"width": 1440, "height": 500}).page
    expect(page.get_by_test_id("take-stacks")).to_be_focused()
    expect(page.get_by_test_id("take-stacks")).to_be_in_viewport()
    page.wait_for_url(lambda address: not address.endswith("#stacks"))
