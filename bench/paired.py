"""`bench paired`: this checkout against another one of the project, before and after a change.

The other checkout (`--against`, a git worktree with an environment of its own: `make setup` in it) runs the same
contenders with its own sources. Both sides of a contender race as in `bench ctr`, interleaved, the order turned round
after each round. Each start makes new processes, because how memory happens to lie belongs to a process, and the sides
take turns in being started first. The costs of `bench engine` are measured by whole runs of it in either checkout, by
turns.

A ratio is ours over the other's for rates and the other's over ours for times, in the same round: below 1 is a loss.
"""

from __future__ import annotations

import argparse
import json as json_format
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import workloads
from bench.ctr import STEPS
from bench.peers import ROOT
from bench.peers.contender import CONTENDERS
from bench.peers.race import Results, alternate, check_losses, ended_by_signals
from bench.peers.remote import PeerFailed, Remote
from bench.report import Report
from penstock.exec.places import num_cores

ROUNDS = 9
ENGINE = "engine"
ENGINE_TIMES = (
    "program_us_per_operator",
    "engine_1_thread_us_per_operator",
    "engine_2_threads_us_per_operator",
    "cross_thread_edge_us",
    "wide_operator_us",
)
RACED = [key for key, kind in CONTENDERS.items() if key.startswith("penstock") and not kind.hosts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--against", type=Path, required=True, help="the other checkout, with its .venv")
    parser.add_argument("--contenders", nargs="*", default=[ENGINE, *RACED], choices=[ENGINE, *RACED])
    parser.add_argument("--workload", choices=workloads.NAMES, default="criteo", help="what is trained (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"steps of one turn ({STEPS})")
    parser.add_argument("--starts", type=int, default=2, help="how often both sides are started (%(default)s)")


def race_of_two(key: str, kept: Path, against: Path, rounds: int, steps: int, *, other_first: bool) -> Results:
    """Race a contender of both checkouts, started in this order; results under "ours", "other". Raises PeerFailed."""
    sides: list[tuple[str, Path | None]] = [("ours", None), ("other", against)]
    results = Results(steps)
    with tempfile.TemporaryDirectory(prefix="penstock-race-") as folder, ended_by_signals():
        remotes: list[Remote] = []
        try:
            for label, checkout in sides[::-1] if other_first else sides:
                one = Remote(
                    key,
                    workload=kept,
                    folder=Path(folder),
                    cores=num_cores(),
                    column="installed",
                    checkout=checkout,
                    label=label,
                )
                remotes.append(one)
                one.wait_ready()
            alternate(remotes, results, num_rounds=rounds)
            for one in remotes:
                one.check()
                results.losses[one.key] = one.losses
        except BaseException:
            for one in remotes:
                one.kill()
            raise
        for one in remotes:
            one.close()
    return results


def engine_times(checkout: Path, python: Path) -> dict[str, float]:
    """Return the costs that `bench engine` measures in a checkout, in microseconds. Raises SystemExit."""
    command = [str(python), "-m", "bench", ENGINE, "--rounds", "1", "--json"]
    done = subprocess.run(command, check=False, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench paired: bench engine failed in {checkout}:\n{done.stderr[-2000:]}")
    figures = json_format.loads(done.stdout.splitlines()[-1])["figures"]
    return {name: figures[name] for name in ENGINE_TIMES if name in figures}


def add_ratios_of_times(report: Report, ours: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """Add the ratio of each time, the other's over ours, over the rounds in which both sides have it.

    Without free cores no edge between threads is crossed, and a round has no time for it.
    """
    for name in ENGINE_TIMES:
        pairs = [b[name] / a[name] for a, b in zip(ours, other, strict=True) if name in a and name in b]
        if pairs:
            report.ratios[name] = round(report.add(f"ratio_{name}", pairs, digits=3), 3)
        else:
            report.missing[name] = "measured in no round on both sides: were cores free?"


def measure_engine(report: Report, against: Path, rounds: int) -> None:
    """Add the ratio of each of the engine's costs, the other's over ours."""
    sides = {"ours": (ROOT, Path(sys.executable)), "other": (against, against / ".venv/bin/python")}
    times: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for index in range(rounds):
        for side in list(sides) if index % 2 == 0 else list(sides)[::-1]:
            times[side].append(engine_times(*sides[side]))
    add_ratios_of_times(report, times["ours"], times["other"])


def measure_race(report: Report, key: str, kept: Path, band: float, given: argparse.Namespace) -> None:
    """Add a contender's ratio of rates and of processor times. Raises SystemExit if a side fails or learns another."""
    rates: list[float] = []
    step_ms: list[float] = []
    cpu: list[float] = []
    for start in range(given.starts):
        try:
            results = race_of_two(
                key, kept, given.against.resolve(), given.rounds, given.steps, other_first=start % 2 == 1
            )
            check_losses(results.losses, band)
        except PeerFailed as error:
            raise SystemExit(f"bench paired: {error}") from error
        ours, other = results.seconds["ours"], results.seconds["other"]
        rates += [b / a for a, b in zip(ours, other, strict=True)]
        cpu.append(results.cpu_seconds["other"] / results.cpu_seconds["ours"])
        step_ms += [1e3 * seconds / given.steps for seconds in ours]
    report.add(f"{key}_ms_per_step", step_ms, digits=3)
    report.ratios[key] = round(report.add(f"ratio_{key}", rates, digits=3), 3)
    report.ratios[f"{key}_cpu"] = round(report.add(f"ratio_{key}_cpu", cpu, digits=3), 3)


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure each contender in both checkouts. Raises SystemExit with the reason if one fails."""
    if not (extra.against / ".venv/bin/python").exists():
        raise SystemExit(f"bench paired: {extra.against} has no .venv; run 'make setup' in it")
    report = Report("paired", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)
    extra.steps = extra.steps or STEPS[extra.workload]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        kept = Path(folder) / "workload.npz"
        workload = workloads.build(extra.workload)
        workload.save(kept)
        for key in extra.contenders:
            if not json:
                print(f"bench paired: {key}", file=sys.stderr)
            if key == ENGINE:
                measure_engine(report, extra.against.resolve(), rounds)
            else:
                measure_race(report, key, kept, workload.loss_band, extra)
    return report
