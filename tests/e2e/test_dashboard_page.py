"""What the page owes to people: keyboard, names for screen readers, themes, narrow windows, states without data."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer, Watched
from tests.e2e.feeder import Feeder

Feed = Callable[..., Feeder]
GRAPHS = "**/api/v1/graphs/*"
TABS = ("overview", "graph", "timeline", "sync", "metrics", "advice", "logs", "events", "config")
expect.set_options(timeout=30_000)

# What an audit tool would say first: everything that can be operated has a name, ids are unique, images and fields
# are labelled, the document has one main landmark, a title and a language, headings do not skip from nothing to h3.
AUDIT = """() => {
  const complaints = [];
  const shown = (e) => e.getClientRects().length > 0;
  const nameOf = (e) => (e.getAttribute('aria-label') || e.textContent || e.getAttribute('title') || '').trim()
    || (e.labels && [...e.labels].map((l) => l.textContent).join(' ').trim())
    || (document.getElementById(e.getAttribute('aria-labelledby') || '-')?.textContent ?? '').trim();
  for (const e of document.querySelectorAll('a, button, input, select, textarea, [tabindex], [role=img], canvas')) {
    if (!shown(e) || nameOf(e) || e.parentElement.closest('[role=img]')) continue;
    complaints.push('no name: ' + e.outerHTML.slice(0, 120));
  }
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  for (const id of ids) if (ids.filter((i) => i === id).length > 1) complaints.push('id twice: ' + id);
  for (const attribute of ['aria-labelledby', 'aria-controls']) {
    for (const e of document.querySelectorAll('[' + attribute + ']')) {
      const id = e.getAttribute(attribute);
      if (!document.getElementById(id)) complaints.push(attribute + ' names no element: ' + id);
    }
  }
  if (document.querySelectorAll('main').length !== 1) complaints.push('not exactly one main');
  if (!document.title || !document.documentElement.lang) complaints.push('no title or language');
  for (const e of document.querySelectorAll('th')) if (!e.textContent.trim()) complaints.push('empty header cell');
  return complaints;
}"""

CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('.sr, [disabled], noscript')) continue;
    const text = getComputedStyle(e).color;
    if (!text.startsWith('rgb')) continue;
    const [a, b] = [light(parse(text)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4) low.push(e.textContent.trim().slice(0, 30) + ' ' + ratio.toFixed(2));
  }
  return low;
}"""


# Cells and buttons of a part of the page that end beyond it or beyond the window.
BEYOND = """(part) => [...document.querySelectorAll(`${part} td, ${part} th, ${part} button, ${part} select`)]
  .filter((e) => e.getClientRects().length > 0 && !e.closest('.sr'))
  .filter((e) => e.getBoundingClientRect().right
    > Math.min(innerWidth, e.closest(part).getBoundingClientRect().right) + 1)
  .map((e) => e.textContent)"""


@pytest.fixture
def job(feed: Feed) -> Feeder:
    """A running job with a graph, metrics, a sampled step and a log."""
    feeder = feed("for-people")
    feeder.graph()
    feeder.steps(30, sampled=True)
    feeder.scalar("test_auc", 0.78)
    feeder.log("hello\n")
    return feeder


def job_page(watched: Watched, server: RunningServer, job: Feeder, query: str = "") -> Page:
    """The job's page, once it has drawn something."""
    watched.page.goto(f"{server.url}/jobs/{job.job_id}{query}")
    expect(watched.page.get_by_test_id("kpis")).to_be_visible()
    return watched.page


