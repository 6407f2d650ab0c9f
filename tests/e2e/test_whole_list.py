"""The list of more jobs than the dashboard holds, in a real Chromium: found by the server, selected, compared."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect
from tests.e2e.conftest import Open, RunningServer
from tests.e2e.feeder import Feeder
from tests.e2e.inspection import axe_source, complaints

Feed = Callable[..., Feeder]
MANY = 230
"""More than the newest 200, with which a page begins."""


def ended(feed: Feed, name: str, error: str = "") -> str:
    feeder = feed(name)
    feeder.graph()
    feeder.steps(3, sampled=True)
    feeder.close(error)
    return feeder.job_id


def test_an_old_failure_is_found_and_jobs_are_compared(open_page: Open, feed: Feed, server: RunningServer) -> None:
    old = ended(feed, "broken-last-week", "ValueError: no rows")
    for number in range(MANY):
        cancelled = server.call("POST", "/jobs", {"spec": {"name": f"other-{number}", "entrypoint": ["true"]}})
        server.call("POST", f"/jobs/{cancelled['id']}:cancel")
    new = ended(feed, "broken-now", "ValueError: no rows either")
    page = open_page("/jobs").page
    rows = page.get_by_test_id("job-row")
    expect(page.get_by_test_id("state-done")).to_contain_text(str(MANY))
    page.get_by_test_id("state-failed").click()
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("broken-last-week")
    page.get_by_test_id("state-all").click()
    page.get_by_test_id("job-search").fill("EITHER broken")
    expect(rows).to_have_count(1)
    page.get_by_test_id("job-search").fill("")
    page.get_by_test_id("job-sort").select_option("name")
    expect(rows).to_have_count(100)
    expect(rows.first).to_contain_text("broken-last-week")
    page.get_by_test_id("load-more").click()
    expect(rows).to_have_count(200)
    for job in (new, old):
        page.locator(f'[data-job="{job}"]').get_by_test_id("pick").check()
    expect(page.get_by_test_id("picked")).to_contain_text("2 jobs selected")
    page.evaluate(axe_source())
    assert [one for width in (1440, 390) for one in complaints(page, width, "light", ())] == []
    page.reload()
    expect(page.get_by_test_id("picked")).to_contain_text("2 jobs selected")
    page.get_by_test_id("compare-picked").click()
    page.wait_for_url(f"**/jobs/{new}?tab=metrics&with={old}")
    expect(page.get_by_test_id("values-loss")).to_contain_text("broken-last-week")
    expect(page.get_by_text("The jobs have the same settings.")).to_be_visible()
