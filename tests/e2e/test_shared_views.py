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


RESIZED = """async () => {
  const at = new URLSearchParams(location.search).get('at');
  const found = [__penstock.graphView()];
  const box = document.querySelector('[data-testid=graph]').parentElement;
  const high = box.clientHeight;
  box.style.flex = 'none';
  box.style.height = `${high - 80}px`;
  found.push(__penstock.graphView());
  dispatchEvent(new PopStateEvent('popstate'));
  const frames = async () => {
    for (let frame = 0; frame < 5; frame++) await new Promise(requestAnimationFrame);
    found.push(__penstock.graphView());
  };
  await frames();
  box.style.height = `${high - 140}px`;
  const canvas = document.querySelector('[data-testid=graph]');
  const { left, top } = canvas.getBoundingClientRect();
  for (const deltaY of [-120, 120]) {
    canvas.dispatchEvent(new WheelEvent('wheel', { clientX: left + 200, clientY: top + 100, deltaY, bubbles: true }));
  }
  await frames();
  return [at, found, high - box.clientHeight];
}"""


def test_a_graph_holds_its_middle_while_its_height_changes(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=graph&at=0.25,0.4,1.2").page
    page.wait_for_function("() => __penstock.graphView() !== null")
    at, found, less = page.evaluate(RESIZED)
    places = [[float(part) for part in text.split(",")] for text in (at, *found)]
    assert less == 140
    # Before the observer of sizes was told, when the address is read anew just then, and when the wheel is turned there
    # and back.
    assert places == [pytest.approx(places[0], abs=5e-4)] * 5


def test_arrow_keys_go_along_the_uses_of_an_operator(open_page: Open, job: Feeder) -> None:
    document = job.document
    op = next(at for at, one in enumerate(document.ops) if one.name == "relu_1")
    consumers = sorted({after for before, after in document.edges if before == op})
    assert [document.ops[one].name for one in consumers] == ["addmm_2", "dw_2", "thr_1"]
    page = open_page(f"/jobs/{job.job_id}?tab=graph&op={op}").page
    expect(page.get_by_test_id("operator-panel")).to_contain_text(document.ops[op].name)
    hint = page.get_by_test_id("graph-hint")
    expect(hint).to_contain_text("relu_1 · ← 1 producer · → 3 consumers · ↑ ↓ the nearest box")
    expect(page.get_by_test_id("used-by").get_by_role("button")).to_have_text(["addmm_2", "dw_2", "thr_1"])
    page.get_by_test_id("graph").focus()
    page.keyboard.press("ArrowRight")
    says = page.get_by_test_id("graph-says")
    expect(says).to_have_text("addmm_2, forward of tower.fc_2; consumer 1 of 3 of relu_1")
    expect(hint).to_contain_text("↑ ↓ consumer 1 of 3 of relu_1")
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


def at_and_address_agree(page: Page) -> str:
    page.wait_for_function(
        "() => __penstock.graphView() !== null"
        " && new URLSearchParams(location.search).get('at') === __penstock.graphView()"
    )
    return str(page.evaluate("() => __penstock.graphView()"))


def test_back_and_forward_show_the_place_in_the_address(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=graph").page
    page.wait_for_function("() => __penstock.boxes() > 0")
    page.get_by_test_id("graph").focus()
    page.keyboard.press("+")
    first = at_and_address_agree(page)
    page.keyboard.press("2")  # the tab of the graph: an entry of the history that names no place
    assert at_and_address_agree(page) == first
    page.keyboard.press("+")
    page.wait_for_function("(at) => __penstock.graphView() !== at", arg=first)
    second = at_and_address_agree(page)
    page.go_back()
    page.wait_for_function("(at) => __penstock.graphView() === at", arg=first)
    assert at_and_address_agree(page) == first
    page.go_forward()
    page.wait_for_function("(at) => __penstock.graphView() === at", arg=second)
    page.go_back()
    page.get_by_test_id("tab-timeline").click()
    page.go_back()
    page.wait_for_function("(at) => __penstock.graphView() === at", arg=first)


def test_an_address_that_cannot_be_read_shows_all_and_a_notice(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=graph&at=zz&open=[1&op=99999").page
    notice = page.get_by_test_id("address-note")
    expect(notice).to_contain_text("no place in the graph (at=zz): all of it is shown")
    expect(notice).to_contain_text("The modules to open cannot be read (open=[1)")
    expect(notice).to_contain_text(f"No operator 99999 is in this graph of {job.num_ops}")
    page.wait_for_function("() => !location.search.includes('at=')")
    assert page.evaluate("() => __penstock.graphView()") is None
    notice.get_by_role("button", name="Dismiss").click()
    expect(notice).to_have_count(0)
    assert "op" not in query(page)
    other = open_page(f'/jobs/{job.job_id}?tab=graph&open=["forward|gone||false"]').page
    expect(other.get_by_test_id("address-note")).to_contain_text("1 module that the address opens is not in this graph")
    other.wait_for_function("() => !location.search.includes('open=')")


def test_a_step_that_is_not_here_is_named_beside_the_newest(open_page: Open, job: Feeder) -> None:
    page = open_page(f"/jobs/{job.job_id}?tab=timeline&step=500").page
    expect(page.get_by_test_id("strip-note")).to_have_text("step 500 is not here; the newest is shown:")
    expect(page.get_by_test_id("strip-text")).to_contain_text("step 20 ")
    other = open_page(f"/jobs/{job.job_id}?tab=timeline&held=abc").page
    expect(other.get_by_test_id("strip-note")).to_have_text("“abc” is no step; the newest is shown:")
