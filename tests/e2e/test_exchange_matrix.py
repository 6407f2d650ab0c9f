"""The matrix of trainers and parameter servers in a real Chromium, fed over the real protocol."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer
from tests.e2e.feeder import Feeder

Feed = Callable[..., Feeder]
PEERS = ["127.0.0.1:6170", "127.0.0.1:6171"]
expect.set_options(timeout=30_000)


def group(feed: Feed, name: str) -> list[Feeder]:
    """Two trainers that have exchanged with two pservers; pserver-1 is waited for longest."""
    trainers = [feed(name, index=i) for i in range(2)]
    for i in range(2):
        feed(name, role="pserver", index=i)
    for trainer in trainers:
        trainer.graph()
        trainer.exchange(10, PEERS, slow=1)
        trainer.exchange(30, PEERS, slow=1)
    return trainers


def shown(page: Page, server: RunningServer, job_id: str, query: str = "") -> Page:
    page.goto(f"{server.url}/jobs/{job_id}?tab=sync{query}")
    expect(page.get_by_test_id("exchange-matrix")).to_be_visible()
    return page


def test_cells_show_bytes_waits_and_staleness_and_move(open_page: Open, server: RunningServer, feed: Feed) -> None:
    trainers = group(feed, "matrix")
    page = shown(open_page().page, server, trainers[0].job_id)
    cells = page.get_by_test_id("exchange-cell")
    expect(cells).to_have_count(4)
    expect(cells.first).to_contain_text("B/s")
    page.get_by_role("button", name="Wait", exact=True).click()
    expect(page.locator("[data-cell='0,1']")).to_have_text("5.12 ms")
    expect(page.locator("[data-cell='0,0']")).not_to_have_text("5.12 ms")
    assert "metric=wait" in page.url
    page.get_by_role("button", name="Staleness", exact=True).click()
    expect(page.locator("[data-cell='1,1']")).to_have_text("2.00")
    for trainer in trainers:
        trainer.exchange(90, PEERS, slow=0)
    page.wait_for_function(
        "() => __penstock.exchangeCells().filter((one) => one.pserver === 0 && one.waitNs > 3e6).length === 2"
    )


def test_pointing_at_a_cell_tells_its_worst_blocks(open_page: Open, server: RunningServer, feed: Feed) -> None:
    page = shown(open_page().page, server, group(feed, "points")[0].job_id, "&metric=wait")
    facts = page.get_by_test_id("exchange-facts")
    expect(facts).to_contain_text("trainer-0 × pserver-1")  # the worst, until somebody points
    page.locator("[data-cell='1,0']").hover()
    expect(facts).to_contain_text("trainer-1 × pserver-0")
    expect(facts.locator("tr").first).to_contain_text("barriers")
    page.locator("[data-cell='0,0']").focus()
    expect(facts).to_contain_text("trainer-0 × pserver-0")


def test_blocks_stand_with_their_server(open_page: Open, server: RunningServer, feed: Feed) -> None:
    page = shown(open_page().page, server, group(feed, "blocks")[0].job_id)
    row = page.locator("[data-block='embedding_0.w_0.block0']")
    expect(row).to_contain_text("pserver-1")
    expect(row).to_contain_text("B/s")
    expect(page.get_by_test_id("block-row")).to_have_count(9)


def test_graph_shows_how_old_parameters_are(open_page: Open, server: RunningServer, feed: Feed) -> None:
    job = group(feed, "stale")[0].job_id
    page = open_page().page
    page.goto(f"{server.url}/jobs/{job}?tab=graph")
    page.get_by_test_id("tint").select_option("staleness")
    # Of the blocks of fc_0 the trainers' pushes are 1 and 2, and 2 and 0 updates behind; of fc_1 3 and 2 at most.
    expect(page.get_by_test_id("staleness-legend")).to_contain_text("2.50 updates by other trainers")
    ops = server.call("GET", f"/graphs/{page.evaluate('() => __penstock.graphHash()')}")["ops"]
    names = [op["name"] for op in ops]
    for name, said in (("addmm_0", "1.50 updates"), ("addmm_1", "2.50 updates"), ("relu_0", "not measured")):
        page.goto(f"{server.url}/jobs/{job}?tab=graph&colour=staleness&op={names.index(name)}")
        expect(page.get_by_test_id("operator-panel")).to_contain_text(f"staleness{said}")


def test_job_without_servers_has_no_colours_of_staleness(open_page: Open, server: RunningServer, feed: Feed) -> None:
    alone = feed("alone")
    alone.graph()
    page = open_page().page
    page.goto(f"{server.url}/jobs/{alone.job_id}?tab=graph")
    expect(page.get_by_test_id("tint").locator("option")).to_have_count(4)
    page.goto(f"{server.url}/jobs/{alone.job_id}?tab=graph&colour=staleness")
    expect(page.get_by_test_id("staleness-legend")).to_have_text("not measured: no server has counted a push yet")


def test_blocks_come_in_the_order_of_what_the_matrix_shows(open_page: Open, server: RunningServer, feed: Feed) -> None:
    page = shown(open_page().page, server, group(feed, "order")[0].job_id, "&metric=staleness")
    first = page.get_by_test_id("block-row").first
    expect(first).not_to_have_attribute("data-block", "")
    page.get_by_role("button", name="Wait", exact=True).click()
    expect(first).to_have_attribute("data-block", "")  # barriers, which are never stale
    expect(first).to_have_attribute("data-pserver", "1")


def test_finished_job_shows_the_whole_run(open_page: Open, server: RunningServer, feed: Feed) -> None:
    feeders = [feed("over"), feed("over", role="pserver", index=0)]
    feeders[0].exchange(30, PEERS, slow=0)
    for feeder in feeders:
        feeder.close()
    page = shown(open_page().page, server, feeders[0].job_id, "&metric=wait")
    expect(page.get_by_test_id("state").first).to_have_attribute("data-state", "SUCCEEDED")
    expect(page.get_by_text("mean of the whole run")).to_be_visible()
    expect(page.locator("[data-cell='0,0']")).to_contain_text("4.84 ms")


def test_narrow_page_does_not_scroll_sideways(open_page: Open, server: RunningServer, feed: Feed) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}
    page = shown(open_page(**options).page, server, group(feed, "narrow")[0].job_id)
    expect(page.get_by_test_id("exchange-facts")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_job_without_exchange_says_so(open_page: Open, server: RunningServer, feed: Feed) -> None:
    feeder = feed("quiet")
    feed("quiet", role="pserver", index=0)
    page = open_page().page
    page.goto(f"{server.url}/jobs/{feeder.job_id}?tab=sync")
    expect(page.get_by_test_id("empty")).to_contain_text("Nothing has been exchanged yet")
