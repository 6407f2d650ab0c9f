"""A real training job, end to end: REST submission, agent, engine, telemetry, and the page in a real Chromium.

The example trains on the real flights. Nothing is fed by the test: what the page shows is what the job did.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect
from tests.e2e.conftest import ROOT, Open, RunningServer, stop
from tests.support.waiting import until

from penstock.command.snapshot import pack
from penstock.protocol.frames import FLAG_IN_FULL, FLAG_WHOLE_STEP, Kind, decode
from penstock.protocol.graphdoc import GraphDocument
from penstock.protocol.graphstages import facts

EXAMPLE = ROOT / "examples" / "ctr_flights"
PICTURE = ROOT / "tests" / "artifacts" / "job-live.png"
README_PICTURE = ROOT / "docs" / "images" / "job-live.png"
FIRST_STEPS_S = 120  # the trainer imports torch and prepares the flights first


@pytest.fixture(scope="module")
def node(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real agent, joined with a one-time token."""
    folder = tmp_path_factory.mktemp("agent")
    token = server.call("POST", "/join-tokens")["token"]
    command = [sys.executable, "-m", "penstock.cli", "agent", "join", "--url", server.url,
               "--join-token", token, "--state-dir", str(folder / "state"), "--name", "node-1"]  # fmt: skip
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: any(n["state"] == "READY" for n in server.call("GET", "/nodes")["items"]), "a READY node", 60)
        yield
    finally:
        stop(process)


@pytest.fixture(scope="module")
def job(server: RunningServer, node: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example, submitted by REST as its job.yaml says; cancelled at the end."""
    archive = tmp_path_factory.mktemp("snapshot") / "snapshot.tar.gz"
    pack(EXAMPLE, archive)
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    spec |= {"workdir": None, "snapshot": upload(server, archive.read_bytes())}
    job_id = str(server.call("POST", "/jobs", {"spec": spec})["id"])
    yield job_id
    server.call("POST", f"/jobs/{job_id}:cancel")
    until(lambda: server.call("GET", f"/jobs/{job_id}")["state"] == "CANCELLED", "a cancelled job", 30)


def upload(server: RunningServer, archive: bytes) -> str:
    """Post a snapshot as the command line does; return its address."""
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/gzip"}
    request = urllib.request.Request(f"{server.url}/api/v1/snapshots", method="POST", data=archive, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.loads(answer.read())["sha256"])


def hook(page: Page, call: str) -> Any:
    """Read one of the page's test hooks."""
    return page.evaluate(f"() => window.__penstock.{call}")


def sync_count(page: Page) -> int:
    """Exchanges counted so far over all parameters."""
    return sum(row["count"] for row in hook(page, "syncRows()"))


@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_training_job_shows_itself_live(open_page: Open, server: RunningServer, job: str) -> None:
    page = open_page(f"/jobs/{job}").page
    expect(page.get_by_test_id("state").first).to_have_attribute("data-state", "RUNNING", timeout=60_000)
    page.evaluate("() => { window.__loadedOnce = true; }")

    # loss points arrive one after another on a page that is never loaded again
    page.wait_for_function("() => window.__penstock.lossPoints() >= 1", timeout=FIRST_STEPS_S * 1000)
    first = hook(page, "lossPoints()")
    page.wait_for_function("n => window.__penstock.lossPoints() >= n + 5", arg=first, timeout=60_000)

    # an operator is lit if and only if its events arrived, and the whole graph ran
    page.wait_for_function("() => window.__penstock.receivedOperators().length > 100", timeout=60_000)
    page.wait_for_function(
        "() => { const p = window.__penstock;"
        " return JSON.stringify(p.litOperators()) === JSON.stringify(p.receivedOperators()); }"
    )
    document = server.call("GET", f"/graphs/{hook(page, 'graphHash()')}")
    assert hook(page, "receivedOperators()") == list(range(len(document["ops"])))
    assert document["mode"] == "reduce" and document["num_replicas"] == 2

    # the exchange of gradients moves, for every parameter
    before = sync_count(page)
    page.wait_for_function("n => window.__penstock.syncRows().reduce((a, r) => a + r.count, 0) > n", arg=before)
    rows = hook(page, "syncRows()")
    assert {r["parameter"] for r in rows} == {s["parameter"] for s in document["syncs"]}
    assert all(r["timeNs"] > 0 for r in rows)

    assert hook(page, "paintedSlices()") > 100
    assert page.evaluate("() => window.__loadedOnce") is True

    page.wait_for_timeout(1500)  # a moment more of curves for the picture
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(PICTURE))
    if os.environ.get("PENSTOCK_README_PICTURE"):
        README_PICTURE.parent.mkdir(parents=True, exist_ok=True)
        README_PICTURE.write_bytes(PICTURE.read_bytes())
    assert PICTURE.stat().st_size > 50_000


