"""Ranks of a job without servers: where each listens, its GPU, and its environment in Fluid's names and torchrun's.

Pure. Ranks are numbered host by host, as Fluid's launcher does: rank = host's number * ranks of a host + local number.
Source: spec/fluid.md 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.distributed.arguments import LAST_PORT, Hosts, hosts_of
from penstock.distributed.local_job import Plan, Process, for_all, replica_variables, with_one_watched
from penstock.errors import SpecError
from penstock.identity import MANUAL_NUM_TRAINERS, POD_IP, TRAINER_ID, endpoints_problem
from penstock.protocol import contract
from penstock.settings import SELECTED_GPUS, VISIBLE_GPUS

_PROXIES = ("http_proxy", "https_proxy")
_ELASTIC = "TORCHELASTIC_"  # set for us by a launcher of torch above, and wrong for our ranks
_OF_TORCHRUN = ("GROUP_WORLD_SIZE",)
CLOUD_HOSTS, CLOUD_ENDPOINTS = "PADDLE_TRAINERS", "DISTRIBUTED_TRAINER_ENDPOINTS"
CLOUD_NUM_PORTS = "TRAINER_PORTS_NUM"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks of a job are. `endpoints`: of all ranks; each host has as many. `master`: of torch's store."""

    hosts: Hosts
    endpoints: tuple[str, ...]
    master: str

    @property
    def num_local(self) -> int:
        """How many ranks a host has."""
        return len(self.endpoints) // len(self.hosts.addresses)

    @property
    def local(self) -> tuple[str, ...]:
        """What must be free on this host: its ranks' endpoints, and on the first one the master's."""
        first = self.hosts.here * self.num_local
        mine = self.endpoints[first : first + self.num_local]
        return mine if self.hosts.here else (*mine, self.master)


def on_ports(hosts: Hosts, ports: Sequence[int]) -> Layout:
    """Return ranks at all but the last of `ports` of every host; the last one, on the first host, is the master's."""
    endpoints = tuple(f"{host}:{one}" for host in hosts.addresses for one in ports[:-1])
    return Layout(hosts, endpoints, f"{hosts.addresses[0]}:{ports[-1]}")


def cloud_hosts(environ: Mapping[str, str]) -> Hosts:
    """Return the hosts that PaddleCloud's variables name. Raises SpecError naming the one that is not set."""
    for name, example in ((CLOUD_HOSTS, "10.0.0.1,10.0.0.2"), (POD_IP, "10.0.0.1")):
        if not environ.get(name):
            raise SpecError(
                f"--use_paddlecloud needs the environment variable {name}, for example {example}", pointer=name
            )
    hosts = hosts_of(environ[CLOUD_HOSTS], environ[POD_IP], names=(CLOUD_HOSTS, POD_IP))
    given = environ.get(TRAINER_ID, "")
    if given not in ("", str(hosts.here)):
        raise SpecError(
            f"{TRAINER_ID} is {given!r}, but {POD_IP} {hosts.address} is number {hosts.here} of {CLOUD_HOSTS} "
            f"({', '.join(hosts.addresses)}). With --use_paddlecloud it is the host's number; correct one of the two",
            pointer=TRAINER_ID,
        )
    return hosts


