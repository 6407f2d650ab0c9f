"""What the lists and a job's facts say beside the newest numbers: courses, phases, checkpoints, differences of runs."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect
from tests.e2e.conftest import Open, RunningServer
from tests.e2e.feeder import Feeder
from tests.e2e.skewed_node import SkewedNode

Feed = Callable[..., Feeder]


def test_the_course_of_the_loss_stands_beside_it(open_page: Open, feed: Feed) -> None:
    feeder = feed("with-a-course")
    feeder.steps(40, sampled=False)
    silent = feed("without-a-course")
    page = open_page("/").page
    row = page.locator(f"[data-job='{feeder.job_id}']")
    line = row.get_by_role("img", name="Loss of with-a-course over its steps").locator("polyline")
    expect(line).to_have_attribute("points", re.compile(r"^2\.0,\S+( \S+){20,}$"))
    before = line.get_attribute("points")
    feeder.steps(40, sampled=False)
    expect(line).not_to_have_attribute("points", str(before))
    expect(page.locator(f"[data-job='{silent.job_id}']").get_by_test_id("spark")).to_have_count(0)


def test_a_node_shows_its_processor_and_memory(open_page: Open, server: RunningServer) -> None:
    with SkewedNode(server, "measured", 0) as node:
        node.say_load(cpu_percent=37.0, memory_used_bytes=3 << 30)
        page = open_page("/nodes").page
        row = page.get_by_test_id("nodes").locator("tr", has_text="measured")
        expect(row).to_contain_text(re.compile(r"37\s%"))
        expect(row).to_contain_text(re.compile(r"3(\.\d+)?\s\w+ of 8(\.\d+)?\s\w+"))


def test_a_job_shows_its_phases_and_checkpoints(open_page: Open, feed: Feed) -> None:
    feeder = feed("with-checkpoints")
    feeder.steps(30, sampled=False)
    for step, took_s in ((10, 0.25), (20, 12.0)):
        feeder.checkpoint(step, took_s)
    page = open_page(f"/jobs/{feeder.job_id}?tab=events").page
    phase = page.get_by_test_id("ribbon").locator("li").last
    expect(phase).to_have_attribute("data-state", "RUNNING")
    expect(phase).to_contain_text("attempt 1")
    page.get_by_test_id("tab-config").click()
    rows = page.get_by_test_id("checkpoints").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text(re.compile(r"^20.*12\ss$"))
    expect(rows.last).to_contain_text(re.compile(r"^10.*0\.25\ss$"))
    page.get_by_test_id("tab-metrics").click()
    expect(page.get_by_test_id("chart-checkpoint_s")).to_be_visible()
    expect(page.get_by_test_id("chart-checkpoint_step")).to_have_count(0)


def test_runs_are_compared_by_settings_and_operators(open_page: Open, feed: Feed) -> None:
    now, before = feed("compared-now"), feed("compared-before")
    for feeder in (now, before):
        feeder.graph()
        feeder.steps(20, sampled=True)
    page = open_page(f"/jobs/{now.job_id}?tab=metrics&with={before.job_id}").page
    expect(page.get_by_text("The jobs have the same settings.")).to_be_visible()
    page.get_by_text("Time of each operator").click()
    table = page.get_by_test_id("operator-times").locator("table")
    expect(table.locator("thead")).to_contain_text(re.compile("This job.*compared-before"))
    expect(table.locator("tbody tr").first).to_contain_text(re.compile(r"[\d.]+\s(µs|ms).*[\d.]+\s(µs|ms)"))


def test_the_colours_of_the_graph_are_chosen_by_address(open_page: Open, feed: Feed) -> None:
    feeder = feed("coloured")
    feeder.graph()
    feeder.steps(5, sampled=True)
    page = open_page(f"/jobs/{feeder.job_id}?tab=graph").page
    page.wait_for_function("() => window.__penstock.receivedOperators().length > 0")
    by_role = page.get_by_test_id("graph").screenshot()
    page.get_by_test_id("tint").select_option("memory")
    expect(page.locator(".hint")).to_contain_text("more bytes read and written")
    assert "colour=memory" in page.url
    assert page.get_by_test_id("graph").screenshot() != by_role
    page.reload()
    expect(page.get_by_test_id("tint")).to_have_value("memory")
    page.get_by_test_id("tint").select_option("role")
    assert "colour" not in page.url