@pytest.mark.timeout(300)
def test_graph_is_shown_before_and_after_a_pass(open_page: Open, server: RunningServer, job: str) -> None:
    page = open_page(f"/jobs/{job}?tab=graph").page
    page.wait_for_function("() => window.__penstock.receivedOperators().length > 100", timeout=FIRST_STEPS_S * 1000)
    document = GraphDocument.model_validate(server.call("GET", f"/graphs/{hook(page, 'graphHash()')}"))
    told = facts(document)
    page.get_by_test_id("passes").click()
    buttons = page.get_by_test_id("pass-strip").locator(".row").first.get_by_role("button")
    expect(buttons).to_have_count(len(told))
    at = [one.name for one in told].index("fuse_lookups")
    buttons.nth(at).click()
    panel = page.get_by_test_id("pass-panel")
    expect(panel).to_contain_text(f"fuse_lookups: {told[at].before} → {told[at].after} operators")
    expect(page.locator("section em").first).to_contain_text(f"{told[at].before} operators")
    page.screenshot(path=str(PICTURE.with_name("before-a-pass.png")))
    page.get_by_test_id("pass-after").click()
    expect(page.locator("section em").first).to_contain_text(f"{told[at].after} operators")
    page.get_by_test_id("graph-table-toggle").click()
    expect(page.get_by_test_id("stage-table")).to_contain_text("~ changed")
    page.get_by_test_id("passes").click()
    expect(page.get_by_test_id("operator-table")).to_be_visible()
    expect(page.locator("section em").first).to_contain_text(f"{len(document.ops)} operators")


@pytest.mark.timeout(300)
def test_running_jobs_log_and_sync_table_are_shown(open_page: Open, job: str) -> None:
    page = open_page(f"/jobs/{job}?tab=logs").page
    expect(page.get_by_test_id("log-line").filter(has_text="flights to train on").first).to_be_visible(
        timeout=FIRST_STEPS_S * 1000
    )
    page = open_page(f"/jobs/{job}?tab=sync").page
    expect(page.get_by_test_id("sync-row").filter(has_text="carrier.embedding").first).to_be_visible(timeout=60_000)


def recorded(server: RunningServer, job: str) -> dict[int, bool]:
    """The whole steps of the graph that ran most, in the recording, and whether each was recorded in full."""
    [stream] = {one["stream"] for one in server.call("GET", f"/jobs/{job}")["replicas"]}
    kinds = f"{Kind.OP_EVENTS.value},{Kind.GRAPH_USED.value}"
    found: dict[str, dict[int, bool]] = {}  # steps of a pass over test data have numbers of their own
    after = graph = ""
    while True:
        address = f"{server.url}/api/v1/jobs/{job}/frames?stream={stream}&kinds={kinds}{after}"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {server.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
        if not content:
            return max(found.values(), key=len)
        at = 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 4], "little")
            frame = decode(content[at + 4 : at + 4 + size])
            at += 4 + size
            after = f"&after_seq={frame.seq}"
            if frame.kind is Kind.GRAPH_USED and frame.body is not None:
                graph = frame.body["hash"]
            elif frame.flags & FLAG_WHOLE_STEP:
                found.setdefault(graph, {})[frame.step] = bool(frame.flags & FLAG_IN_FULL)


@pytest.mark.timeout(300)
def test_every_step_is_recorded_for_a_while_on_request(open_page: Open, server: RunningServer, job: str) -> None:
    page = open_page(f"/jobs/{job}?tab=timeline").page
    page.wait_for_function("() => window.__penstock.paintedSlices() > 100", timeout=FIRST_STEPS_S * 1000)
    page.get_by_test_id("record").click()
    expect(page.get_by_test_id("recorded")).to_contain_text("every step for 5 s")
    expect(page.get_by_test_id("timeline-summary")).to_contain_text("recorded in full", timeout=60_000)
    expect(page.get_by_test_id("strip-full")).to_have_attribute("d", re.compile("^M"))
    page.screenshot(path=str(PICTURE.with_name("recording-in-full.png")))
    expect(page.get_by_test_id("recorded")).to_contain_text("recorded in full; ", timeout=60_000)

    def sampled_again() -> bool:
        steps = recorded(server, job)
        newest = max((step for step, is_full in steps.items() if is_full), default=None)
        return newest is not None and max(steps) > newest

    until(sampled_again, "a sampled step after those in full", 60)
    full = sorted(step for step, is_full in recorded(server, job).items() if is_full)
    assert len(full) > 10
    assert len(full) > 0.9 * (full[-1] - full[0] + 1)  # a busy machine drops some, and counts them


@pytest.mark.timeout(300)
def test_a_job_is_run_anew_with_a_setting_of_the_advice(open_page: Open, server: RunningServer, job: str) -> None:
    page = open_page(f"/jobs/{job}").page
    page.wait_for_function("() => window.__penstock.receivedOperators().length > 100", timeout=FIRST_STEPS_S * 1000)
    page.get_by_test_id("tab-advice").click()
    current = page.get_by_test_id("advice-current")
    expect(current).to_contain_text("(now)")
    expect(current.get_by_test_id("run-it")).to_have_count(0)
    options = server.call("GET", f"/jobs/{job}/advice")["options"]
    now = next(one for one in options if one["current"])
    assert (now["cpu_num"], now["reduce_strategy"]) == (2, "Reduce")
    expect(page.get_by_test_id("advice-option")).to_have_count(len(options) - 1)
    whole = page.get_by_role("button", name="Run it: 1 thread, 1 replica")
    whole.click()
    page.wait_for_function("before => !location.pathname.endsWith(before)", arg=job)
    made = server.call("GET", f"/jobs/{page.url.rsplit('/', 1)[1]}")
    try:
        old = server.call("GET", f"/jobs/{job}")["spec"]
        assert made["spec"]["env"] == {**old["env"], "CPU_NUM": "1", "PENSTOCK_NUM_THREADS": "1"}
        assert made["spec"]["snapshot"] == old["snapshot"]
    finally:
        server.call("POST", f"/jobs/{made['id']}:cancel")


def test_picture_of_the_readme_is_there() -> None:
    assert Path(README_PICTURE).stat().st_size > 50_000, "make it: PENSTOCK_README_PICTURE=1 make test ARGS=tests/e2e"
