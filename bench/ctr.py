"""`bench ctr`: training a workload, Penstock against what a user would pick instead.

Every contender trains the same network from the same values on the same batches, in a process of its own; handing a
batch over and fetching the loss after every 50 steps are part of the time. Within a round each of them takes one turn;
the order turns round after each round, and none starts before the one before has gone quiet. A ratio is the median
over rounds of our rate over the peer's in the same round, so that a machine that slows down slows both.

Two columns: as installed, and with equal matrix kernels (keys that end in `_equal`), in which every contender, ours
included, runs with MKL's vendor check lifted, so that a kernel is not taken for an executor.
On request a third (`--column foreign` or `all`, keys that end in `_foreign`), in which the check fails, as on a
processor that MKL does not recognise. `matrix_roof` is the ceiling of the same run: the rate of the workload's main
matrix product on all cores, over the operations per sample.
`…_cpu_ms_per_step` is the processor time of all threads and processes of a contender: it says where a rate comes from,
and suffers least from a busy machine. A peer whose environment is missing is left out, unless it was asked for by name.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import workloads
from bench.peers import PeerMissing
from bench.peers.agreement import check_same_training
from bench.peers.contender import COLLECTIVE, CONTENDERS, OURS, PADDLE_MODES, ROOF
from bench.peers.kernels import Column
from bench.peers.race import Results, race
from bench.peers.remote import PeerFailed
from bench.report import Report
from bench.workloads import Workload
from penstock.exec.places import num_cores

ROUNDS = 7
STEPS = {
    "criteo": 50,
    "slots": 50,
    "bags": 20,
    "ragged_slots": 20,
    "din": 50,
    "flights": 50,
    "lenet": 100,
    "transformer": 25,
}
SUFFIX: dict[Column, str] = {"installed": "", "equal": "_equal", "foreign": "_foreign"}
COLUMNS: dict[str, list[Column]] = {"both": ["installed", "equal"], "all": list(SUFFIX)}
PEERS = [
    key for key, kind in CONTENDERS.items() if key not in (OURS, ROOF, COLLECTIVE) and not (kind.served or kind.hosts)
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--workload", choices=workloads.NAMES, default="criteo", help="what is trained (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"steps of one turn ({STEPS})")
    parser.add_argument("--peers", help=f"comma-separated: {', '.join([*PEERS, 'paddle_pe'])}; by default all")
    parser.add_argument("--column", choices=[*SUFFIX, *COLUMNS], default="both", help="(%(default)s)")


def chosen(peers: str | None, workload: str) -> list[str]:
    """Return the keys of the peers that were asked for, None: of all that train `workload`. Raises SystemExit.

    `paddle_pe` means both modes.
    """
    if peers is None:
        return [key for key in PEERS if CONTENDERS[key].trains(workload)]
    keys: list[str] = []
    for name in filter(None, peers.split(",")):
        keys += PADDLE_MODES if name == "paddle_pe" else [name]
    unknown = sorted(set(keys) - set(PEERS))
    if unknown:
        raise SystemExit(f"bench ctr: unknown peer {', '.join(unknown)}; expected {', '.join([*PEERS, 'paddle_pe'])}")
    if unable := [key for key in keys if not CONTENDERS[key].trains(workload)]:
        raise SystemExit(f"bench ctr: {', '.join(unable)} cannot train the workload {workload}")
    return list(dict.fromkeys(keys))


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Race in each column; raise SystemExit with the reason if a contender fails or has learned something else."""
    workload = workloads.build(extra.workload)
    columns = COLUMNS.get(extra.column) or [extra.column]
    report = Report("ctr", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    steps = extra.steps or STEPS[extra.workload]
    keys = [OURS, *chosen(extra.peers, extra.workload), ROOF]
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            kept = Path(folder) / "workload.npz"
            workload.save(kept)
            for column in columns:
                if not json:
                    print(f"bench ctr: {extra.workload}, column '{column}', {rounds} rounds", file=sys.stderr)
                results = race(
                    keys,
                    workload=kept,
                    cores=num_cores(),
                    column=column,
                    num_rounds=rounds,
                    num_steps=steps,
                    needed=() if extra.peers is None else keys,
                )
                add_column(report, workload, results, SUFFIX[column])
                defects = check_same_training(results, workload)
                report.defects.update({f"{text.split()[0]}{SUFFIX[column]}": text for text in defects})
    except (PeerMissing, PeerFailed) as error:
        if report.figures:
            print(f"{report.table()}\nbench ctr: these figures do not count", file=sys.stderr)
        raise SystemExit(f"bench ctr: {error}") from error
    report.figures["steps_per_round"] = steps
    report.figures["flops_per_sample"] = workload.flops_per_sample
    return report


def add_column(report: Report, workload: Workload, results: Results, suffix: str) -> None:
    """Add the figures and ratios of one column."""
    rates = {
        key: [results.num_steps * workload.batch_size / s for s in rounds] for key, rounds in results.seconds.items()
    }
    medians = {key: report.add(f"{key}_samples_per_s{suffix}", samples, digits=0) for key, samples in rates.items()}
    for key, losses in results.losses.items():
        if key != ROOF:
            cpu_ms = 1e3 * results.cpu_seconds[key] / (results.num_steps * report.rounds)
            report.figures[f"{key}_cpu_ms_per_step{suffix}"] = round(cpu_ms, 2)
            report.figures[f"{key}_last_loss{suffix}"] = round(losses[-1], 5)
    report.figures[f"matrix_roof_gflop_per_s{suffix}"] = round(medians[ROOF] * workload.flops_per_sample / 1e9, 1)
    shares = [a / b for a, b in zip(rates[OURS], rates[ROOF], strict=True)]
    report.add(f"share_of_matrix_roof{suffix}", shares)
    report.figures[f"busiest_idle_contender_share{suffix}"] = round(results.idle_share, 4)
    for key in rates:
        if key not in (OURS, ROOF):
            _add_ratio(report, rates[OURS], rates[key], f"{key}{suffix}")
    modes = [mode for mode in PADDLE_MODES if mode in rates]
    if len(modes) == len(PADDLE_MODES):
        better = max(modes, key=lambda mode: medians[mode])
        _add_ratio(report, rates[OURS], rates[better], f"paddle_pe{suffix}")
    report.missing.update(results.missing)


def _add_ratio(report: Report, ours: Sequence[float], theirs: Sequence[float], name: str) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    report.ratios[name] = round(report.add(f"ratio_{name}", ratios, digits=3), 3)


if __name__ == "__main__":
    sys.exit("run it as: python -m bench ctr")
