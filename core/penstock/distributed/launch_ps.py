"""Start a job of parameter servers: the same script, as servers and as trainers, on this host or on several.

    python -m penstock.distributed.launch_ps --server_num 2 --worker_num 2 train.py --epochs 3

Each process finds its place in the environment (PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, TRAINING_ROLE,
PADDLE_TRAINER_ID, POD_IP, PADDLE_PORT), which PaddleCloudRoleMaker reads. Output goes to workerlog.N and serverlog.N in
the log folder; what the first trainer of this host writes is shown as well. The first process that fails ends the job
here: it is named, with the end of its log, and its exit status is the launcher's (128 + the signal's number for a
signal). Ctrl-C stops everything.

On several hosts the same command runs on each, with --cluster_node_ips and its own --node_ip; --server_num and
--worker_num count those of one host, and PENSTOCK_PS_TOKEN is the same secret on all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock import identity
from penstock.distributed.arguments import Hosts, add_hosts, add_running, check_script, count, hosts_of, port, seconds
from penstock.distributed.arguments import parser as empty_parser
from penstock.distributed.local_job import Plan, Share, planned
from penstock.distributed.ports import check_free, free_ports
from penstock.distributed.supervisor import Manner, print_line, supervise
from penstock.errors import SpecError
from penstock.identity import endpoints_problem
from penstock.settings import PS_SAVE_DIRS, PS_TOKEN

_FIRST_PORT = 6170
_NUM_SERVERS = 2
_SERVER_GRACE_S = 30.0
_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = empty_parser("penstock.distributed.launch_ps", __doc__)
    add = found.add_argument
    add("--server_num", type=count, metavar="N", help="parameter servers to start (2, or as many as --endpoints)")
    add("--worker_num", type=count, default=2, metavar="N", help="trainers to start (%(default)s)")
    add_hosts(found)
    where = found.add_mutually_exclusive_group()
    where.add_argument(
        "--started_port", "--start_port", type=port, metavar="PORT",
        help=f"port of a host's first server; the others follow (default: free ports; {_FIRST_PORT} on several hosts)",
    )  # fmt: skip
    where.add_argument(
        "--endpoints", metavar="HOST:PORT,…", help="where all servers listen, those of one host together"
    )
    add("--server_grace_s", type=seconds, metavar="S",
        help=f"how long servers may take to end after the last trainer of this host ({_SERVER_GRACE_S:g}; on several "
        "hosts any time, since trainers of the others may go on)")  # fmt: skip
    add_running(found, log_dir="logs")
    return found


def endpoints_of(args: argparse.Namespace, hosts: Hosts) -> list[str]:
    """Return where all servers are to listen. Raises SpecError for what cannot be."""
    if args.endpoints:
        return _chosen(args, hosts)
    number = args.server_num or _NUM_SERVERS
    if args.started_port is not None or hosts.are_several:
        return hosts.endpoints(args.started_port or _FIRST_PORT, number)
    try:
        return [f"{hosts.address}:{free}" for free in free_ports(hosts.address, number)]
    except OSError as error:
        raise SpecError(
            f"no server can listen at {hosts.address}: {error.strerror}. --node_ip is an address of this host",
            pointer="--node_ip",
        ) from error


def _chosen(args: argparse.Namespace, hosts: Hosts) -> list[str]:
    found = [part.strip() for part in args.endpoints.split(",")]
    problem = endpoints_problem(found)
    if problem:
        raise SpecError(f"--endpoints is {args.endpoints!r}: {problem}", pointer="--endpoints")
    mine = [one for one in found if not hosts.are_several or _host(one) == hosts.address]
    for one in found:
        if hosts.are_several and _host(one) not in hosts.addresses:
            raise SpecError(
                f"--endpoints has {one!r}, but that host is not in --cluster_node_ips", pointer="--endpoints"
            )
    if args.server_num not in (None, len(mine)):
        here = f" at {hosts.address}" if hosts.are_several else ""
        raise SpecError(
            f"--endpoints has {len(mine)} entries{here}, but --server_num is {args.server_num}", pointer="--server_num"
        )
    return found


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


def plan_of(args: argparse.Namespace, hosts: Hosts, environ: Mapping[str, str]) -> Plan:
    """Return the processes of this host. Raises SpecError for what cannot be, or a port that is taken."""
    endpoints = endpoints_of(args, hosts)
    first = hosts.here * args.worker_num
    share = Share(
        servers=[i for i, one in enumerate(endpoints) if not hosts.are_several or _host(one) == hosts.address],
        trainers=range(first, first + args.worker_num),
    )
    check_free([endpoints[i] for i in share.servers])
    return planned(
        endpoints,
        args.worker_num * len(hosts.addresses),
        args.log_dir,
        environ,
        defaults=_agreed(hosts, endpoints, environ),
        share=share,
    )


def _agreed(hosts: Hosts, endpoints: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job's name, its secret, and where servers may save, where the environment does not set them."""
    saves = {PS_SAVE_DIRS.name: str(Path.cwd())}
    if not hosts.are_several:
        name = f"launch-{os.getpid()}-{secrets.token_hex(4)}"
        return {identity.JOB_ID: name, PS_TOKEN.name: secrets.token_hex(16), **saves}
    if not environ.get(PS_TOKEN.name):
        raise SpecError(
            "the hosts of a job need one secret, with which its processes know each other: set "
            f"{PS_TOKEN} to the same text on all of them, for example to what `openssl rand -hex 16` prints",
            pointer=PS_TOKEN.name,
        )
    return {identity.JOB_ID: f"launch-{hashlib.sha256(','.join(endpoints).encode()).hexdigest()[:16]}", **saves}


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the job to its end and return the exit status. Raises SpecError before anything was started."""
    check_script(args.script)
    hosts = hosts_of(args.cluster_node_ips, args.node_ip)
    plan = plan_of(args, hosts, environ)
    if args.print_config:
        print_line(f"{' '.join([str(args.script), *args.script_args])}\n{plan.described()}")
    grace_s = args.server_grace_s
    if grace_s is None:
        grace_s = math.inf if hosts.are_several else _SERVER_GRACE_S
    command = [sys.executable, str(args.script), *args.script_args]
    return supervise(plan, command, environ, Manner(stop_s=args.stop_s, server_grace_s=grace_s))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, run the job, return the exit status."""
    args = parser().parse_args(argv)
    try:
        return run(args, os.environ)
    except SpecError as error:
        print_line(f"launch_ps: {error}")
        return _USAGE


if __name__ == "__main__":
    sys.exit(main())