def check_cloud_ports(environ: Mapping[str, str], num_local: int) -> None:
    """Raise SpecError if TRAINER_PORTS_NUM leaves a host fewer ports than it has ranks."""
    text = environ.get(CLOUD_NUM_PORTS, "")
    if text and (not text.isdecimal() or int(text) < num_local):
        raise SpecError(
            f"{CLOUD_NUM_PORTS} is {text!r}, but the {num_local} ranks of a host need a port each",
            pointer=CLOUD_NUM_PORTS,
        )


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise SpecError if PADDLE_TRAINERS names several hosts, but --use_paddlecloud is not given."""
    listed = environ.get(CLOUD_HOSTS, "")
    if "," in listed:
        raise SpecError(
            f"{CLOUD_HOSTS} is {listed!r}, but this would be a job on this host alone. Add --use_paddlecloud to "
            "take the hosts from there, or name them with --cluster_node_ips, or leave the variable out",
            pointer=CLOUD_HOSTS,
        )


def cloud_layout(hosts: Hosts, listed: str, num_local: int) -> Layout:
    """Return ranks at the endpoints that PaddleCloud lists; torch's store comes after the first host's last port."""
    endpoints = tuple(one.strip() for one in listed.split(","))
    problem = endpoints_problem(endpoints)
    if problem:
        raise SpecError(f"{CLOUD_ENDPOINTS} is {listed!r}: {problem}", pointer=CLOUD_ENDPOINTS)
    wanted = [host for host in hosts.addresses for _ in range(num_local)]
    if [one.rpartition(":")[0] for one in endpoints] != wanted:
        raise SpecError(
            f"{CLOUD_ENDPOINTS} is {listed!r}; expected {num_local} endpoints of each of {', '.join(hosts.addresses)}, "
            "host by host",
            pointer=CLOUD_ENDPOINTS,
        )
    last = max(int(one.rpartition(":")[2]) for one in endpoints[:num_local])
    if last == LAST_PORT:
        raise SpecError(f"{CLOUD_ENDPOINTS} leaves no port after {last} for torch's store", pointer=CLOUD_ENDPOINTS)
    return Layout(hosts, endpoints, f"{hosts.addresses[0]}:{last + 1}")


def check_num_trainers(environ: Mapping[str, str], layout: Layout) -> None:
    """Raise SpecError if PADDLE_NUM_TRAINERS is neither the number of hosts nor of ranks."""
    text = environ.get(MANUAL_NUM_TRAINERS, "")
    hosts, ranks = len(layout.hosts.addresses), len(layout.endpoints)
    if text and text not in (str(hosts), str(ranks)):
        raise SpecError(
            f"{MANUAL_NUM_TRAINERS} is {text!r}, but this is a job on {hosts} host{'s' if hosts > 1 else ''} with "
            f"{ranks} ranks in all. Name all hosts with --cluster_node_ips, or leave the variable out",
            pointer=MANUAL_NUM_TRAINERS,
        )


def doubt(environ: Mapping[str, str], layout: Layout) -> str:
    """Return a warning where PADDLE_NUM_TRAINERS may mean hosts that are not named; empty where it cannot.

    In Fluid's manual it is the number of hosts. Each of several would start a job of its own.
    """
    text = environ.get(MANUAL_NUM_TRAINERS, "")
    if len(layout.hosts.addresses) > 1 or text in ("", "1"):
        return ""
    return (
        f"{MANUAL_NUM_TRAINERS} is {text}, taken as the number of ranks: all of them are on this host. If it is the "
        "number of hosts, name them with --cluster_node_ips on each"
    )


def planned_ranks(
    layout: Layout, log_dir: Path, environ: Mapping[str, str], *, gpus: Sequence[str] | None, num_cores: int
) -> Plan:
    """Return the ranks of this host. `gpus`: one for each, in the words of CUDA_VISIBLE_DEVICES; None: on CPU."""
    num_local = layout.num_local
    shared: dict[str, str | None] = {
        **for_all(),
        **dict.fromkeys((*_PROXIES, *_OF_TORCHRUN, SELECTED_GPUS.name)),
        **dict.fromkeys(name for name in environ if name.startswith(_ELASTIC)),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, num_cores // num_local)),
    }
    if gpus is not None:
        shared[VISIBLE_GPUS.name] = ",".join(gpus)
    ranks = [_rank(layout, i, shared, log_dir, has_gpu=gpus is not None) for i in range(num_local)]
    return Plan(tuple(with_one_watched(ranks, environ)))


def _rank(layout: Layout, local: int, shared: Mapping[str, str | None], log_dir: Path, *, has_gpu: bool) -> Process:
    here, num_local = layout.hosts.here, layout.num_local
    rank = here * num_local + local
    job = contract.CollectiveJob(
        layout.endpoints, layout.master, local, num_local, node=here, gpus=(local,) if has_gpu else ()
    )
    env = {**shared, **job.environ(rank), **replica_variables("trainer", rank)}
    return Process("trainer", rank, env, log_dir / f"workerlog.{local}", f"rank {rank}", layout.endpoints[rank])
