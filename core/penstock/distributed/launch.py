"""Start the ranks of a job that trains collectively: the same script, a process for each GPU, or several on CPU.

    python -m penstock.distributed.launch --gpus 8 train.py --epochs 3
    python -m penstock.distributed.launch --nproc_per_node 2 train.py       ranks that compute on CPU

Each rank finds its place in the environment, by Fluid's names (PADDLE_TRAINER_ID, PADDLE_CURRENT_ENDPOINT,
PADDLE_TRAINERS_NUM, PADDLE_NUM_TRAINERS, PADDLE_TRAINER_ENDPOINTS, FLAGS_selected_gpus) and by torchrun's (RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT), so a script for torchrun runs as it is.
NCCL_* and GLOO_* pass unchanged; http_proxy and https_proxy do not pass. Output goes to workerlog.N in the log folder;
what the first rank of this host writes is shown as well. The first rank that fails ends the job here: it is named, with
the end of its log, and its exit status is the launcher's (128 + the signal's number for a signal). Ctrl-C stops
everything.

On several hosts the same command runs on each, with --cluster_node_ips and its own --node_ip.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from penstock.distributed import gpus
from penstock.distributed.arguments import Hosts, add_hosts, add_running, check_script, count, hosts_of, port
from penstock.distributed.arguments import parser as empty_parser
from penstock.distributed.local_job import Plan
from penstock.distributed.ports import check_free, free_ports
from penstock.distributed.rank_plan import (
    CLOUD_ENDPOINTS,
    Layout,
    check_alone,
    check_cloud_ports,
    check_num_trainers,
    cloud_hosts,
    cloud_layout,
    doubt,
    on_ports,
    planned_ranks,
)
from penstock.distributed.supervisor import Manner, print_line, supervise
from penstock.errors import SpecError
from penstock.identity import PORT
from penstock.machine.cores import usable_cores

_FIRST_PORT = 6070  # Fluid's on several hosts
_FIRST_CLOUD_PORT = 6170
_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = empty_parser("penstock.distributed.launch", __doc__)
    ranks = found.add_mutually_exclusive_group()
    ranks.add_argument(
        "--gpus", type=count, metavar="N",
        help="ranks of this host, one on each of the first N GPUs (default: all that are visible); where there is no "
        "GPU at all they compute on CPU, with a warning",
    )  # fmt: skip
    ranks.add_argument(
        "--selected_gpus", metavar="GPU,…",
        help="a rank on each of these GPUs, named as CUDA_VISIBLE_DEVICES does where it is set, as 0,1; where there is "
        "no GPU at all as many compute on CPU, with a warning",
    )  # fmt: skip
    ranks.add_argument("--nproc_per_node", type=count, metavar="N", help="ranks of this host, on CPU")
    add_hosts(found)
    add = found.add_argument
    add(
        "--started_port", type=port, metavar="PORT",
        help="port of a host's first rank; the others follow, and then torch's store (default: free ports; "
        f"{_FIRST_PORT} on several hosts)",
    )  # fmt: skip
    add(
        "--use_paddlecloud", action="store_true",
        help="hosts stand in PADDLE_TRAINERS and POD_IP, ports in DISTRIBUTED_TRAINER_ENDPOINTS or from PADDLE_PORT on",
    )  # fmt: skip
    add(
        "--log_level", type=_level, default=logging.INFO, metavar="LEVEL",
        help="above 20 (INFO) only failures are reported (%(default)s)",
    )  # fmt: skip
    add_running(found, log_dir="./mylog")
    return found


def _level(text: str) -> int:
    known = logging.getLevelNamesMapping()
    if text.isdecimal():
        return int(text)
    if text.upper() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor one of {', '.join(known)}")
    return known[text.upper()]


def gpus_of(args: argparse.Namespace, environ: Mapping[str, str], installed: int) -> tuple[str, ...] | None:
    """Return the GPUs of this host's ranks, None if they compute on CPU. Raises SpecError for what is not there."""
    if args.nproc_per_node is not None:
        return None
    known = gpus.visible(environ, installed)
    if known and args.selected_gpus is not None:
        return gpus.chosen(args.selected_gpus, known)
    if known:
        return gpus.first(args.gpus or len(known), known)
    if args.gpus is None and args.selected_gpus is None:
        raise SpecError(
            "this host shows no GPU: set the number of ranks on CPU with --nproc_per_node N",
            pointer="--nproc_per_node",
        )
    return None


