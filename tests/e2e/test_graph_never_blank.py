"""The graph of many operators is never an empty canvas: not while it is laid out, nor wherever a person moves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bench._large_graph import large_graph
from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer, Watched
from tests.e2e.feeder import Feeder
from tests.e2e.inspection import axe_source

NUM_OPS = 3000  # above 600 kB: parsed and laid out in a worker
MIN_COLOURS = 8  # an empty canvas has one colour, a box with its frame and text has more
COLOURS = """(canvas) => {
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < pixels.length; i += 4) seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return seen.size;
}"""
# A worker as slow as the test wants: layouts are asked of it when the test calls `__plans.release()`.
HOLD_PLANS = """(() => {
  const plans = { holding: true, waiting: [] };
  plans.release = () => { plans.holding = false; plans.waiting.splice(0).forEach((ask) => ask()); };
  window.__plans = plans;
  window.Worker = class extends Worker {
    postMessage(message, ...more) {
      const ask = () => super.postMessage(message, ...more);
      if (message.type === "plan" && plans.holding) plans.waiting.push(ask); else ask();
    }
  };
})()"""


@pytest.fixture
def job(feed: Callable[..., Feeder]) -> Feeder:
    """A running job with a graph that only the worker lays out."""
    feeder = feed("large", document=large_graph(NUM_OPS))
    feeder.graph()
    feeder.only(list(range(0, NUM_OPS, 3)))
    return feeder


def graph_page(watched: Watched, server: RunningServer, job: Feeder) -> Page:
    """The job's graph, once its first layout is there."""
    watched.page.goto(f"{server.url}/jobs/{job.job_id}?tab=graph")
    watched.page.wait_for_function("() => window.__penstock.boxes() > 0")
    return watched.page


@pytest.mark.parametrize(("theme", "width"), [("dark", 1440), ("light", 390)])
def test_a_layout_that_is_under_way_is_announced(
    open_page: Open, server: RunningServer, job: Feeder, theme: str, width: int
) -> None:
    page = open_page(color_scheme=theme, viewport={"width": width, "height": 900}).page
    page.add_init_script(HOLD_PLANS)
    page.goto(f"{server.url}/jobs/{job.job_id}?tab=graph")
    notice = page.get_by_test_id("laying-out")
    expect(notice).to_contain_text("Laying out")
    expect(notice).to_contain_text("operators…")
    page.evaluate(axe_source())
    assert page.evaluate("async () => (await axe.run('main')).violations.map((one) => one.id)") == []
    page.evaluate("window.__plans.release()")
    expect(notice).to_have_count(0)
    page.wait_for_function("() => window.__penstock.boxes() > 0")
    assert page.get_by_test_id("graph").evaluate(COLOURS) >= MIN_COLOURS


def test_the_drawing_stays_until_its_successor_is_laid_out(open_page: Open, server: RunningServer, job: Feeder) -> None:
    watched = open_page()
    watched.page.add_init_script(f"{HOLD_PLANS}; window.__plans.release()")
    page = graph_page(watched, server, job)
    canvas, boxes = page.get_by_test_id("graph"), page.evaluate("window.__penstock.boxes()")
    page.evaluate("window.__plans.holding = true")
    page.get_by_test_id("expand-all").click()
    page.set_viewport_size({"width": 1300, "height": 800})  # a new size empties a canvas
    page.wait_for_function("() => window.__plans.waiting.length >= 2")
    for _ in range(5):
        assert canvas.evaluate(COLOURS) >= MIN_COLOURS
    assert page.evaluate("window.__penstock.boxes()") == boxes
    page.evaluate("window.__plans.release()")
    page.wait_for_function(f"() => window.__penstock.boxes() > {NUM_OPS}")


def test_no_drag_or_zoom_ends_on_an_empty_canvas(open_page: Open, server: RunningServer, job: Feeder) -> None:
    page = graph_page(open_page(), server, job)
    canvas = page.get_by_test_id("graph")
    box = canvas.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def drag(dx: int, dy: int) -> int:
        """Drag by as much as the canvas has room for; return the colours that are left on it."""
        page.mouse.move(x - dx / 2, y - dy / 2)
        page.mouse.down()
        page.mouse.move(x + dx / 2, y + dy / 2, steps=3)
        page.mouse.up()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return int(canvas.evaluate(COLOURS))

    away = [drag(600, 300) for _ in range(4)]  # collapsed, the graph is smaller than the canvas
    page.get_by_test_id("expand-all").click()
    page.wait_for_function(f"() => window.__penstock.boxes() > {NUM_OPS}")
    for _ in range(12):
        page.mouse.wheel(0, -400)
    close = [drag(*by) for by in [(600, 300), (-600, 300), (-600, -300), (600, -300)]]
    assert min(away + close) >= MIN_COLOURS, (away, close)
