"""Webhooks on their page, in a real Chromium: one is added, shows why it fails, and is removed."""

from __future__ import annotations

from playwright.sync_api import expect
from tests.e2e.conftest import Open, RunningServer

expect.set_options(timeout=30_000)


def test_a_webhook_is_added_shows_its_failure_and_is_removed(open_page: Open, server: RunningServer) -> None:
    page = open_page("/").page
    page.get_by_role("link", name="Webhooks").click()
    form = page.get_by_test_id("new-webhook")
    form.get_by_label("URL").fill("http://localhost:9/hook")
    form.get_by_label("Project").fill("vision")
    form.get_by_role("button", name="Add a webhook").click()
    assert page.get_by_test_id("secret").inner_text().startswith("whsec_")
    row = page.get_by_test_id("webhooks").get_by_role("row").filter(has_text="localhost:9")
    expect(row).to_contain_text("enabled")
    row.get_by_role("button", name="Test").click()
    for _ in range(60):
        if "not public" in row.inner_text():
            break
        page.wait_for_timeout(250)
        page.get_by_role("button", name="Refresh").click()
    expect(row).to_contain_text("after 1 failure")
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)
    assert server.call("GET", "/webhooks")["items"] == []
