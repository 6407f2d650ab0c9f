"""What command lines of launchers share: checked numbers, the script with its arguments, how a job ends, its hosts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpecError

LAST_PORT = 65535


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return an empty command line of `python -m MODULE`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_hosts(found: argparse.ArgumentParser) -> None:
    """Add which hosts take part."""
    found.add_argument(
        "--cluster_node_ips", metavar="HOST,…",
        help="addresses of all hosts; the same command runs on each of them, with its own --node_ip (this host alone)",
    )  # fmt: skip
    found.add_argument("--node_ip", default="127.0.0.1", metavar="HOST", help="address of this host (%(default)s)")


def add_running(found: argparse.ArgumentParser, *, log_dir: str) -> None:
    """Add how it runs, and the script with all that follows it."""
    add = found.add_argument
    add("--log_dir", type=Path, default=Path(log_dir), metavar="DIR", help="folder of the log files (%(default)s)")
    add(
        "--print_config", type=claim, nargs="?", const=True, default=True, metavar="true|false",
        help="show the processes before they start (%(default)s); with false they start all the same",
    )  # fmt: skip
    add("--stop_s", type=seconds, default=10.0, metavar="S", help="seconds from SIGTERM to SIGKILL (%(default)s)")
    add("script", type=Path, help="the training script")
    add("script_args", nargs=argparse.REMAINDER, metavar="…", help="its arguments")


def count(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def port(text: str) -> int:
    """Return the number of a port."""
    if not text.isdecimal() or not 0 < int(text) <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number from 1 to {LAST_PORT}")
    return int(text)


def seconds(text: str) -> float:
    """Return a time that is not negative; inf is for ever."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return found


def claim(text: str) -> bool:
    """Return what a person means by true or false."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def check_script(script: Path) -> None:
    """Raise SpecError unless there is a script."""
    if not script.is_file():
        raise SpecError(f"there is no script {str(script)!r} in {Path.cwd()}", pointer="script")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job, in the same order on each; `here`: which of them this one is."""

    addresses: tuple[str, ...]
    here: int

    @property
    def address(self) -> str:
        """Of this host."""
        return self.addresses[self.here]

    @property
    def are_several(self) -> bool:
        """Whether others have to know what this launcher chooses."""
        return len(self.addresses) > 1

    def endpoints(self, first_port: int, num_ports: int) -> list[str]:
        """Return the same ports on every host, host by host. Raises SpecError if there are not so many."""
        if first_port + num_ports - 1 > LAST_PORT:
            raise SpecError(
                f"--started_port {first_port} leaves no room for {num_ports} ports up to {LAST_PORT}",
                pointer="--started_port",
            )
        return [f"{host}:{first_port + i}" for host in self.addresses for i in range(num_ports)]


def hosts_of(
    cluster_node_ips: str | None, node_ip: str, *, names: Sequence[str] = ("--cluster_node_ips", "--node_ip")
) -> Hosts:
    """Return the hosts that a person has named. `names`: of the two settings. Raises SpecError."""
    everyone, mine = names
    addresses = [one.strip() for one in cluster_node_ips.split(",")] if cluster_node_ips is not None else [node_ip]
    for one in addresses:
        if not one or " " in one or one.count(":") == 1:
            raise SpecError(f"{everyone} has {one!r}; expected addresses of hosts without ports, as 10.0.0.1,10.0.0.2")
        if addresses.count(one) > 1:
            raise SpecError(f"{everyone} has {one!r} twice; each host is named once", pointer=everyone)
    if node_ip not in addresses:
        raise SpecError(
            f"{mine} is {node_ip!r}; expected which of {everyone} this host is: {', '.join(addresses)}", pointer=mine
        )
    return Hosts(tuple(addresses), addresses.index(node_ip))
