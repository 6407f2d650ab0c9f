"""`bench page`: the dashboard of a large live job, in a real Chromium with a real server.

A trainer of `--operators` operators (20,000) sends 100,000 operator runs a second and, once a second, a whole step of
`--slices` slices. A person's hand drags the graph about, collapsed and expanded, and the timeline; meanwhile the time
between animation frames and the tasks longer than 50 ms on the main thread are measured. `layout_ms` is the time in the
worker. `blank`: frames of the canvas without a box. `event_to_pixel`: from the end of the oldest event that a frame
shows (the trainer's clock when it sends) to the end of painting it.

`--soak-minutes 30` instead keeps the page open for that long, at light load (name `--operators 2000 --slices 5000`),
and reads its heap once a minute, after a collection of garbage.

Software rendering: a Chromium without a GPU draws on the processor, on which the server and the trainer run as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from bench.report import Report

ROUNDS = 3
ROOT = Path(__file__).resolve().parents[1]
SIZE = {"width": 1440, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
START_S = 60
DRAG_S = 4.0
SETTLE_MS = 1500
LAG_MS = 6000
MIN_COLOURS = 8  # a canvas with boxes on it has more; a blank one has one
WATCH = """() => {
  window.__tasks = []; window.__frames = [];
  new PerformanceObserver((list) => { for (const one of list.getEntries()) window.__tasks.push(one.duration); })
    .observe({ type: "longtask" });
  let last = performance.now();
  const tick = (now) => { window.__frames.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""
COLOURS = """(canvas) => {
  const context = canvas.getContext("2d");
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < pixels.length; i += 4 * 7) seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return seen.size;
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--operators", type=int, default=20_000)
    parser.add_argument("--slices", type=int, default=100_000)
    parser.add_argument("--soak-minutes", type=int, default=0)


def main(rounds: int, json_only: bool, options: argparse.Namespace) -> Report:
    """Measure `rounds` drags of each view."""
    report = Report("page", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    seconds = 60 + 60 * options.soak_minutes + rounds * 4 * (DRAG_S + 8)
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as (url, token):
        command = [sys.executable, "-m", "bench._page_feeder", "--url", url, "--operators", str(options.operators),
                   "--slices", str(options.slices), "--seconds", str(seconds)]  # fmt: skip
        feeder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert feeder.stdin is not None and feeder.stdout is not None
        try:
            feeder.stdin.write(token + "\n")
            feeder.stdin.flush()
            job_id = feeder.stdout.readline().strip()
            with _opened(url, token, job_id) as (page, opened_s):
                report.figures["open_to_layout_s"] = round(opened_s, 2)
                if options.soak_minutes:
                    _soak(report, page, options.soak_minutes)
                else:
                    _browse(report, page, rounds)
        finally:
            feeder.terminate()
            feeder.wait()
    return report


@contextlib.contextmanager
def _opened(url: str, token: str, job_id: str) -> Iterator[tuple[Page, float]]:
    """A page with the job's graph, and the seconds until that was laid out."""
    executable = os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.add_init_script(f"({WATCH})()")
        page.goto(f"{url}/login#code={_call(url, token, '/login-codes')['code']}")
        page.wait_for_url(f"{url}/")
        began = time.perf_counter()
        page.goto(f"{url}/jobs/{job_id}?tab=graph")
        _until(page, "window.__penstock.layoutMs() > 0 || window.__penstock.boxes() > 0")
        yield page, time.perf_counter() - began
        browser.close()


def _browse(report: Report, page: Page, rounds: int) -> None:
    page.wait_for_timeout(SETTLE_MS)
    report.add("opening_longest_task_ms", [_tasks(page)], digits=0)
    _dragged(report, "collapsed", page, "graph", rounds)
    _lagged(report, "collapsed", page)
    page.get_by_test_id("expand-all").click()
    _until(page, "window.__penstock.boxes() > 1000")
    page.wait_for_timeout(SETTLE_MS)
    report.add("expanding_longest_task_ms", [_tasks(page)], digits=0)
    report.add("layout_ms", [page.evaluate("window.__penstock.layoutMs()")], digits=0)
    report.figures["boxes"] = page.evaluate("window.__penstock.boxes()")
    _dragged(report, "expanded", page, "graph", rounds)
    _lagged(report, "expanded", page)
    for _ in range(12):  # until operators can be read
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(50)
    _dragged(report, "operators", page, "graph", rounds)
    page.get_by_test_id("tab-timeline").click()
    page.wait_for_timeout(SETTLE_MS)
    _dragged(report, "timeline", page, "timeline", rounds)


def _lagged(report: Report, name: str, page: Page) -> None:
    """Add how long events take to the screen while the page is not touched."""
    page.evaluate("window.__penstock.takePixelLags()")
    page.wait_for_timeout(LAG_MS)
    lags = page.evaluate("window.__penstock.takePixelLags()")
    report.figures[f"{name}_event_to_pixel_p95_ms"] = round(float(np.percentile(lags, 95)), 1)
    report.figures[f"{name}_event_to_pixel_median_ms"] = round(float(np.median(lags)), 1)


def _soak(report: Report, page: Page, minutes: int) -> None:
    """Add the heap after each third of the time, and how much a minute it grew over the last half."""
    session = page.context.new_cdp_session(page)
    heap_mb = []
    for _ in range(minutes):
        page.wait_for_timeout(60_000)
        session.send("HeapProfiler.collectGarbage")
        heap_mb.append(session.send("Runtime.getHeapUsage")["usedSize"] / 2**20)
    for part in (1, 2, 3):
        at = max(0, minutes * part // 3 - 1)
        report.figures[f"heap_after_{at + 1}_minutes_mb"] = round(heap_mb[at], 1)
    half = heap_mb[minutes // 2 :]
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
    report.figures["heap_growth_of_last_half_kb_per_minute"] = round(slope * 1024, 1)


def _dragged(report: Report, name: str, page: Page, canvas: str, rounds: int) -> None:
    """Drag a canvas about for some seconds, and add what the frames took."""
    box = page.get_by_test_id(canvas).bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    p95, tasks, blank = [], [], 0
    for _ in range(rounds):
        page.evaluate("() => { window.__frames = []; window.__tasks = []; }")
        page.mouse.move(x, y)
        page.mouse.down()
        until, step = time.monotonic() + DRAG_S, 0
        while time.monotonic() < until:
            step += 1
            page.mouse.move(x + 160 * np.sin(step / 9), y + 90 * np.sin(step / 13))
            page.wait_for_timeout(8)
        page.mouse.up()
        frames = page.evaluate("window.__frames")
        p95.append(float(np.percentile(frames, 95)))
        tasks.append(_tasks(page))
        blank += page.get_by_test_id(canvas).evaluate(COLOURS) < MIN_COLOURS
    report.add(f"{name}_frame_p95_ms", p95, digits=1)
    report.add(f"{name}_longest_task_ms", tasks, digits=0)
    report.figures[f"{name}_blank"] = blank


def _until(page: Page, condition: str) -> None:
    """Wait for a condition. Playwright's own way needs `eval` in the page, which its policy forbids."""
    until = time.monotonic() + START_S
    while not page.evaluate(condition):
        if time.monotonic() > until:
            raise RuntimeError(f"not within {START_S} s: {condition}")
        page.wait_for_timeout(50)


def _tasks(page: Page) -> float:
    return float(page.evaluate("Math.max(0, ...window.__tasks)"))


def _call(url: str, token: str, path: str) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/api/v1{path}", method="POST", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, str] = json.load(answer)
    return found


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[tuple[str, str]]:
    """A server of this run's own; yields its address and admin token."""
    command = [sys.executable, "-m", "penstock_server", "--port", "0", "--state-dir", str(folder),
               "--static-dir", str(ROOT / "web" / "dist")]  # fmt: skip
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while not (folder / "server.json").is_file():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.05)
        url = json.loads((folder / "server.json").read_text())["url"]
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=5):
                break
            time.sleep(0.05)
        yield url, (folder / "admin.token").read_text().strip()
    finally:
        process.terminate()
        process.wait()
