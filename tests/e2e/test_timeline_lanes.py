"""The timeline's lanes in a real Chromium: nodes with wrong clocks, the data feed, and many steps at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer
from tests.e2e.ctr_graph import ctr_graph
from tests.e2e.feeder import Feeder
from tests.e2e.skewed_node import SkewedNode, one_operator

from penstock.protocol.frames import FIRST_BLOCK, FIRST_READER, FLAG_IN_FULL, FLAG_WHOLE_STEP, ROUNDS_LANE, Work

Feed = Callable[..., Feeder]
AHEAD_MS = (-340, 2500)  # by how much the nodes' clocks are wrong
US = 1000


def lanes(page: Page, count: int) -> dict[str, dict[str, Any]]:
    """The lanes of the timeline by key, once there are so many."""
    page.wait_for_function("n => window.__penstock.lanes().length === n", arg=count)
    return {lane["key"]: lane for lane in page.evaluate("() => window.__penstock.lanes()")}


def test_lanes_of_nodes_with_wrong_clocks_line_up(open_page: Open, server: RunningServer) -> None:
    nodes = [SkewedNode(server, f"node-{i}", ms * 1_000_000) for i, ms in enumerate(AHEAD_MS)]
    document, _ = ctr_graph()
    with ExitStack() as opened:
        for node in nodes:
            opened.enter_context(node)
        spec = {"name": "skewed", "mode": "collective", "entrypoint": ["true"], "trainers": {"count": 2, "cpus": 1}}
        job = server.call("POST", "/jobs", {"spec": spec})["id"]
        indices = [node.start() for node in nodes]
        clocks = [node.find_clock() for node in nodes]
        page = open_page(f"/jobs/{job}?tab=timeline").page
        began_ns = time.time_ns()
        for node in nodes:
            node.graph(document)
            node.step(7, began_ns, one_operator(0, 5_000_000))
        shown = lanes(page, 2)
        # Both began at once. By their own clocks they are 2.84 s apart; by the server's no more than both may be wrong.
        # A page keeps an estimate until one that has less than half of its error (`ClockOffset.differs`).
        apart_ns = abs(shown["trainer-0.0"]["firstNs"] - shown["trainer-1.0"]["firstNs"])
        assert apart_ns <= sum(2 * clock.error_ns + 1 for clock in clocks) + 1
        assert sum(clock.error_ns for clock in clocks) < 100_000_000
        said = page.get_by_test_id("clocks").locator("li")
        expect(said).to_have_count(2)
        for index, ms in zip(range(2), AHEAD_MS, strict=True):
            sign = "−" if ms < 0 else "+"
            expect(said.filter(has_text=f"clock of node-{index}: {sign}")).to_have_count(1)
        assert sorted(indices) == [0, 1]
        server.call("POST", f"/jobs/{job}:cancel")


def test_the_data_feed_has_lanes_beside_the_threads(open_page: Open, feed: Feed) -> None:
    feeder = feed("starved")
    feeder.graph()
    feeder.steps(1, sampled=True)
    feeder.input(
        [
            (Work.READ, FIRST_READER, -9000 * US, -400 * US),
            (Work.WAIT, 0, -8000 * US, -390 * US),
            (Work.BATCH, 0, -390 * US, -50 * US),
            (Work.READ, FIRST_READER, -380 * US, 2000 * US),
        ],
        before_ns=9000 * US,
    )
    page = open_page(f"/jobs/{feeder.job_id}?tab=timeline").page
    shown = lanes(page, 4)
    assert [(key, lane["slices"]) for key, lane in shown.items()][:2] == [("trainer-0.r0", 2), ("trainer-0.b0", 2)]
    assert shown["trainer-0.b0"]["firstNs"] == 0
    assert abs(shown["trainer-0.0"]["firstNs"] - 8000 * US) < 1000 * US  # a thread's first operator starts a bit later
    expect(page.get_by_test_id("timeline-summary")).to_contain_text("waited 7.61 ms for data")
    expect(page.get_by_test_id("slice-table").locator("tbody tr").first).to_contain_text("wait for a batch")
    page.get_by_test_id("timeline").focus()
    page.keyboard.press("p")  # nothing is marked yet: nothing is pinned
    page.keyboard.press("ArrowDown")
    page.keyboard.press("p")
    page.wait_for_function("() => location.search.includes('pin=trainer-0.b0')")


def test_a_two_by_two_job_shows_all_four_processes(open_page: Open, feed: Feed) -> None:
    trainers = [feed("two-by-two", index=i) for i in range(2)]
    servers = [feed("two-by-two", role="pserver", index=i) for i in range(2)]
    for trainer in trainers:
        trainer.graph()
        trainer.steps(1, sampled=True)
    for server in servers:
        server.step_began_ns = trainers[0].step_began_ns
        work = [
            (Work.RECEIVE, 0, 100 * US, 130 * US), (Work.ROUND, 0, 130 * US, 400 * US),
            (Work.UPDATE, ROUNDS_LANE, 300 * US, 390 * US), (Work.LOOK_UP, FIRST_BLOCK, 10 * US, 40 * US),
        ]  # fmt: skip
        server.input(work, before_ns=0)
        server.exchange(1, ["trainer 0"], lanes={FIRST_BLOCK: "embedding"})
    page = open_page(f"/jobs/{trainers[0].job_id}?tab=timeline").page
    shown = lanes(page, 4 + 6)
    assert {key.split(".")[0] for key in shown} == {"trainer-0", "trainer-1", "pserver-0", "pserver-1"}
    assert shown["pserver-1.t0"]["slices"] == 2
    assert abs(shown["pserver-1.u"]["firstNs"] - 300 * US) < 100 * US
    expect(page.get_by_test_id("timeline-summary")).to_contain_text("of 4 threads' time")
    expect(page.get_by_test_id("slice-table")).to_contain_text("pserver-0 · embedding")


def test_steps_recorded_in_full_are_shown_at_once(open_page: Open, feed: Feed) -> None:
    feeder = feed("recorded")
    feeder.graph()
    feeder.steps(1, sampled=True)
    for _ in range(6):
        feeder.steps(1, sampled=True, flags=FLAG_WHOLE_STEP | FLAG_IN_FULL)
    page = open_page(f"/jobs/{feeder.job_id}?tab=timeline").page
    one = lanes(page, 2)["trainer-0.0"]["slices"]
    shows = page.get_by_test_id("show-in-full")
    expect(shows).to_have_text("Show steps 2 to 7 at once")  # until all have come it offers those that have
    shows.click()
    page.wait_for_function("() => new URLSearchParams(location.search).get('step') === '2-7'")
    page.wait_for_function("n => window.__penstock.lanes()[0].slices > 5 * n", arg=one)
    expect(page.get_by_test_id("strip-text")).to_contain_text("replay of steps 2 to 7 · 6 sampled steps")
    expect(page.get_by_test_id("timeline-summary")).to_contain_text("steps 2 to 7, recorded in full")
    assert page.evaluate("() => window.__penstock.paintedSlices()") > 5 * one
    page.keyboard.press("[")
    page.wait_for_function("() => new URLSearchParams(location.search).get('step') === '1'")
    page.reload()
    expect(page.get_by_test_id("strip-text")).to_contain_text("replay of step 1 ")
