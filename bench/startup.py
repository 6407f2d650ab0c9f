"""`bench startup`: from the start of a process to the end of its first training step.

Each round starts one process for each contender, the order turned round after each round; they share caches on disk
alone (Penstock's measurements of matrix kernels, inductor's kernels), which begin empty in a first round that is not
counted: `…_cold_cpu_s` has its totals. Contenders: Penstock; PyTorch eager, as a reference; torch.compile; the original
ParallelExecutor of paddlepaddle 2.6.2; and `import torch` alone, the floor.

Figures are seconds of processor time (`…_cpu_s`, all threads) and of the wall clock (`…_wall_s`), in all and for each
part. `…_beyond_torch_cpu_s` is Penstock's processor time without that of `import torch` alone in the same round. A
ratio is a peer's time over ours. Reading the workload is not counted. A process that waits for a worker of its own does
not count that worker's processor time: torch.compile compiles in the process itself.
"""

from __future__ import annotations

import argparse
import json as json_format
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import workloads
from bench.peers import PROJECT, ROOT, PeerMissing, environment
from bench.peers.remote import child_environment
from bench.report import Report, quartiles

ROUNDS = 5
LIMIT_S = 600.0
WORKLOADS = ("criteo", "lenet")
OURS, FLOOR = "penstock", "import_torch"
ENVIRONMENTS = {FLOOR: PROJECT, OURS: PROJECT, "torch_eager": PROJECT, "torch_compile": PROJECT, "paddle_pe": "paddle"}
CPU, WALL = 0, 1
Parts = dict[str, tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one (may be repeated)")
    parser.add_argument(
        "--peers",
        type=lambda text: [key for key in text.split(",") if key],
        help=f"only these, separated by commas: {', '.join(key for key in ENVIRONMENTS if key not in (OURS, FLOOR))}",
    )


def first_step(kind: str, path: Path, caches: Path) -> Parts:
    """Start one process; return what its parts took. Raises PeerMissing, and SystemExit with its last words."""
    command = [str(environment(ENVIRONMENTS[kind])), "-m", "bench.peers.first_step", kind, str(path)]
    env = child_environment(os.environ, "installed")
    env |= {"XDG_CACHE_HOME": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    done = subprocess.run(
        [*command, repr(time.monotonic())],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"bench startup: {kind} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    parts: Parts = json_format.loads(done.stdout.splitlines()[-1])
    return parts


def total(parts: Parts, clock: int) -> float:
    """Return the seconds of all parts, by processor time (`CPU`) or the wall clock (`WALL`), without `data`."""
    return sum(seconds[clock] for part, seconds in parts.items() if part != "data")


def race(kinds: list[str], path: Path, rounds: int, report: Report) -> dict[str, list[Parts]]:
    """Return the parts of each contender in each round, the uncounted first; what is missing is left out."""
    found: dict[str, list[Parts]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as caches:
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                if kind in report.missing:
                    continue
                try:
                    parts = first_step(kind, path, Path(caches))
                except PeerMissing as error:
                    report.missing[kind] = str(error)
                else:
                    found.setdefault(kind, []).append(parts)
    return {kind: found[kind] for kind in kinds if kind in found}


def add(report: Report, name: str, raced: dict[str, list[Parts]]) -> None:
    """Add what one workload's race has measured."""
    counted = {kind: rounds[1:] for kind, rounds in raced.items()}
    for kind, rounds in counted.items():
        for clock, unit in ((CPU, "cpu_s"), (WALL, "wall_s")):
            report.add(f"{name}_{kind}_{unit}", [total(parts, clock) for parts in rounds], digits=3)
        for part in rounds[0] if kind != FLOOR else ():
            report.add(f"{name}_{kind}_{part}_cpu_s", [parts[part][CPU] for parts in rounds], digits=3)
        report.figures[f"{name}_{kind}_cold_cpu_s"] = round(total(raced[kind][0], CPU), 3)
    pairs = zip(counted[OURS], counted[FLOOR], strict=True)
    report.add(f"{name}_beyond_torch_cpu_s", [total(ours, CPU) - total(floor, CPU) for ours, floor in pairs], digits=3)
    for kind, rounds in counted.items():
        for clock, suffix in ((CPU, ""), (WALL, "_wall")):
            ratios = [
                total(theirs, clock) / total(ours, clock) for theirs, ours in zip(rounds, counted[OURS], strict=True)
            ]
            if kind not in (OURS, FLOOR):
                report.ratios[f"{name}_{kind}{suffix}"] = round(quartiles(ratios)[1], 3)


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure every contender on each workload."""
    report = Report("startup", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    known = [key for key in ENVIRONMENTS if key not in (OURS, FLOOR)]
    unknown = [key for key in extra.peers or () if key not in known]
    if unknown:
        raise SystemExit(f"bench startup: --peers has {', '.join(unknown)}; expected {', '.join(known)}")
    peers = [key for key in known if extra.peers is None or key in extra.peers]
    for name in extra.workload or WORKLOADS:
        if not json:
            print(f"bench startup: {name}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            path = Path(folder) / "workload.npz"
            workloads.build(name, **({"num_batches": 1} if name == "criteo" else {})).save(path)
            add(report, name, race([FLOOR, OURS, *peers], path, rounds, report))
    return report
