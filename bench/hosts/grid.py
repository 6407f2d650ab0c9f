"""`bench pserver --hosts`: servers and trainers on hosts of their own, joined by links of a chosen rate and delay.

Every server and every trainer is a process in a network namespace of its own (`namespaces.py`) and on one core, with
one replica and an equal share of each batch; hosts share the machine's cores. For each size (servers + trainers) the
jobs are started once, and run interleaved over each link. Peers, torch.distributed.rpc and the original (brpc), run in
the same namespaces, in the sizes of `PEER_SIZES`.

Of each job: samples/s; bytes sent over links a step, headers included, to servers and to trainers; the exposed share,
in which a trainer's exchanges were under way and nothing was computed; processor time a step of all its processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.hosts.layout import INTERFACE, LINKS, LinkShape
from tools.hosts.namespaces import Namespaces, NamespacesUnavailable

from bench import workloads
from bench.peers import PeerMissing
from bench.peers.agreement import check_movements
from bench.peers.cluster import Cluster, Host
from bench.peers.contender import CONTENDERS, OURS
from bench.peers.race import Results, alternate, check_losses, ended_by_signals
from bench.peers.remote import PeerFailed, Remote
from bench.report import Report
from bench.workloads.workload import Workload

MODES = ("sync", "async")
SIZES = tuple((servers, trainers) for servers in (1, 2, 4) for trainers in (1, 2, 4))
PEER_SIZES = ((2, 2),)
USUAL_LINKS = ("1gbit", "10gbit")
FIRST_PORT, PORTS_EACH = 6170, 10
MINE = "penstock_hosts"
PEERS = {"torch_rpc_hosts": "sync", "paddle_brpc_hosts": "async"}
"""The mode of each peer. The original's servers in sync mode (`a_sync=False`) end its trainers with a segmentation
fault in their first send barrier, on one host too; without rounds its trainers do not wait for each other.
"""

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of a size: a contender in a mode."""

    key: str
    mode: str

    @property
    def label(self) -> str:
        return f"{self.key.removesuffix('_hosts')}_{self.mode}"


@dataclass(slots=True)
class Turns:
    """Of each turn of a job over one link, the first included: bytes to servers, bytes to trainers, exposed shares."""

    to_servers: list[int] = field(default_factory=list)
    to_trainers: list[int] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """A job over one link."""

    remote: Remote
    network: Namespaces
    num_servers: int
    turns: Turns = field(default_factory=Turns)

    @property
    def key(self) -> str:
        return self.remote.key

    def run(self, num_steps: int) -> float:
        """Train; return the seconds."""
        before = self.network.bytes_to_hosts()
        seconds = self.remote.run(num_steps)
        sent = [b - a for a, b in zip(before, self.network.bytes_to_hosts(), strict=True)]
        self.turns.to_servers.append(sum(sent[: self.num_servers]))
        self.turns.to_trainers.append(sum(sent[self.num_servers :]))
        self.turns.exposed += self.remote.exposed_shares[-1:]
        return seconds

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes."""
        return self.remote.cpu_seconds()

    def rest(self) -> None:
        """A turn is over."""
        self.remote.rest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `--hosts`."""
    parser.add_argument("--hosts", action="store_true", help="several servers and trainers, each on a host of its own")
    parser.add_argument(
        "--sizes", default=",".join(f"{s}+{t}" for s, t in SIZES), help="servers+trainers (%(default)s)"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="with --hosts (%(default)s)")
    parser.add_argument("--links", default=",".join(USUAL_LINKS), help="with --hosts; also 100mbit (%(default)s)")


def sizes_of(text: str) -> list[Size]:
    """Read `1+1,2+2`. Raises SystemExit."""
    found = []
    for part in text.split(","):
        servers, plus, trainers = part.partition("+")
        if not plus or not servers.isdecimal() or not trainers.isdecimal() or not int(servers) * int(trainers):
            raise SystemExit(f"bench pserver: --sizes has {part!r}; expected servers+trainers, such as 2+2")
        found.append((int(servers), int(trainers)))
    return found


def names_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """Read a list of names. Raises SystemExit for one that is not known."""
    names = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"bench pserver: {option} has {', '.join(unknown)}; expected {', '.join(known)}")
    return names


def entries_of(size: Size, modes: Sequence[str], peers: Sequence[str]) -> list[Entry]:
    """Return the jobs of a size: ours in every mode, and peers where they are compared."""
    ours = [Entry(MINE, mode) for mode in modes]
    return [*ours, *(Entry(key, PEERS[key]) for key in peers if size in PEER_SIZES)]


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure every size over every link. Raises SystemExit with what is missing, or with a contender's failure."""
    modes, links = names_of(extra.modes, MODES, "--modes"), names_of(extra.links, list(LINKS), "--links")
    peers = list(PEERS) if extra.peers is None else names_of(extra.peers, list(PEERS), "--peers")
    sizes, report = sizes_of(extra.sizes), Report("pserver --hosts", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)
    workload = workloads.build("criteo")
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, ended_by_signals():
            kept = Path(folder) / "workload.npz"
            workload.save(kept)
            for size in sizes:
                entries = entries_of(size, modes, peers)
                if not json:
                    print(f"bench pserver --hosts: {size[0]} + {size[1]}", file=sys.stderr)
                run = _Run(size, entries, kept, [LINKS[name] for name in links], rounds, extra.steps)
                run.measure(workload, report, needed=extra.peers is not None)
    except (PeerMissing, PeerFailed, NamespacesUnavailable) as error:
        if report.figures:
            print(f"{report.table()}\nbench pserver: these figures do not count", file=sys.stderr)
        raise SystemExit(f"bench pserver: {error}") from error
    report.figures["steps_per_round"] = extra.steps
    return report


