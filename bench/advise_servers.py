"""`bench advise --workload servers`: whether advice predicts other servers, trainers, modes and links.

CTR-DNN over 1 and 2 servers and 1 and 2 trainers, sync and async, at three places:

- on hosts joined by links of 100 Mbit/s and of 1 Gbit/s (`tools/hosts`). The hosts are emulated, and this machine has
  no core for each, so their trainers sleep instead of computing, on batches of `SMALL_BATCH` rows; what they exchange
  is real. For the model each has its own cores.
- all on one host, through shared memory: trainers compute, on one thread each, and share the cores.

`RECORDED` is recorded over 1 Gbit/s, and on one host: turns, waits, bytes, processor time of trainer and servers. From
that alone `penstock.advice.cluster.advise` predicts all settings over links, and all on one host; it has to estimate
the rate of the recorded link. All jobs are started once and run interleaved; a time is the median of turns.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.hosts.layout import INTERFACE, LINKS
from tools.hosts.namespaces import Namespaces

from bench.peers.cluster import Cluster as Processes
from bench.peers.cluster import Host
from bench.peers.race import ended_by_signals
from bench.peers.remote import Remote
from bench.report import Report, quartiles
from bench.workloads import Workload, build
from penstock.advice.cluster import Cluster, Placed, advise, current_of
from penstock.advice.exchanged import Exchanged, Mode, deviation_of

MODES: tuple[Mode, ...] = ("sync", "async")
SIZES = ((1, 1), (1, 2), (2, 1), (2, 2))
PLACES = ("100mbit", "1gbit", "one host")
RECORDED = Cluster(1, 1, "sync")
ONE_HOST = "one host"
FIRST_PORT, PORTS_EACH = 6170, 10
REST_S = 0.05
SMALL_BATCH = 100


@dataclass(slots=True)
class Job:
    """One job that has been started. `on_hosts`: over links, not on one host."""

    cluster: Cluster
    on_hosts: bool
    remote: Remote


@dataclass(slots=True)
class Cell:
    """A job at a place, and what was recorded of each turn."""

    job: Job
    place: str
    recordings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        return replace(self.job.cluster, link_gbit=LINKS[self.place].rate_mbit / 1e3 if self.place in LINKS else 0.0)

    def turn_ns(self) -> float:
        """Return the median turn of all trainers' rank 0."""
        return statistics.median(self._turns())

    def _turns(self) -> list[int]:
        return [ns for one in self.recordings for ns in one["turn_ns"]]

    def exchanged(self, rows: int, cores: int) -> Exchanged:
        """Return what the model gets of a job's telemetry."""
        cluster, found = self.cluster, self.recordings
        sums = [
            [sum(peer[at] for peer in one["exchanged"].values()) / len(one["turn_ns"]) for at in range(3)]
            for one in found
        ]
        sent, received, waited = (statistics.median(column) for column in zip(*sums, strict=True))
        by_server = [peer[0] + peer[1] for name, peer in found[0]["exchanged"].items() if name]
        return Exchanged(
            cluster.mode, cluster.num_pservers, cluster.num_trainers, rows, self.turn_ns(), waited, sent, received,
            max(by_server) * len(by_server) / sum(by_server), statistics.median(one["ahead_ns"] for one in found),
            statistics.median(one["trainer_cpu_ns"] for one in found),
            statistics.median(sum(one["server_cpu_ns"]) for one in found) / cluster.num_trainers, cores,
            1 if self.place == ONE_HOST else cluster.num_pservers + cluster.num_trainers, deviation_of(self._turns()),
        )  # fmt: skip


def places_of(text: str) -> list[str]:
    """Read `1gbit,one host`. Raises SystemExit for a place that is not known."""
    places = list(dict.fromkeys(text.split(",")))
    unknown = [place for place in places if place not in PLACES]
    if unknown:
        raise SystemExit(f"bench advise: --places has {', '.join(unknown)}; expected some of {', '.join(PLACES)}")
    return places


def measure(rounds: int, steps: int, report: Report, *, json: bool, places: Sequence[str] = PLACES) -> None:
    """Start all jobs, let them train, and add what was measured and predicted."""
    whole, small = (build("criteo", num_batches=20, rows=100_001, batch_size=rows) for rows in (1000, SMALL_BATCH))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, ended_by_signals(), ExitStack() as stack:
        network = stack.enter_context(Namespaces(max(servers + trainers for servers, trainers in SIZES)))
        kinds = list(dict.fromkeys(place in LINKS for place in places))
        jobs = stack.enter_context(_started(whole, small, kinds, Path(folder), network))
        report.figures["servers_load_before"] = round(os.getloadavg()[0], 2)
        cells = [cell for place in places for cell in _at(place, jobs, network, rounds, steps)]
    report.figures["servers_links_have_delays"] = int(network.has_delays)
    cores = len(os.sched_getaffinity(0))
    for recorded, rows in (("1gbit", SMALL_BATCH), (ONE_HOST, whole.batch_size)):
        mine = [cell for cell in cells if (cell.place in LINKS) == (recorded in LINKS)]
        if recorded in places:
            add_figures(report, recorded, mine, rows, cores, json=json)