def _num_wanted(args: argparse.Namespace) -> int:
    """How many ranks were asked for as GPUs."""
    return args.gpus if args.selected_gpus is None else len(gpus.listed(args.selected_gpus))


def layout_of(args: argparse.Namespace, num_local: int, environ: Mapping[str, str]) -> Layout:
    """Return where all ranks are. Raises SpecError for what cannot be."""
    if not args.use_paddlecloud:
        if args.cluster_node_ips is None:
            check_alone(environ)
        return _on_ports(args.started_port, hosts_of(args.cluster_node_ips, args.node_ip), num_local)
    hosts = cloud_hosts(environ)
    if args.cluster_node_ips not in (None, ",".join(hosts.addresses)):
        raise SpecError(
            f"--cluster_node_ips is {args.cluster_node_ips!r}, but with --use_paddlecloud PADDLE_TRAINERS names the "
            f"hosts: {', '.join(hosts.addresses)}. Leave one of the two out",
            pointer="--cluster_node_ips",
        )
    listed = environ.get(CLOUD_ENDPOINTS, "")
    if listed:
        return cloud_layout(hosts, listed, num_local)
    check_cloud_ports(environ, num_local)
    return _on_ports(args.started_port or _cloud_port(environ), hosts, num_local)


def _cloud_port(environ: Mapping[str, str]) -> int:
    text = environ.get(PORT, "")
    try:
        return port(text) if text else _FIRST_CLOUD_PORT
    except argparse.ArgumentTypeError as error:
        raise SpecError(f"PADDLE_PORT: {error}", pointer=PORT) from error


def _on_ports(first: int | None, hosts: Hosts, num_local: int) -> Layout:
    if first is not None or hosts.are_several:
        first = first or _FIRST_PORT
        hosts.endpoints(first, num_local + 1)  # they must all be there
        return on_ports(hosts, range(first, first + num_local + 1))
    try:
        return on_ports(hosts, free_ports(hosts.address, num_local + 1))
    except OSError as error:
        raise SpecError(
            f"no rank can listen at {hosts.address}: {error.strerror}. --node_ip is an address of this host",
            pointer="--node_ip",
        ) from error


def plan_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Return the ranks of this host. Raises SpecError for what cannot be, or a port that is taken."""
    chosen = gpus_of(args, environ, gpus.num_installed())
    num_local = len(chosen) if chosen is not None else args.nproc_per_node or _num_wanted(args)
    layout = layout_of(args, num_local, environ)
    check_num_trainers(environ, layout)
    check_free(layout.local)
    doubtful = doubt(environ, layout)
    if doubtful:
        print_line(doubtful)
    if chosen is None and args.nproc_per_node is None:
        option = f"--gpus {args.gpus}" if args.selected_gpus is None else f"--selected_gpus {args.selected_gpus}"
        print_line(f"this host shows no GPU: what {option} starts computes on CPU (--nproc_per_node states it)")
    return planned_ranks(layout, args.log_dir, environ, gpus=chosen, num_cores=usable_cores())


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the job to its end and return the exit status. Raises SpecError before anything was started."""
    check_script(args.script)
    plan = plan_of(args, environ)
    is_verbose = args.log_level <= logging.INFO
    if args.print_config and is_verbose:
        print_line(f"{' '.join([str(args.script), *args.script_args])}\n{plan.described()}")
    command = [sys.executable, str(args.script), *args.script_args]
    return supervise(plan, command, environ, Manner(stop_s=args.stop_s, shows_ends=is_verbose))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, run the job, return the exit status."""
    args = parser().parse_args(argv)
    try:
        return run(args, os.environ)
    except SpecError as error:
        print_line(f"launch: {error}")
        return _USAGE


if __name__ == "__main__":
    sys.exit(main())
