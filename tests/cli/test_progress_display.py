"""What a person sees while a job runs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.command.follow import StateLines
from penstock.command.output import describe, figures
from penstock.command.progress import Bar
from penstock.protocol.rest import Job


def job(state: str, **fields: Any) -> Job:
    base: dict[str, Any] = {
        "id": "j",
        "name": "ctr",
        "state": state,
        "progress": None,
        "eta_s": None,
        "latest": {},
        "why": "because",
    }
    return cast(Job, {**base, **fields})


RUNNING = job(
    "RUNNING",
    progress={"done": 30, "total": 120, "unit": "steps"},
    eta_s=61.0,
    latest={"loss": 0.51234, "samples_per_s": 45636.2},
)


def test_a_running_job_shows_progress_loss_rate_and_time_left() -> None:
    assert describe(RUNNING) == "ctr: RUNNING · 30/120 steps · loss 0.5123 · 45,636 samples/s · 1m01s left"


def test_a_job_without_figures_says_why_instead() -> None:
    assert describe(job("QUEUED", why="waits for 2 cpus")) == "ctr: QUEUED · waits for 2 cpus"


def test_a_failed_job_shows_its_logs_last_error_in_one_line() -> None:
    why = "trainer 0 exited with code 1\nTraceback (most recent call last):\n  line 5\nValueError: boom\n"
    assert describe(job("FAILED", why=why)) == "ctr: FAILED · trainer 0 exited with code 1: ValueError: boom"


def test_an_ended_job_has_no_time_left() -> None:
    assert figures({**RUNNING, "state": "SUCCEEDED"})[-1] == "45,636 samples/s"


def test_lines_are_printed_on_state_changes_not_on_each_poll() -> None:
    said: list[str] = []
    with StateLines(to=said.append) as lines:
        for state in ("QUEUED", "QUEUED", "RUNNING", "RUNNING", "SUCCEEDED"):
            lines.show(job(state))
    assert [line.split()[1] for line in said] == ["QUEUED", "RUNNING", "SUCCEEDED"]


def test_the_bar_shows_the_state_the_figures_and_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Bar() as bar:
        bar.show(RUNNING)
        bar.show({**RUNNING, "state": "FAILED", "why": "trainer 0 exited with code 1 [see its log]"})
    shown = capsys.readouterr().err
    assert "FAILED" in shown
    assert "45,636 samples/s" in shown
    assert "trainer 0 exited with code 1 [see its log]" in shown
