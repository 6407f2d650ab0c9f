"""Logs: all processes by time, regular expressions, colours, a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.e2e.conftest import Open
from tests.e2e.feeder import Feeder

Feed = Callable[..., Feeder]


def two_that_talk(open_page: Open, feed: Feed) -> tuple[list[Feeder], Page]:
    """Open the logs of two trainers that write in turns, each line once the one before is on the page."""
    trainers = [feed("talk", index=index) for index in range(2)]
    page = open_page(f"/jobs/{trainers[0].job_id}?tab=logs").page
    lines = page.get_by_test_id("log-line")
    for turn in range(3):
        for index, trainer in enumerate(trainers):
            trainer.log(f"turn {turn} of rank {index}\n")
            expect(lines.filter(has_text=f"turn {turn} of rank {index}")).to_be_visible()
    return trainers, page


def test_lines_of_all_processes_stand_in_the_order_of_time(open_page: Open, feed: Feed) -> None:
    trainers, page = two_that_talk(open_page, feed)
    turns = [(turn, rank) for turn in range(3) for rank in range(2)]
    wanted = [re.compile(rf"\d\d:\d\d:\d\d\.\d\d\d\s*trainer-{r}\s*turn {t} of rank {r}") for t, r in turns]
    for seen in (page, open_page(f"/jobs/{trainers[0].job_id}?tab=logs").page):  # as it came, and from storage
        expect(seen.get_by_test_id("log-of")).to_have_value("all")
        expect(seen.get_by_test_id("log-line")).to_have_text(wanted)
    page.get_by_test_id("log-of").select_option(label="trainer-1 · attempt 1")
    expect(page.get_by_test_id("log-line")).to_have_text([re.compile(f"turn {t} of rank 1") for t in range(3)])


def test_an_expression_finds_lines_and_a_wrong_one_says_so(open_page: Open, feed: Feed) -> None:
    _, page = two_that_talk(open_page, feed)
    page.get_by_test_id("log-expression").click()
    page.get_by_label("Find in the log").fill(r"turn [02] .*1$")
    expect(page.get_by_test_id("log-line")).to_have_count(2)
    expect(page.locator("mark").first).to_have_text("turn 0 of rank 1")
    expect(page.get_by_test_id("log-count")).to_have_text("2 of 6 lines")
    page.get_by_label("Find in the log").fill("(turn")
    expect(page.get_by_test_id("log-count")).to_contain_text("Unterminated group")
    expect(page.get_by_test_id("log-line")).to_have_count(6)


def test_an_expression_without_end_is_stopped(open_page: Open, feed: Feed) -> None:
    trainers, page = two_that_talk(open_page, feed)
    trainers[0].log("a" * 60 + "!\n")
    page.get_by_test_id("log-expression").click()
    page.get_by_label("Find in the log").fill("(a+)+$")
    expect(page.get_by_role("alert")).to_have_text("the expression takes too long; make it simpler", timeout=30_000)
    page.get_by_label("Find in the log").fill("a+!")
    expect(page.get_by_test_id("log-count")).to_have_text("1 of 7 lines")


def test_colours_are_shown_and_the_file_has_none(open_page: Open, feed: Feed, tmp_path: Path) -> None:
    trainers, page = two_that_talk(open_page, feed)
    trainers[0].log("\x1b[31mno rows\x1b[0m in part 3\n")
    coloured = page.get_by_text("no rows", exact=True)
    expect(coloured).to_have_class("a-red")
    plain = page.get_by_text("in part 3").evaluate("e => getComputedStyle(e).color")
    assert coloured.evaluate("e => getComputedStyle(e).color") != plain
    with page.expect_download() as waiting:
        page.get_by_test_id("save").click()
    waiting.value.save_as(tmp_path / "all.log")
    text = (tmp_path / "all.log").read_text()
    assert waiting.value.suggested_filename == "talk-all.log"
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:.]+Z trainer-0 no rows in part 3$", text, re.MULTILINE), text
    assert text.count("\n") == 7
    page.get_by_test_id("log-of").select_option(label="trainer-0 · attempt 1")
    with page.expect_download() as waiting:
        page.get_by_test_id("save").click()
    waiting.value.save_as(tmp_path / "one.log")
    # of one process it is the log itself, as the server has it
    assert (tmp_path / "one.log").read_text().splitlines() == [
        *(f"turn {turn} of rank 0" for turn in range(3)), "\x1b[31mno rows\x1b[0m in part 3",
    ]  # fmt: skip
