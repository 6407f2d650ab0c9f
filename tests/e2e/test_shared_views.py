"""A link shows another person what one looks at: the place in the graph, the step that is held and its zoom."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open
from tests.e2e.feeder import Feeder

Feed = Callable[..., Feeder]
expect.set_options(timeout=30_000)


@pytest.fixture
def job(feed: Feed) -> Feeder:
    feeder = feed("shared-views")
    feeder.graph()
    feeder.steps(20, sampled=True)
    return feeder


def query(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def link_of(page: Page) -> str:
    parts = urlsplit(page.url)
    return f"{parts.path}?{parts.query}"


def view_of(page: Page) -> list[float]:
    text = page.evaluate("() => __penstock.graphView()")
    return [float(part) for part in text.split(",")]


def test_a_shared_link_shows_the_same_place_in_the_graph(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=graph").page
    graph = page.get_by_test_id("graph")
    expect(graph).to_be_visible()
    graph.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.search.includes('open=')")
    entries, boxes = page.evaluate("() => history.length"), page.evaluate("() => __penstock.boxes()")
    for _ in range(4):
        page.keyboard.press("+")
    page.mouse.move(500, 500)
    page.mouse.down()
    page.mouse.move(380, 440, steps=3)
    page.mouse.up()
    page.wait_for_function("() => new URLSearchParams(location.search).get('at') === __penstock.graphView()")
    shown = view_of(page)
    assert page.evaluate("() => history.length") == entries
    other = open_page(link_of(page), viewport={"width": 1200, "height": 800}).page
    other.wait_for_function("() => __penstock.graphView() !== null")
    found = view_of(other)
    assert found[2] == pytest.approx(shown[2], rel=1e-3)
    assert found[:2] == pytest.approx(shown[:2], abs=0.01)
    assert other.evaluate("() => __penstock.boxes()") == boxes
    other.keyboard.press("f")
    other.wait_for_function("() => !location.search.includes('at=')")


def test_arrow_keys_go_along_the_uses_of_an_operator(open_page: Open, job: Feeder) -> None:
    document = job.document
    op = next(at for at, one in enumerate(document.ops) if one.name == "relu_1")
    consumers = sorted({after for before, after in document.edges if before == op})
    assert [document.ops[one].name for one in consumers] == ["addmm_2", "dw_2", "thr_1"]
    page = open_page(f"/jobs/{job.job_id}?tab=graph&op={op}").page
    expect(page.get_by_test_id("operator-panel")).to_contain_text(document.ops[op].name)
    page.get_by_test_id("graph").focus()
    page.keyboard.press("ArrowRight")
    says = page.get_by_test_id("graph-says")
    expect(says).to_have_text("addmm_2, forward of tower.fc_2; consumer 1 of 3 of relu_1")
    expect(page).to_have_url(re.compile(rf"op={consumers[0]}\b"))
    expect(page.get_by_test_id("operator-panel")).to_contain_text(document.ops[consumers[0]].name)
    page.keyboard.press("ArrowDown")
    expect(page).to_have_url(re.compile(rf"op={consumers[1]}\b"))
    page.keyboard.press("ArrowLeft")
    expect(page).to_have_url(re.compile(rf"op={op}\b"))
    page.mouse.move(500, 500)
    page.mouse.down()
    page.mouse.move(1000, 700, steps=3)
    page.mouse.up()
    moved = page.evaluate("() => __penstock.graphView()")
    page.wait_for_function("(at) => new URLSearchParams(location.search).get('at') === at", arg=moved)
    assert page.evaluate("() => __penstock.graphView()") == moved, "a selected operator does not pull the graph back"


def test_a_step_held_live_is_in_the_link_with_its_zoom(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=timeline").page
    page.wait_for_function("() => __penstock.paintedSlices() > 0")
    page.keyboard.press("w")  # a key, as a wheel misses the canvas if what lies above it grows meanwhile
    page.wait_for_function("() => location.search.includes('held=') && location.search.includes('span=')")
    link, span = link_of(page), page.evaluate("() => __penstock.timelineSpan()")
    held = query(page)["held"]
    job.steps(5, sampled=True)
    other = open_page(link).page
    expect(other.get_by_test_id("strip-text")).to_contain_text(re.compile(rf"\b{int(held):,}\b"))
    other.wait_for_function("(ns) => Math.abs(__penstock.timelineSpan()[0] - ns) < 2", arg=span[0])
    assert other.evaluate("() => __penstock.timelineSpan()") == pytest.approx(span, abs=2)
    assert query(other)["step"] == held and "held" not in query(other)
    page.get_by_test_id("hold").click()
    page.wait_for_function("() => !location.search.includes('held=')")
