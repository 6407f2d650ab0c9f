"""`bench pserver`: training with a parameter server on one host, against the local job and other parameter servers.

The workload is the Criteo-shaped CTR-DNN of `bench ctr`. `penstock` is the local job: one process, a replica a core.
`penstock_ps` is one server and one trainer with as many replicas, sync; `penstock_ps_async` the same without rounds;
`penstock_ps_log` and `penstock_ps_async_log` have a server that keeps its state (snapshots, write-ahead log), as those
of submitted jobs do; `penstock_ps_two` is one server and two trainers of one replica and half a batch each. Every
process may use all cores, so what the server takes, the trainer lacks. Peers train the same network from the same
values on the same batches, with one server and one trainer each; the server of paddle makes its table by itself, so
what that learns is not compared.

Contenders take turns as in `bench ctr`. `of_local_…` is our rate with servers over the local job's; `ratio_…` is the
rate of the better of our two pairs, sync and async, over the peer's.

`--hosts`: several servers and trainers, each on an emulated host (`bench/hosts/grid.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from bench import workloads
from bench.hosts import grid as hosts
from bench.peers import PeerMissing
from bench.peers.agreement import check_same_training
from bench.peers.contender import CONTENDERS, OURS
from bench.peers.race import Results, race
from bench.peers.remote import PeerFailed
from bench.report import Report
from penstock.exec.places import num_cores

ROUNDS = 7
STEPS = 50
SERVED = [key for key, kind in CONTENDERS.items() if kind.served and key.startswith("penstock")]
PEERS = [key for key, kind in CONTENDERS.items() if kind.served and key not in SERVED]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of one turn (%(default)s)")
    parser.add_argument("--peers", help=f"comma-separated: {', '.join(PEERS)}; by default all, '' for none")
    hosts.add_arguments(parser)


def chosen(peers: str | None) -> list[str]:
    """Return the keys of the peers that were asked for. Raises SystemExit."""
    keys = PEERS if peers is None else list(dict.fromkeys(filter(None, peers.split(","))))
    unknown = sorted(set(keys) - set(PEERS))
    if unknown:
        raise SystemExit(f"bench pserver: unknown peer {', '.join(unknown)}; expected {', '.join(PEERS)}")
    return keys


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Race; raise SystemExit with the reason if a contender fails or has learned something else."""
    if extra.hosts:
        return hosts.main(rounds, json, extra)
    workload = workloads.build("criteo")
    report = Report("pserver", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    keys = [OURS, *SERVED, *chosen(extra.peers)]
    if not json:
        print(f"bench pserver: {', '.join(keys)}; {rounds} rounds of {extra.steps} steps", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            kept = Path(folder) / "workload.npz"
            workload.save(kept)
            results = race(
                keys,
                workload=kept,
                cores=num_cores(),
                column="installed",
                num_rounds=rounds,
                num_steps=extra.steps,
                needed=() if extra.peers is None else keys,
            )
            add_figures(report, results, workload.batch_size)
            defects = check_same_training(results, workload)
    except (PeerMissing, PeerFailed) as error:
        if report.figures:
            print(f"{report.table()}\nbench pserver: these figures do not count", file=sys.stderr)
        raise SystemExit(f"bench pserver: {error}") from error
    report.defects.update({text.split()[0]: text for text in defects})
    report.figures["steps_per_round"] = extra.steps
    return report


def add_figures(report: Report, results: Results, batch_size: int) -> None:
    """Add rates, processor time and ratios."""
    rates = {key: [results.num_steps * batch_size / s for s in rounds] for key, rounds in results.seconds.items()}
    for key, samples in rates.items():
        report.add(f"{key}_samples_per_s", samples, digits=0)
        report.figures[f"{key}_last_loss"] = round(results.losses[key][-1], 5)
        cpu_ms = 1e3 * results.cpu_seconds[key] / (results.num_steps * report.rounds)
        report.figures[f"{key}_cpu_ms_per_step"] = round(cpu_ms, 2)
    report.figures["busiest_idle_contender_share"] = round(results.idle_share, 4)
    for key in SERVED:
        shares = [a / b for a, b in zip(rates[key], rates[OURS], strict=True)]
        report.ratios[f"of_local_{key}"] = round(report.add(f"of_local_{key}", shares, digits=3), 3)
    pairs = [max(both) for both in zip(rates["penstock_ps"], rates["penstock_ps_async"], strict=True)]
    for key in rates:
        if key not in (OURS, *SERVED):
            ratios = [a / b for a, b in zip(pairs, rates[key], strict=True)]
            report.ratios[key] = round(report.add(f"ratio_{key}", ratios, digits=3), 3)
    report.missing.update(results.missing)


if __name__ == "__main__":
    sys.exit("run it as: python -m bench pserver")