def near(page: Page, selector: str) -> Any:
    """The box of an element."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box


def at_rest(page: Page, selector: str) -> Any:
    """The box of an element, once what comes above it has come."""
    box = None
    while (now := near(page, selector)) != box:
        box = now
        page.wait_for_timeout(200)
    return box


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_is_named_and_legible_in_both_themes(
    browser_page: Watched, server: RunningServer, job: Feeder, tab: str
) -> None:
    page = job_page(browser_page, server, job, f"?tab={tab}")
    expect(page.get_by_test_id(f"tab-{tab}")).to_have_attribute("aria-selected", "true")
    for theme in ("dark", "light"):
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        assert page.evaluate(AUDIT) == []
        assert page.evaluate(CONTRAST) == []
        page.keyboard.press("t")


def test_theme_toggle_changes_the_colours_and_is_remembered(browser_page: Watched) -> None:
    page = browser_page.page
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.get_by_test_id("theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_theme_follows_the_system_until_chosen(open_page: Open) -> None:
    watched = open_page(color_scheme="light")
    expect(watched.page.locator("html")).to_have_attribute("data-theme", "light")


def test_the_graph_works_by_keyboard_and_its_url_has_the_node(
    browser_page: Watched, server: RunningServer, job: Feeder
) -> None:
    page = job_page(browser_page, server, job, "?tab=graph")
    page.get_by_test_id("graph").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("group-panel")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 module expanded")).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("operator-panel")).to_be_visible()
    expect(page).to_have_url(re.compile(r"op=\d+"))
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("operator-panel")).to_be_hidden()


@pytest.mark.smoke
def test_deep_link_selects_the_operator(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    index = next(i for i, op in enumerate(job.document.ops) if op.name == "addmm_1")
    page = job_page(browser_page, server, job, f"?tab=graph&op={index}")
    panel = page.get_by_test_id("operator-panel")
    expect(panel).to_contain_text("aten.addmm.default")
    expect(panel).to_contain_text("tower.fc_1")
    expect(panel).to_contain_text("train.py:41")
    expect(panel).to_contain_text(re.compile(r"\d\s(µs|ms)"))


def test_click_on_a_slice_selects_its_operator(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job)
    page.wait_for_function("() => __penstock.paintedSlices() > 0")
    canvas = near(page, "[data-testid=timeline]")
    page.mouse.click(canvas["x"] + canvas["width"] * 0.5, canvas["y"] + 16)
    expect(page.get_by_test_id("operator-panel")).to_be_visible()


def test_time_between_two_points_is_measured(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job, "?tab=timeline")
    page.wait_for_function("() => __penstock.paintedSlices() > 0")
    canvas = page.get_by_test_id("timeline")
    box = at_rest(page, "[data-testid=timeline]")
    y = box["y"] + 30
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 400, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, y, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    measured = page.get_by_test_id("measured")
    expect(measured).to_have_text(re.compile(r"^[\d.]+\s(µs|ms) from [\d.]+\s(µs|ms)$"))
    by_hand = measured.inner_text()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("m")
    expect(measured).to_have_text(re.compile(r"^from .* to …$"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("m")
    expect(measured).to_have_text(re.compile(r"^[\d.]+\s(ns|µs|ms) from "))
    assert measured.inner_text() != by_hand


def test_table_twin_says_what_the_graph_shows(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job, "?tab=graph")
    expect(page.get_by_test_id("graph")).to_be_visible()
    page.keyboard.press("v")
    table = page.get_by_test_id("operator-table")
    expect(table.locator("tbody tr")).to_have_count(job.num_ops)
    page.get_by_label("Filter operators").fill("addmm tower.fc_2")
    expect(table.locator("tbody tr")).to_have_count(2)


def test_help_palette_and_tabs_by_keyboard(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job)
    page.keyboard.press("?")
    expect(page.get_by_test_id("help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("help")).to_be_hidden()
    page.keyboard.press("5")
    expect(page.get_by_test_id("tab-metrics")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Control+k")
    page.keyboard.type("gradient sync")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("tab-sync")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page.get_by_role("heading", name="Nodes")).to_be_visible()


def test_stop_asks_first_and_then_cancels(browser_page: Watched, server: RunningServer) -> None:
    spec = {"name": "waits", "entrypoint": ["true"], "trainers": {"count": 1}}
    job_id = server.call("POST", "/jobs", {"spec": spec})["id"]
    page = browser_page.page
    page.goto(f"{server.url}/jobs/{job_id}")
    page.get_by_test_id("stop").click()
    page.get_by_role("button", name="Keep running").click()
    assert server.call("GET", f"/jobs/{job_id}")["state"] == "QUEUED"
    page.get_by_test_id("stop").click()
    page.get_by_test_id("stop-confirm").click()
    expect(page.get_by_test_id("state").first).to_have_attribute("data-state", "CANCELLED")
    expect(page.get_by_test_id("announcer")).to_contain_text("cancelled")


def test_attached_job_has_no_stop_but_says_how(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job)
    expect(page.get_by_test_id("attached-note")).to_have_text("attached: stop the process itself")
    expect(page.get_by_test_id("stop")).to_have_count(0)


def test_events_name_their_subject(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job, "?tab=events")
    subjects = page.get_by_test_id("events").locator("tbody td:nth-child(2)")
    expect(subjects.filter(has_text="trainer 0").first).to_be_visible()
    assert {text.strip() for text in subjects.all_inner_texts()} <= {"job", "trainer 0"}


def test_a_narrow_window_needs_no_horizontal_scrolling(open_page: Open, server: RunningServer, job: Feeder) -> None:
    watched = open_page(viewport={"width": 390, "height": 800})
    expect(watched.page.get_by_test_id("job-row").first).to_be_visible()
    assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert watched.page.evaluate(BEYOND, ".card") == []
    page = job_page(watched, server, job)
    expect(page.get_by_test_id("graph")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate(BEYOND, ".panel") == []
    graph = near(page, "[data-testid=graph]")
    assert graph["width"] > 380
    page.wait_for_function("() => document.querySelector('[data-testid=graph]').clientHeight > 700")  # top to bottom
    page.get_by_test_id("sync-summary").scroll_into_view_if_needed()
    expect(page.get_by_test_id("sync-summary")).to_be_in_viewport()


def test_an_unknown_job_shows_an_error_and_keeps_the_connection(browser_page: Watched, server: RunningServer) -> None:
    browser_page.expected = ("404",)
    browser_page.page.goto(f"{server.url}/jobs/nonsense")
    expect(browser_page.page.get_by_role("alert")).to_contain_text("nonsense")
    browser_page.page.get_by_role("link", name="Go to jobs").click()
    expect(browser_page.page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    expect(browser_page.page.get_by_test_id("live")).to_contain_text("live")


def test_address_with_a_broken_percent_sign_is_no_page(browser_page: Watched, server: RunningServer) -> None:
    page = browser_page.page
    page.evaluate(
        "() => { history.pushState(null, '', '/jobs/%E0%A4%A'); dispatchEvent(new PopStateEvent('popstate')); }"
    )
    expect(page.get_by_test_id("empty")).to_contain_text("There is no such page")


def test_a_graph_that_is_refused_shows_it_and_can_be_reloaded(
    browser_page: Watched, server: RunningServer, job: Feeder
) -> None:
    # The page retries what failed by itself, which may come before the click; what is refused waits for the click.
    browser_page.expected = ("403",)
    page = browser_page.page
    page.route(GRAPHS, lambda route: route.fulfill(status=403, body="refused"))
    job_page(browser_page, server, job)
    expect(page.get_by_test_id("error")).to_contain_text("403")
    page.unroute(GRAPHS)
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_test_id("graph")).to_be_visible()
    expect(page.get_by_test_id("error")).to_have_count(0)


def test_retry_of_a_failed_graph_is_one_button_through_events(
    browser_page: Watched, server: RunningServer, job: Feeder
) -> None:
    browser_page.expected = ("500",)
    page = browser_page.page
    page.route(GRAPHS, lambda route: route.fulfill(status=500, body="broken"))
    job_page(browser_page, server, job)
    button = page.get_by_role("button", name="Try again").element_handle()
    assert button is not None
    for _ in range(3):
        with page.expect_response(GRAPHS):  # by itself, after a pause
            job.steps(2, sampled=True)
    with page.expect_response(GRAPHS):
        button.click()
    assert button.evaluate("(one) => one.isConnected")
    page.unroute(GRAPHS)
    expect(page.get_by_test_id("graph")).to_be_visible()
    expect(page.get_by_test_id("error")).to_have_count(0)


@pytest.mark.parametrize("width", [1440, 390])
def test_long_reason_in_the_header_can_be_opened(
    browser_page: Watched, server: RunningServer, job: Feeder, width: int
) -> None:
    page = browser_page.page
    page.set_viewport_size({"width": width, "height": 900})
    job_page(browser_page, server, job)
    job.close(error="ValueError: " + " ".join(f"reason{number}" for number in range(120)))
    reason = page.locator("#why-reason")
    hidden = "it => it.scrollHeight - it.clientHeight"
    show = page.get_by_role("button", name="Show all")
    expect(show).to_have_attribute("aria-expanded", "false")
    assert reason.evaluate(hidden) > 0
    show.click()
    expect(page.get_by_role("button", name="Show less")).to_be_visible()
    assert reason.evaluate(hidden) <= 0
    expect(reason).to_contain_text("reason119")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_page_without_events_asks_for_no_animation_frames(
    browser_page: Watched, server: RunningServer, job: Feeder
) -> None:
    page = job_page(browser_page, server, job)
    page.wait_for_function("() => __penstock.paintedSlices() > 0")
    page.evaluate(
        """() => {
          window.frames60 = 0;
          const ask = window.requestAnimationFrame.bind(window);
          window.requestAnimationFrame = (f) => { window.frames60 += 1; return ask(f); };
        }"""
    )
    # The lamps fade within a second; after a whole second without a frame nothing may be asked for any more.
    page.wait_for_function(
        """() => {
          const now = performance.now();
          if (window.frames60 !== window.lastCount) { window.lastCount = window.frames60; window.since = now; }
          return now - window.since > 1200;
        }""",
        polling=200,
    )
    before = page.evaluate("() => window.frames60")
    job.steps(1, sampled=False)
    page.wait_for_function("(n) => window.frames60 > n", arg=before, polling=100)


def test_page_obeys_its_content_security_policy(browser_page: Watched, server: RunningServer, job: Feeder) -> None:
    page = job_page(browser_page, server, job)
    page.evaluate(
        "() => { window.violations = []; addEventListener('securitypolicyviolation',"
        " (e) => window.violations.push(e.violatedDirective)); }"
    )
    for tab in TABS:
        page.get_by_test_id(f"tab-{tab}").click()
        expect(page.get_by_test_id(f"tab-{tab}")).to_have_attribute("aria-selected", "true")
    assert page.evaluate("() => window.violations") == []
