"""Views × states × dark, light × wide, narrow: no rule of accessibility is violated, text is legible, rows stay.

By default all views of a running job are looked at with all of axe-core's rules, dark in the wide window and light in
the narrow one, and those of jobs in other states without; the test that is marked `soak` has all rules everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, start_server, stop
from tests.e2e.feeder import TRACEBACK, Feeder, exchange
from tests.e2e.inspection import WIDTHS, Scheme, axe_source, complaints
from websockets.exceptions import ConnectionClosed

from penstock.protocol.frames import FIRST_READER, Work
from penstock.protocol.tables import TableSums

Feed = Callable[..., Feeder]
VIEWS = (
    "overview", "graph", "graph&view=table", "graph&pass=1", "graph&pass=1&side=after&view=table",
    "graph&colour=staleness", "timeline", "timeline&pin=trainer-1.0,trainer-0.r0", "sync", "metrics",
    "metrics&x=time", "advice", "logs", "events", "config",
)  # fmt: skip
PAGES = ("/", "/?state=failed&q=nothing", "/nodes", "/tokens", "/webhooks", "/no/such/page")
TABS = ("overview", "graph", "timeline", "sync", "metrics", "advice", "logs", "events", "config")
PARTS = 3  # of the views, each a test: all of them take minutes on a busy machine
SCHEMES: tuple[Scheme, ...] = ("dark", "light")
Problems = dict[str, list[str]]


def tables(rows: int) -> list[TableSums]:
    """Two tables of one server."""
    hot = tuple((7 * i, 900 // (i + 1)) for i in range(10))
    counts = {"pulled": 40 * rows, "absent": rows, "pushed": 30 * rows, "sampled": 3000, "missed": 2}
    names = ("carrier.embedding", "a.rather.deep.module.of.a.large.model.origin_destination_pairs.embedding")
    return [
        TableSums(name=name, width=8, capacity=100_000, rows=rows, held_bytes=96 * rows, hot=hot, **counts)
        for name in names
    ]


def fill(feed: Feed, name: str) -> list[Feeder]:
    """Attach two trainers and two parameter servers that have reported some of everything."""
    trainers = [feed(name, index=index) for index in range(2)]
    servers = [feed(name, role="pserver", index=index) for index in range(2)]
    for trainer in trainers:
        trainer.graph()
        trainer.steps(40, sampled=True)
        trainer.input([(Work.READ, FIRST_READER, -900, 40_000), (Work.WAIT, 0, -800, -10)], before_ns=1000)
        trainer.scalar("test_auc", 0.77)
        trainer.checkpoint(40, 1.25)
        trainer.log("loaded\nTraceback: none\n")
    exchange(trainers, 40, len(servers))
    for at, one in enumerate(servers):
        one.exchange(40, [f"trainer {i}" for i in range(2)], tables=tables(1000 + 2000 * at))
    return [*trainers, *servers]


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    return axe_source()


@pytest.fixture
def job(feed: Feed) -> str:
    """A running job."""
    return fill(feed, "accessible")[0].job_id


@pytest.fixture
def others(feed: Feed) -> dict[str, str]:
    """Jobs in other states: finished, failed with a traceback, and one that has reported nothing."""
    done = fill(feed, "finished")
    for one in done:
        one.close()
    broken = feed("broken")
    broken.graph()
    broken.steps(3, sampled=True)
    broken.log(TRACEBACK)
    broken.close(error="ValueError: no rows")
    return {"finished": done[0].job_id, "failed": broken.job_id, "empty": feed("empty").job_id}


def opened(page: Page, path: str, axe: str) -> None:
    """Open a view, and have axe-core there: the views follow the window without being loaded anew."""
    page.set_viewport_size({"width": WIDTHS[0], "height": 844})
    page.goto("/".join(page.url.split("/")[:3]) + path)
    expect(page.locator("main:not([aria-busy=true])").first).to_be_visible()
    page.evaluate(axe)


def everything(page: Page, *, whole: bool) -> list[str]:
    """Complaints of the view that is open. `whole`: each width in each scheme, not each width and each scheme once."""
    looks = list(itertools.product(WIDTHS, SCHEMES)) if whole else list(zip(WIDTHS, SCHEMES, strict=True))
    return [one for width, scheme in looks for one in complaints(page, width, scheme, [])]


def said(found: Problems) -> str:
    return "\n".join(f"{where}: {one}" for where, all_of in found.items() for one in all_of)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_view_violates_a_rule_of_accessibility(open_page: Open, job: str, axe: str, part: int) -> None:
    page = open_page("/", color_scheme="dark").page
    found: Problems = {}
    paths = [*PAGES, *(f"/jobs/{job}?tab={view}" for view in VIEWS)]
    for path in paths[part::PARTS]:
        opened(page, path, axe)
        if problems := everything(page, whole=False):
            found[path.replace(job, "JOB")] = problems
    assert not found, said(found)


def test_views_of_jobs_in_all_states_are_legible(open_page: Open, others: dict[str, str], axe: str) -> None:
    watched = open_page("/", color_scheme="dark")
    watched.expected = ("409",)  # no advice without a recorded step
    page = watched.page
    found: Problems = {}
    for state, of in others.items():
        opened(page, f"/jobs/{of}", axe)
        for tab in TABS:
            page.set_viewport_size({"width": WIDTHS[0], "height": 844})
            page.get_by_test_id(f"tab-{tab}").click()
            expect(page.locator("main:not([aria-busy=true])").first).to_be_visible()
            rules: list[str] | None = [] if tab == "overview" else None
            problems = [one for width in WIDTHS for one in complaints(page, width, "dark", rules)]
            if problems:
                found[f"{state} {tab}"] = problems
    assert not found, said(found)


@pytest.mark.soak
def test_all_states_of_all_views_obey_all_rules(open_page: Open, job: str, others: dict[str, str], axe: str) -> None:
    watched = open_page("/", color_scheme="dark")
    watched.expected = ("409",)
    page = watched.page
    found: Problems = {}
    for state, of in {"running": job, **others}.items():
        for view in VIEWS:
            opened(page, f"/jobs/{of}?tab={view}", axe)
            if problems := everything(page, whole=True):
                found[f"{state} {view}"] = problems
    assert not found, said(found)


def test_a_page_without_its_server_is_legible(open_page: Open, tmp_path: Path, page_files: Path, axe: str) -> None:
    running, process = start_server(tmp_path, page_files)
    with ExitStack() as ends:
        ends.callback(stop, process)

        def attach(name: str, **options: Any) -> Feeder:
            feeder = Feeder(running.url, running.token, name, **options)
            ends.callback(hang_up, feeder)
            return feeder

        job = fill(attach, "offline")[0].job_id
        watched = open_page("/", login=False, color_scheme="dark")
        watched.expected = ("WebSocket", "ERR_CONNECTION_REFUSED", "Failed to load")
        page = watched.page
        page.goto(running.login_url())
        page.wait_for_url(f"{running.url}/")
        opened(page, f"/jobs/{job}", axe)
        page.wait_for_function("() => window.__penstock.receivedOperators().length > 0")
        stop(process)
        expect(page.get_by_test_id("live")).to_contain_text("offline")
        found: Problems = {}
        for tab in TABS:
            page.set_viewport_size({"width": WIDTHS[0], "height": 844})
            page.get_by_test_id(f"tab-{tab}").click()
            if problems := everything(page, whole=False):
                found[tab] = problems
        assert not found, said(found)


def hang_up(feeder: Feeder) -> None:
    """Close a feeder, whose server may be gone."""
    with suppress(ConnectionClosed):
        feeder.close()


ORDERS = """() => {
  const head = (row) => (row.cells[0]?.textContent ?? "").replace(/[\\d.]+\\s(ms|µs|s) a step/, "");
  return [...document.querySelectorAll("tbody")].map((body) => [...body.rows].map(head).join(" / "));
}"""


@pytest.mark.parametrize("view", ["overview", "graph&view=table", "sync"])
def test_no_row_changes_its_place_within_a_second(open_page: Open, feed: Feed, view: str) -> None:
    trainers = fill(feed, "rows")
    page = open_page(f"/jobs/{trainers[0].job_id}?tab={view}").page
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length > 2")
    orders = []
    for i in range(5):
        for trainer in trainers[:2]:
            trainer.steps(10, sampled=True)
        exchange(trainers[:2], 50 + 10 * i, 2)
        trainers[2].exchange(50 + 10 * i, ["trainer 0", "trainer 1"], tables=tables(1500 - 100 * i))
        page.wait_for_timeout(250)
        orders.append(page.evaluate(ORDERS))
    moved = [(before, after) for before, after in itertools.pairwise(orders) if before != after]
    assert len(moved) <= 1, moved  # at most the sorting that is due every five seconds