@dataclass(frozen=True, slots=True)
class _Run:
    """All jobs of one size."""

    size: Size
    entries: Sequence[Entry]
    workload: Path
    links: Sequence[LinkShape]
    num_rounds: int
    num_steps: int

    def measure(self, workload: Workload, report: Report, *, needed: bool) -> None:
        """Start the jobs, run them over every link, add what was measured, check that they learned the same."""
        with Namespaces(sum(self.size)) as network, self._jobs(network, report, needed=needed) as jobs:
            report.figures["links_have_delays"] = int(network.has_delays)
            for link in self.links:
                network.shape(link)
                report.figures[f"{link.name}_round_trip_us"] = round(network.round_trip_us(), 1)
                results = Results(self.num_steps)
                contenders = [Measured(job, network, self.size[0]) for job in jobs.values()]
                alternate(contenders, results, num_rounds=self.num_rounds)
                add_figures(report, self.size, link, results, {c.key: c.turns for c in contenders}, workload.batch_size)
            self._check(jobs, workload)

    @contextmanager
    def _jobs(self, network: Namespaces, report: Report, *, needed: bool) -> Iterator[dict[Entry, Remote]]:
        """Start every job; end all of them on any way out. A peer that is not installed is `missing`."""
        jobs: dict[Entry, Remote] = {}
        with tempfile.TemporaryDirectory(prefix="penstock-race-") as folder:
            try:
                for number, entry in enumerate(self.entries):
                    try:
                        jobs[entry] = self._start(entry, number, network, Path(folder))
                    except PeerMissing as error:
                        if needed or entry.key == MINE:
                            raise
                        report.missing[entry.label] = str(error)
                        continue
                    jobs[entry].wait_ready()
                yield jobs
            except BaseException:  # Ctrl-C too: no job has to finish a turn
                for job in jobs.values():
                    job.kill()
                raise
            for job in jobs.values():
                job.close()

    def _start(self, entry: Entry, number: int, network: Namespaces, folder: Path) -> Remote:
        servers, trainers = self.size
        hosts = [Host(network.enter(host), network.address(host)) for host in range(servers + trainers)]
        cluster = Cluster(
            key=entry.key,
            trainers=tuple(hosts[servers:]),
            servers=tuple(hosts[:servers]),
            sync=entry.mode == "sync",
            port=FIRST_PORT + PORTS_EACH * number,
            cores=tuple(sorted(os.sched_getaffinity(0))),
            interface=INTERFACE,
        )
        path = folder / f"{entry.label}.json"
        cluster.save(path)
        return Remote(
            entry.key, workload=self.workload, folder=folder, cores=1, column="installed", label=entry.label,
            cluster=path, enter=cluster.trainers[0].enter,
        )  # fmt: skip

    def _check(self, jobs: dict[Entry, Remote], workload: Workload) -> None:
        """Raise PeerFailed if a loss is not finite, or if jobs in step have learned something else than ours."""
        for job in jobs.values():
            job.check()
        in_step = {e: job for e, job in jobs.items() if e.mode == "sync" and CONTENDERS[e.key].compared}
        check_losses({e.label: job.losses for e, job in in_step.items()}, workload.loss_band)
        for entry, job in jobs.items():
            check_losses({entry.label: job.losses}, workload.loss_band)
        moved = {OURS if e.key == MINE else e.key: job.movements for e, job in in_step.items()}
        num_turns = len(self.links) * (self.num_rounds + 1)
        if len(moved) > 1:
            check_movements(moved, workload.movement_band, num_turns * self.num_steps)


def add_figures(
    report: Report, size: Size, link: LinkShape, results: Results, measured: Mapping[str, Turns], batch_size: int
) -> None:
    """Add what was measured of one size over one link, and the ratios of our rates to those of peers."""
    steps, prefix = results.num_steps, f"{size[0]}+{size[1]}_{link.name}"
    rates: dict[str, list[float]] = {}
    for key, one in measured.items():
        name, rates[key] = f"{prefix}_{key}", [steps * batch_size / s for s in results.seconds[key]]
        report.add(f"{name}_samples_per_s", rates[key], digits=0)
        report.add(f"{name}_to_servers_kb_per_step", [sent / steps / 1e3 for sent in one.to_servers[1:]], digits=1)
        report.add(f"{name}_to_trainers_kb_per_step", [sent / steps / 1e3 for sent in one.to_trainers[1:]], digits=1)
        cpu_ms = 1e3 * results.cpu_seconds[key] / (steps * report.rounds)
        report.figures[f"{name}_cpu_ms_per_step"] = round(cpu_ms, 2)
        if one.exposed:
            report.figures[f"{name}_exposed_share"] = round(statistics.median(one.exposed[1:]), 3)
    ours = {key: rate for key, rate in rates.items() if key.startswith(MINE.removesuffix("_hosts"))}
    for key, peer in ((key, rate) for key, rate in rates.items() if key not in ours):
        for mine, rate in ours.items():
            name = f"{prefix}_{mine}_of_{key}"
            ratios = [a / b for a, b in zip(rate, peer, strict=True)]
            report.ratios[name] = round(report.add(f"{name}_ratio", ratios, digits=3), 3)
    report.figures[f"{prefix}_busiest_idle_share"] = round(results.idle_share, 4)
