"""Tokens on their page, in a real Chromium: one is made for a project, works there alone, and is revoked."""

from __future__ import annotations

from playwright.sync_api import expect
from tests.e2e.conftest import Open, RunningServer

expect.set_options(timeout=30_000)


def test_a_token_for_a_project_is_made_and_revoked(open_page: Open, server: RunningServer) -> None:
    page = open_page("/").page
    page.get_by_role("link", name="Tokens").click()
    form = page.get_by_test_id("new-token")
    form.get_by_label("Name").fill("ci of vision")
    form.get_by_label("Role").select_option("runner")
    form.get_by_label("Projects").fill("vision")
    form.get_by_role("button", name="Make a token").click()
    secret = page.get_by_test_id("secret").inner_text()
    row = page.get_by_test_id("tokens").get_by_role("row").filter(has_text="ci of vision")
    expect(row).to_contain_text("vision: runner")
    restricted = RunningServer(server.url, secret, server.state_dir, server.pid)
    assert restricted.call("GET", "/me")["projects"] == {"vision": "runner"}
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    found = {token["name"]: token["revoked_at"] for token in server.call("GET", "/tokens")["items"]}
    assert found["ci of vision"] is not None


def test_a_viewer_of_a_project_sees_its_jobs_and_no_tokens(open_page: Open, server: RunningServer) -> None:
    for project in ("vision", "ctr"):
        spec = {"name": f"of-{project}", "entrypoint": ["true"], "project": project}
        server.call("POST", "/jobs", {"spec": spec})
    made = server.call("POST", "/tokens", {"name": "ana", "projects": {"vision": "viewer"}})
    viewer = RunningServer(server.url, made["token"], server.state_dir, server.pid)
    page = open_page(viewer.login_url().removeprefix(server.url), login=False).page
    expect(page.get_by_text("of-vision").first).to_be_visible()
    expect(page.get_by_text("of-ctr")).to_have_count(0)
    expect(page.get_by_role("link", name="Tokens")).to_have_count(0)
