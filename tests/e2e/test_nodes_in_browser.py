"""Nodes are cordoned, drained and used again on their page, in a real Chromium and by the keyboard alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect
from tests.e2e.conftest import Open, RunningServer
from tests.e2e.inspection import axe_source, complaints
from tests.e2e.skewed_node import SkewedNode

expect.set_options(timeout=30_000)


def started(node: SkewedNode) -> SkewedNode:
    """Return a node once a job runs there."""
    node.start()
    return node


@contextmanager
def heartbeats_of(node: SkewedNode) -> Iterator[None]:
    """Have a node send heartbeats: a browser on a busy machine takes longer than a lease."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(1.0):
            node.say_load(cpu_percent=1.0, memory_used_bytes=1 << 30)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_node_is_drained_by_a_deadline_and_used_again(open_page: Open, server: RunningServer) -> None:
    spec = {"name": "goes-on", "entrypoint": ["true"], "trainers": {"memory": "1MiB"}}
    server.call("POST", "/jobs", {"spec": spec})
    with SkewedNode(server, "busy", 0) as node, heartbeats_of(started(node)):
        page = open_page("/nodes").page
        row = page.get_by_test_id("nodes").get_by_role("row").filter(has_text="READY")
        row.get_by_role("button", name="Cordon busy").press("Enter")
        expect(page.get_by_test_id("standing")).to_contain_text("an administrator has cordoned it")
        page.get_by_role("button", name="Drain… busy").press("Enter")
        dialog = page.get_by_role("dialog", name="Drain busy")
        expect(dialog).to_contain_text("1 replica runs there now")
        expect(page.get_by_test_id("labels")).to_have_text("zone=east")
        page.evaluate(axe_source())
        assert [one for width in (1440, 390) for one in complaints(page, width, "dark", [])] == []
        dialog.get_by_label("Preempt what still runs").fill("90")
        dialog.get_by_label("Preempt what still runs").press("Enter")
        expect(dialog).to_have_count(0)
        expect(page.get_by_test_id("standing")).to_contain_text(re.compile(r"preempted · 1.*left, 1 replica of it"))
        [shown] = [one for one in server.call("GET", "/nodes")["items"] if one["name"] == "busy"]
        assert (shown["state"], 5300 < shown["drain_left_s"] <= 5400) == ("DRAINING", True)
        assert [one for width in (1440, 390) for one in complaints(page, width, "light", [])] == []
        page.get_by_role("button", name="Uncordon busy").press("Enter")
        expect(page.get_by_test_id("standing")).to_have_count(0)


def test_who_may_not_change_nodes_has_no_buttons(browser: Browser, server: RunningServer) -> None:
    token = server.call("POST", "/tokens", {"name": "reader", "scopes": ["read"]})["token"]
    reader = RunningServer(server.url, token, server.state_dir, server.pid)
    with browser.new_context() as context, SkewedNode(server, "watched", 0):
        page = context.new_page()
        page.goto(reader.login_url())
        page.wait_for_url(f"{server.url}/")
        page.goto(f"{server.url}/nodes")
        row = page.get_by_test_id("nodes").get_by_role("row").filter(has_text="watched")
        expect(row).to_contain_text("READY")
        expect(row.get_by_role("button")).to_have_count(0)


def test_a_page_whose_script_does_not_come_can_be_retried(open_page: Open) -> None:
    watched = open_page("/")
    page = watched.page
    watched.expected = ("net::ERR_FAILED",)
    page.route("**/assets/nodes-*.js", lambda route: route.abort())
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page.get_by_test_id("error")).to_contain_text("The script of this view could not be loaded.")
    page.unroute("**/assets/nodes-*.js")
    page.get_by_test_id("error").get_by_role("button").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
    expect(page.get_by_test_id("error")).to_have_count(0)
