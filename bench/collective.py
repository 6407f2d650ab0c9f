"""`bench collective`: trainers of one host that exchange gradients, against DistributedDataParallel on Gloo.

First an all-reduce of two processes, one thread each, from the later one's call until the later one holds the sum:
Penstock's ring through shared memory, and Gloo over loopback, by turns. Then training: a trainer a core on an equal
share of each batch, ours and DDP's, in the race of `bench ctr` (its rules about fairness and equal learning hold here),
and the share of our step in which only exchanges were under way, from the engine's trace.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import workloads
from bench._environment import variable_set
from bench._exposed import measured
from bench._gloo import GlooPair
from bench._ring import RingPair
from bench.ctr import STEPS
from bench.engine import alternating_blocks
from bench.peers import PeerMissing
from bench.peers.contender import COLLECTIVE
from bench.peers.race import race
from bench.peers.remote import PeerFailed
from bench.report import Report
from penstock.distributed.ports import free_ports
from penstock.exec.places import num_cores

ROUNDS = 7
MIB = 1 << 20
REPEATS = 5
AT_LEAST_MIB = 64  # of all repeats of a turn: few of a small size would measure how a core wakes up
DDP = "torch_ddp_gloo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8, 32], help="MiB of an all-reduce (%(default)s)")
    parser.add_argument("--workloads", nargs="*", default=["criteo", "transformer"], help="(%(default)s)")
    parser.add_argument("--steps", type=int, help=f"steps of one turn ({STEPS})")


def _median_s(pair: GlooPair, size: int, all_s: list[float]) -> float:
    seconds = pair.all_reduce(size * MIB, max(REPEATS, AT_LEAST_MIB // size))
    all_s += seconds
    return statistics.median(seconds)


def measure_sizes(sizes: list[int], rounds: int, report: Report) -> None:
    """Add the times of each size and the ratios to Gloo's."""
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    with variable_set("PENSTOCK_BENCH_ENDPOINTS", endpoints), RingPair() as ring, GlooPair() as gloo:
        for size in sizes:
            pairs: dict[str, GlooPair] = {"ring": ring, "gloo": gloo}
            every: dict[str, list[float]] = {name: [] for name in pairs}
            blocks: dict[str, Callable[[], float]] = {
                name: partial(_median_s, of, size, every[name]) for name, of in pairs.items()
            }
            samples = alternating_blocks(blocks, rounds)
            for name, seconds in samples.items():
                report.add(f"{name}_{size}mb_ms", [1e3 * s for s in seconds])
            fastest = {
                name: min(all_s) for name, all_s in every.items()
            }  # what other work on the machine disturbs least
            report.figures[f"gloo_ratio_{size}mb_fastest"] = round(fastest["gloo"] / fastest["ring"], 2)
            ratios = [g / r for g, r in zip(samples["gloo"], samples["ring"], strict=True)]
            report.ratios[f"gloo_{size}mb"] = round(report.add(f"gloo_ratio_{size}mb", ratios, digits=2), 2)


def measure_training(name: str, steps: int, rounds: int, report: Report) -> None:
    """Add step times of a workload and the ratio to DDP's. Raises SystemExit if a contender fails."""
    workload = workloads.build(name)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        kept = Path(folder) / "workload.npz"
        workload.save(kept)
        keys = [COLLECTIVE, DDP]
        try:
            results = race(
                keys, workload=kept, cores=num_cores(), column="installed", num_rounds=rounds, num_steps=steps,
                needed=keys,
            )  # fmt: skip
        except (PeerMissing, PeerFailed) as error:
            raise SystemExit(f"bench collective: {error}") from error
        shares = measured(kept, num_cores(), steps, Path(folder))
    report.add(f"exposed_share_{name}", shares, digits=3)
    for key in keys:
        report.add(f"{key}_{name}_ms_per_step", [1e3 * s / steps for s in results.seconds[key]])
    ratios = [d / c for d, c in zip(results.seconds[DDP], results.seconds[COLLECTIVE], strict=True)]
    report.ratios[f"ddp_{name}"] = round(report.add(f"ddp_ratio_{name}", ratios, digits=3), 3)


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure each size, then each workload."""
    report = Report("collective", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    if extra.sizes:
        measure_sizes(extra.sizes, rounds, report)
    for name in extra.workloads:
        measure_training(name, extra.steps or STEPS[name], rounds, report)
    return report
