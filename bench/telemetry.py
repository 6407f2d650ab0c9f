"""`bench telemetry`: what monitoring costs: the server under events, browsers that stall, training that is watched.

* *Events*: one trainer sends 100,000 operator events a second for `--seconds` (300), while one browser reads all and
  20 never read. Reported are the server's share of one core, how its memory grows, and the accounts: rows produced
  = rows stored (read back by REST) + rows that a GAP counts, and the same for the browser that reads.
* *Watched*: CTR-DNN trains, attached to a server, with 0, 1 and 5 browsers that read all, interleaved. A ratio is the
  time of a block of steps over that of the block with 0 browsers in the same round: 1.01 is 1 % slower. Server and
  browsers run on the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from json import load
from pathlib import Path

import psutil

from bench._environment import variable_set
from bench.page import ROOT, running_server
from bench.report import Report
from bench.tracing import Training, add_pairs
from bench.workloads import criteo
from penstock.protocol.frames import Kind, decode, decode_header

ROUNDS = 20
STALLED = 20
WATCHERS = (0, 1, 5)
BLOCK_STEPS = 40
JOB = "watched"
PAGE_BYTES = 16 << 20
SETTLE_S = 3.0


class Child:
    """A process of this benchmark that answers lines."""

    def __init__(self, module: str, token: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"bench.{module}", *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.say(token)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def say(self, line: str) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> list[str]:
        """Return the words of its next line. RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended with {self._process.wait()}")
        return line.split()

    def ask(self, line: str) -> list[str]:
        """Write a line, and return the words of the answer."""
        self.say(line)
        return self.hear()


@contextmanager
def a_server() -> Iterator[tuple[str, str, psutil.Process]]:
    """Run a server of this run's own; yield its address, its administrator's token and its process."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, running_server(Path(folder)) as (url, token):
        found = [one for one in psutil.Process().children() if "penstock_server" in one.cmdline()]
        yield url, token, found[-1]


def measure_events(options: argparse.Namespace, report: Report) -> None:
    """Add what the server needs for the events, and where each row went."""
    with a_server() as (url, token, server), ExitStack() as opened:
        rate = ["--events-per-s", str(options.events_per_s), "--seconds", str(options.seconds)]
        feeder = opened.enter_context(Child("_telemetry_feeder", token, "--url", url, *rate))
        job, stream = feeder.hear()
        watchers = opened.enter_context(Child("_telemetry_watchers", token, "--url", url, "--job", job))
        assert watchers.ask("watch 1") == ["True"]
        watchers.ask(f"stall {STALLED}")
        before, rss, began = server.cpu_times(), server.memory_info().rss, time.monotonic()
        (produced,) = feeder.ask("go")
        seconds, after = time.monotonic() - began, server.cpu_times()
        spent = (after.user + after.system) - (before.user + before.system)
        report.figures["events_per_s"] = round(int(produced) / seconds)
        report.figures["server_share_of_a_core"] = round(spent / seconds, 3)
        report.figures["server_rss_growth_mb"] = round((server.memory_info().rss - rss) / 2**20, 1)
        time.sleep(SETTLE_S)
        stored, counted = recorded(url, token, job, stream)
        seen, missed = map(int, watchers.ask("counts"))
        report.figures |= {
            "rows_produced": int(produced), "rows_stored": stored, "rows_in_gaps": counted,
            "rows_unaccounted": int(produced) - stored - counted, "browser_rows": seen, "browser_rows_in_gaps": missed,
            "browser_rows_unaccounted": int(produced) - seen - missed,
        }  # fmt: skip
        feeder.say("end")


def recorded(url: str, token: str, job: str, stream: str) -> tuple[int, int]:
    """Return the rows of operator events that the server has, and those that its GAPs count."""
    rows = gaps = 0
    after = ""
    while True:
        kinds = f"{Kind.OP_EVENTS.value},{Kind.GAP.value}"
        path = f"/jobs/{job}/frames?stream={stream}&kinds={kinds}&limit_bytes={PAGE_BYTES}{after}"
        request = urllib.request.Request(f"{url}/api/v1{path}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = memoryview(answer.read())
        if not content:
            return rows, gaps
        while content:
            end = 4 + int.from_bytes(content[:4], "little")
            frame, content = content[4:end], content[end:]
            header = decode_header(frame)
            after = f"&after_seq={header.seq}"
            if header.kind is Kind.OP_EVENTS:
                rows += header.count
            else:
                gaps += int(decode(bytes(frame)).body.get("OP_EVENTS", 0))


def measure_watched(rounds: int, report: Report) -> None:
    """Add the ratios of training with browsers over training without."""
    with a_server() as (url, token, _), ExitStack() as opened:
        for name, value in (("PENSTOCK_URL", url), ("PENSTOCK_TOKEN", token), ("PENSTOCK_JOB_NAME", JOB)):
            opened.enter_context(variable_set(name, value))
        training = Training(criteo(num_batches=20))
        training.steps(BLOCK_STEPS)
        job = _job_of(url, token)
        watchers = opened.enter_context(Child("_telemetry_watchers", token, "--url", url, "--job", job))
        times: dict[int, list[float]] = {number: [] for number in WATCHERS}
        orders = itertools.cycle(list(itertools.permutations(WATCHERS)))
        for _ in range(rounds):
            for number in next(orders):
                assert watchers.ask(f"watch {number}") == ["True"]
                training.steps(BLOCK_STEPS // 4)  # what opening a page costs is none of it
                times[number].append(training.steps(BLOCK_STEPS))
        training.executor.close()
    report.add("step_ms", [1e3 * one / BLOCK_STEPS for one in times[0]])
    for number in WATCHERS[1:]:
        ratios = [one / none for one, none in zip(times[number], times[0], strict=True)]
        add_pairs(report, f"training_with_{number}_over_0_browsers", ratios)


def _job_of(url: str, token: str) -> str:
    request = urllib.request.Request(f"{url}/api/v1/jobs?name={JOB}", headers={"Authorization": f"Bearer {token}"})
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with urllib.request.urlopen(request, timeout=30) as answer:
            items = load(answer)["items"]
        if items:
            return str(items[0]["id"])
        time.sleep(0.2)
    raise RuntimeError("the training has not registered within 60 s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--events-per-s", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--parts", nargs="*", default=["events", "watched"], choices=["events", "watched"])


def main(rounds: int, json: bool, options: argparse.Namespace) -> Report:
    """Measure the events, then the watched training."""
    report = Report("telemetry", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    if "events" in options.parts:
        measure_events(options, report)
    if "watched" in options.parts:
        measure_watched(rounds, report)
    return report
