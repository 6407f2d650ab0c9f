"""The list of jobs and the header of a job: what runs or failed is found at once, and a cause leads to its evidence."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open, RunningServer, start_server, stop
from tests.e2e.feeder import TRACEBACK, Feeder, exchange
from tests.e2e.inspection import axe_source, complaints
from tests.support.disks import filled, small_disk

Feed = Callable[..., Feeder]


def test_failed_jobs_come_before_those_that_wait(open_page: Open, server: RunningServer, feed: Feed) -> None:
    running = feed("runs-now")
    running.steps(5, sampled=False)
    spec = {"mode": "local", "entrypoint": ["python", "-c", "pass"]}
    for index in range(3):
        server.call("POST", "/jobs", {"spec": {**spec, "name": f"queued-{index}"}})
    lost = server.call("POST", "/jobs", {"spec": {**spec, "name": "stopped"}})
    server.call("POST", f"/jobs/{lost['id']}:cancel")
    page = open_page("/").page
    rows = page.get_by_test_id("job-row")
    expect(rows.first).to_contain_text("runs-now")
    page.get_by_test_id("state-waiting").click()
    expect(rows).to_have_count(3)
    expect(rows.first.locator(".why-cell")).to_contain_text(re.compile("no node|node", re.IGNORECASE))
    page.get_by_test_id("job-search").fill("queued-1")
    expect(rows).to_have_count(1)
    assert "state=waiting" in page.url and "q=queued-1" in page.url
    page.reload()
    expect(rows).to_have_count(1)
    page.get_by_test_id("state-all").click()
    page.get_by_test_id("job-search").fill("")
    page.get_by_test_id("job-sort").select_option("name")
    expect(rows.first).to_contain_text("queued-0")


def test_a_failed_job_shows_who_failed_first_and_where(open_page: Open, feed: Feed) -> None:
    trainers = [feed("fails", index=index) for index in range(2)]
    for trainer in trainers:
        trainer.graph()
        trainer.steps(3, sampled=True)
    trainers[1].log(TRACEBACK)
    trainers[1].close(error="ValueError: no rows")
    trainers[0].close()
    page = open_page(f"/jobs/{trainers[0].job_id}").page
    card = page.get_by_test_id("crash")
    expect(card).to_contain_text("trainer 1 failed first")
    expect(card).to_contain_text("train.py:41 in main")
    expect(card.locator("summary")).to_have_text("1 frame in penstock")
    expect(page.get_by_test_id("crash-last")).to_contain_text(re.compile(r"last step 3 · last operator \w+"))
    card.get_by_role("link", name="Open the log there").click()
    expect(page.locator(".logline.is-at")).to_contain_text("Traceback")


def test_the_cause_of_a_slow_step_leads_to_its_evidence(open_page: Open, feed: Feed) -> None:
    trainers = [feed("slow", index=index) for index in range(2)]
    for trainer in trainers:
        trainer.graph()
        trainer.steps(40, sampled=True)
    for index in range(2):
        feed("slow", role="pserver", index=index)
    for calls in (20, 40):
        exchange(trainers, calls, 2)  # the second server is slow
    page = open_page(f"/jobs/{trainers[0].job_id}").page
    said = page.get_by_test_id("diagnosis").get_by_role("link")
    said.filter(has_text="waits for pserver-1").click()  # not the first, if the page took seconds: steps end
    expect(page.get_by_test_id("tab-sync")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_test_id("exchange-matrix")).to_have_attribute("data-metric", "wait")


def test_the_trainer_that_others_wait_for_is_named_by_step(open_page: Open, feed: Feed) -> None:
    trainers = [feed("ranks", index=index) for index in range(3)]
    for index, trainer in enumerate(trainers):
        trainer.graph()
        trainer.steps(60, sampled=True, between_ms=30 if index == 1 else 1)
    page = open_page(f"/jobs/{trainers[0].job_id}?tab=sync").page
    says = page.get_by_test_id("ranks-says")
    expect(says).to_contain_text(re.compile(r"Trainer 1 arrives \d\d\.\d\sms later than the others, between its steps"))
    expect(page.get_by_test_id("rank-1")).to_have_attribute(
        "aria-label", re.compile(r"trainer 1: .* later between its")
    )
    expect(page.get_by_test_id("rank-0")).to_have_attribute("aria-label", re.compile(r"trainer 0: own .*, waits"))
    page.get_by_test_id("rank-0").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_test_id("rank-1")).to_be_focused()
    expect(says).to_contain_text(re.compile(r"trainer 1, step 59: \d\d\.\d\sms later; operators"))
    expect(page.get_by_test_id("rank-1")).to_have_attribute("aria-valuetext", re.compile("trainer 1, step 59: "))
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("strip-text")).to_contain_text("replay of step 60")  # the only one that was sampled
    page.go_back()
    row = page.get_by_test_id("rank-1").bounding_box()
    assert row is not None
    page.mouse.move(row["x"] + row["width"] - 3, row["y"] + row["height"] / 2)
    expect(says).to_contain_text(re.compile(r"trainer 1, step 60: \d\d\.\d\sms later; operators"))
    page.mouse.click(row["x"] + row["width"] - 3, row["y"] + row["height"] / 2)
    expect(page.get_by_test_id("tab-timeline")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_test_id("strip-text")).to_contain_text("replay of step 60")


def drag(page: Page, chart: str) -> None:
    """Zoom into a part of a chart."""
    box = page.get_by_test_id(chart).bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    page.mouse.up()


def test_charts_of_two_trainers_share_a_scale_and_keep_zoom(open_page: Open, feed: Feed) -> None:
    trainers = [feed("two", index=index) for index in range(2)]
    for trainer in trainers:
        trainer.steps(60, sampled=False)
    page = open_page(f"/jobs/{trainers[0].job_id}?tab=metrics").page
    values = page.get_by_test_id("values-loss")
    expect(values.locator("b")).to_have_count(2)
    drag(page, "chart-loss")
    out = page.get_by_test_id("zoom-out")
    expect(out).to_be_visible()
    before = out.inner_text()
    expect(page.get_by_test_id("values-step_ms")).to_contain_text("step ")  # the crosshair is that of all charts
    trainers[0].steps(60, sampled=False)
    expect(page.get_by_test_id("kpi-step")).to_contain_text("120")
    assert out.inner_text() == before
    out.click()
    expect(out).to_have_count(0)


def test_a_brush_is_shared_by_charts_strip_timeline_and_logs(open_page: Open, feed: Feed) -> None:
    feeder = feed("brushed")
    feeder.graph()
    for turn in range(8):
        feeder.steps(10, sampled=True)
        feeder.log(f"turn {turn}\n")
    page = open_page(f"/jobs/{feeder.job_id}?tab=metrics").page
    expect(page.get_by_test_id("kpi-step")).to_contain_text("80")
    drag(page, "chart-loss")
    out = page.get_by_test_id("zoom-out")
    expect(out).to_contain_text("Steps")
    steps = re.search(r"step=(\d+)-(\d+)", page.url)
    assert steps is not None
    page.reload()
    expect(out).to_contain_text(f"Steps {steps[1]} – {steps[2]}")
    page.get_by_test_id("tab-timeline").click()
    expect(page.get_by_test_id("strip-text")).to_contain_text(re.compile(r"replay of steps \d+ to \d+"))
    page.get_by_test_id("timeline").hover(position={"x": 400, "y": 20})
    page.mouse.wheel(0, -400)
    page.wait_for_function("() => location.search.includes('span=')")
    page.get_by_test_id("tab-logs").click()
    expect(page.get_by_test_id("log-steps")).to_have_text(f"Steps {steps[1]} to {steps[2]} ✕")
    expect(page.get_by_test_id("log-count")).to_contain_text(" of 8 lines")
    page.get_by_label("Find in the log").fill("turn")
    page.wait_for_function("() => location.search.includes('find=turn')")
    page.get_by_test_id("log-steps").click()
    page.get_by_label("Find in the log").fill("")
    expect(page.get_by_test_id("log-count")).to_have_text("8 lines")


def test_charts_are_smoothed_and_compared_with_another_run(open_page: Open, feed: Feed) -> None:
    before, now = feed("curve-before"), feed("curve-now")
    for feeder in (before, now):
        feeder.steps(80, sampled=False)
    page = open_page(f"/jobs/{now.job_id}?tab=metrics").page
    values = page.get_by_test_id("values-loss")
    expect(values.locator("b")).to_have_count(1)
    other = page.get_by_test_id("compare").locator("option", has_text="curve-before")
    page.get_by_test_id("compare").select_option(value=other.get_attribute("value"))
    expect(values.locator("b")).to_have_count(2)
    expect(values).to_contain_text(re.compile("this job.*curve-before", re.DOTALL))
    page.get_by_test_id("smoothing").select_option("0.9")
    page.get_by_test_id("log-axis").click()
    assert "smooth=0.9" in page.url and "log=1" in page.url and before.job_id in page.url
    page.reload()  # the address has all of it
    expect(values.locator("b")).to_have_count(2)
    expect(page.get_by_test_id("log-axis")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_test_id("chart-loss").locator("canvas")).to_be_visible()
    page.get_by_role("button", name="Without curve-before").click()
    expect(values.locator("b")).to_have_count(1)


def test_charts_by_time_keep_their_own_zoom(open_page: Open, feed: Feed) -> None:
    feeder = feed("by-time")
    feeder.steps(60, sampled=False)
    page = open_page(f"/jobs/{feeder.job_id}?tab=metrics").page
    drag(page, "chart-loss")
    out = page.get_by_test_id("zoom-out")
    expect(out).to_contain_text("Steps")
    page.get_by_test_id("time-axis").click()
    expect(out).to_have_count(0)  # a range of steps is none of time
    assert "x=time" in page.url
    chart = page.get_by_test_id("chart-loss")
    expect(chart).to_have_attribute("aria-label", "loss over time")
    drag(page, "chart-loss")
    expect(out).to_have_text(re.compile(r"^[0-9.]+ s – [0-9.]+ s · show all$"))
    expect(page.get_by_test_id("values-step_ms")).to_contain_text(re.compile(r"after [0-9.]+ s"))
    page.reload()  # the address has the axis
    expect(page.get_by_test_id("time-axis")).to_have_attribute("aria-pressed", "true")


def test_a_page_that_lost_its_server_says_as_of_when(open_page: Open, tmp_path: Path, page_files: Path) -> None:
    running, process = start_server(tmp_path, page_files)
    try:
        watched = open_page("/", login=False)
        watched.expected = ("WebSocket", "ERR_CONNECTION_REFUSED", "Failed to load")
        page = watched.page
        page.goto(running.login_url())
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        process.send_signal(signal.SIGKILL)
        process.wait()
        expect(page.get_by_test_id("live")).to_contain_text(re.compile(r"offline · as of \d\d:\d\d:\d\d"))
        expect(page.get_by_test_id("app")).to_have_class(re.compile("offline"))
    finally:
        if process.poll() is None:
            stop(process)


def test_tabs_obey_arrow_keys_and_the_table_keeps_the_keyboard(open_page: Open, feed: Feed) -> None:
    feeder = feed("keys")
    feeder.graph()
    feeder.steps(5, sampled=True)
    page = open_page(f"/jobs/{feeder.job_id}?tab=graph").page
    page.get_by_test_id("tab-graph").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("tab-timeline")).to_be_focused()
    expect(page.get_by_test_id("tab-timeline")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowLeft")
    page.get_by_test_id("graph").focus()
    page.keyboard.press("v")
    expect(page.get_by_test_id("operator-table")).to_be_focused()
    page.keyboard.press("v")
    expect(page.get_by_test_id("graph")).to_be_focused()


def test_a_page_that_is_older_than_its_server_says_so(open_page: Open, tmp_path: Path, page_files: Path) -> None:
    files = shutil.copytree(page_files, tmp_path / "page")
    running, process = start_server(tmp_path / "state", files)
    try:
        watched = open_page("/", login=False)
        watched.expected = ("WebSocket", "ERR_CONNECTION_REFUSED", "Failed to load")
        page = watched.page
        page.goto(running.login_url())
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        url, answers = running.url, list[str]()
        page.on("response", lambda answer: answers.append(answer.url))
        for upgraded in (False, True):
            process.send_signal(signal.SIGKILL)
            process.wait()
            expect(page.get_by_test_id("app")).to_have_class(re.compile("offline"))
            if upgraded:
                _upgrade(files)
            running, process = start_server(tmp_path / "state", files, int(url.rsplit(":", 1)[1]))
            expect(page.get_by_test_id("app")).not_to_have_class(re.compile("offline"), timeout=60_000)
            while answers.count(f"{url}/") < 1 + upgraded:  # it asks once it is connected
                page.wait_for_timeout(50)
            expect(page.get_by_test_id("outdated")).to_have_count(int(upgraded))
        page.get_by_role("button", name="Reload").click()
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        expect(page.get_by_test_id("outdated")).to_have_count(0)
    finally:
        if process.poll() is None:
            stop(process)


def _upgrade(files: Path) -> None:
    """Give the script of the page another name, as the build of another version does."""
    index = files / "index.html"
    name = re.findall(r'src="/assets/(index-[^"]+\.js)"', index.read_text())[0]
    for ending in ("", ".gz"):
        (files / "assets" / f"{name}{ending}").rename(files / "assets" / f"index-newer.js{ending}")
    index.write_text(index.read_text().replace(name, "index-newer.js"))
    index.with_name("index.html.gz").unlink()


def test_a_full_disk_of_the_server_is_shown_on_every_view(open_page: Open, tmp_path: Path, page_files: Path) -> None:
    state = tmp_path / "state"
    with small_disk(state, "64m"):
        running, process = start_server(state, page_files)
        try:
            watched = open_page("/", login=False)
            watched.expected = ("WebSocket", "ERR_CONNECTION_REFUSED", "Failed to load")
            page = watched.page
            page.goto(running.login_url())
            expect(page.get_by_text("No jobs yet")).to_be_visible()
            banner = page.get_by_test_id("condition")
            expect(banner).to_have_count(0)
            with filled(state):
                expect(banner).to_contain_text(re.compile(r"disk is full since \d\d:\d\d:\d\d"))
                expect(banner).to_contain_text("Running jobs go on; agents keep logs")
                page.get_by_role("link", name="Nodes").click()
                expect(banner).to_contain_text("Free disk space on the server")
                page.evaluate(axe_source())
                for theme in ("dark", "light"):
                    assert [one for width in (1440, 390) for one in complaints(page, width, theme, [])] == []
            expect(banner).to_have_count(0, timeout=30_000)
        finally:
            stop(process)