@contextmanager
def _started(
    whole: Workload, small: Workload, kinds: Sequence[bool], folder: Path, network: Namespaces
) -> Iterator[list[Job]]:
    """Start every job, those of a size at the same time; end all of them on any way out. `kinds`: on hosts or not."""
    jobs, paths = list[Job](), (folder / "whole.npz", folder / "small.npz")
    for workload, path in zip((whole, small), paths, strict=True):
        workload.save(path)
    try:
        for servers, trainers in SIZES:
            before = len(jobs)
            for on_hosts, mode in itertools.product(kinds, MODES):
                made = Cluster(servers, trainers, mode, is_shared=not on_hosts)
                remote = _start(made, len(jobs), network if on_hosts else None, paths[on_hosts])
                jobs.append(Job(made, on_hosts, remote))
            for job in jobs[before:]:
                job.remote.wait_ready()
            print(f"bench advise: {servers} + {trainers} ready", file=sys.stderr)
        yield jobs
    except BaseException:  # Ctrl-C too: no job has to finish a turn
        for job in jobs:
            job.remote.kill()
        raise
    for job in jobs:
        job.remote.close()


def _start(cluster: Cluster, number: int, network: Namespaces | None, workload: Path) -> Remote:
    hosts = [
        Host((), f"127.0.0.{host + 1}") if network is None else Host(network.enter(host), network.address(host))
        for host in range(cluster.num_pservers + cluster.num_trainers)
    ]
    key = "recorded" if network is None else "recorded_pauses"
    processes = Processes(
        key=key, trainers=tuple(hosts[cluster.num_pservers :]), servers=tuple(hosts[: cluster.num_pservers]),
        sync=cluster.has_rounds, port=FIRST_PORT + PORTS_EACH * number, cores=tuple(sorted(os.sched_getaffinity(0))),
        interface="lo" if network is None else INTERFACE,
    )  # fmt: skip
    label = f"{key}_{number}"
    path = workload.parent / f"{label}.json"
    processes.save(path)
    return Remote(
        key, workload=workload, folder=workload.parent, cores=1, column="installed", label=label, cluster=path,
        enter=processes.trainers[0].enter,
    )  # fmt: skip


def _at(place: str, jobs: Sequence[Job], network: Namespaces, rounds: int, steps: int) -> list[Cell]:
    """Let the jobs of a place train interleaved; the order turns round after each round."""
    if place in LINKS:
        network.shape(LINKS[place])
    cells = [Cell(job, place) for job in jobs if job.on_hosts == (place in LINKS)]
    for cell in cells:
        cell.job.remote.run(steps)
    for index in range(rounds):
        for cell in cells[:: -1 if index % 2 else 1]:
            cell.job.remote.run(steps)
            cell.recordings.append(cell.job.remote.recordings[-1])
            time.sleep(REST_S)  # threads that spin park
    return cells


def add_figures(
    report: Report, recorded: str, cells: Sequence[Cell], rows: int, cores: int, *, json: bool
) -> None:  # fmt: skip
    """Predict every cell from that of `RECORDED` at the place `recorded`, and add errors and the advised setting's."""
    base = next(one for one in cells if one.place == recorded and same_size(one.cluster, RECORDED))
    current = current_of(run := base.exchanged(rows, cores))
    asked = [current if cell is base else cell.cluster for cell in cells]
    placed = {one.cluster: one for one in advise(run, current, asked)}
    pairs = [(cell, placed[one]) for cell, one in zip(cells, asked, strict=True)]
    name = f"servers_{recorded.replace(' ', '_')}"
    errors = [abs(one.samples_per_s / rate_of(cell, rows) - 1) for cell, one in pairs if cell is not base]
    low, middle, high = quartiles(errors)
    report.figures |= {
        f"{name}_settings": len(errors), f"{name}_error": round(middle, 4), f"{name}_error_q1": round(low, 4),
        f"{name}_error_q3": round(high, 4), f"{name}_error_most": round(max(errors), 4),
        f"{name}_link_gbit": round(current.link_gbit, 2),
    }  # fmt: skip
    for place in dict.fromkeys(cell.place for cell in cells):
        here = [(cell, one) for cell, one in pairs if cell.place == place]
        best = max(rate_of(cell, rows) for cell, _ in here)
        advised, _ = max(here, key=lambda pair: pair[1].samples_per_s)
        report.ratios[f"servers_{place.replace(' ', '_')}_advised_of_best"] = round(rate_of(advised, rows) / best, 4)
    if not json:
        print(_table(recorded, pairs, base, rows))


def same_size(one: Cluster, other: Cluster) -> bool:
    """Whether both have as many servers and trainers, and one mode."""
    return replace(one, link_gbit=0.0, is_shared=True) == replace(other, link_gbit=0.0, is_shared=True)


def rate_of(cell: Cell, rows: int) -> float:
    """Return samples/s of all trainers."""
    return cell.cluster.num_trainers * rows / cell.turn_ns() * 1e9


def _table(recorded: str, pairs: Sequence[tuple[Cell, Placed]], base: Cell, rows: int) -> str:
    lines = [f"from {recorded}: servers + trainers  predicted  measured samples/s  error   own, link, servers, last ms"]
    for cell, one in pairs:
        what, rate = cell.cluster, rate_of(cell, rows)
        parts = ", ".join(f"{ns / 1e6:.1f}" for ns in (one.own_ns, one.link_ns, one.server_ns, one.straggler_ns))
        lines.append(
            f"{cell.place:>8} {what.mode:<5} {what.num_pservers} + {what.num_trainers}  {one.samples_per_s:9.0f}"
            f"  {rate:8.0f}  {one.samples_per_s / rate - 1:+6.1%}  {parts}{' (recorded)' if cell is base else ''}"
        )
    return "\n".join(lines)
