"""Layout of emulated hosts: names, addresses, and the commands of iproute2 that make, shape and remove them.

A layout is a star: each host is a network namespace with one interface, `eth0`, whose other end is a port of a bridge.
The bridge has a namespace of its own, so nothing is added to the network of the machine. A link is shaped at both ends:
what a host sends, and what the bridge sends to it. Pure; `namespaces.py` runs the commands.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Command = tuple[str, ...]
PREFIX = "penstock-hosts"
INTERFACE, BRIDGE = "eth0", "bridge0"
MAX_HOSTS = 200
BURST_BYTES = 96 << 10
"""More than one segment of 64 KiB with the headers of its packets: a smaller bucket has the kernel cut segments."""
QUEUE_BYTES = 4 << 20
"""What waits for a link of the bridge before packets are dropped."""
QUEUE_PACKETS = 100_000


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link. `delay_us`: from one host to another, one way."""

    name: str
    rate_mbit: int
    delay_us: int


LINKS: Mapping[str, LinkShape] = {
    shape.name: shape
    for shape in (LinkShape("1gbit", 1_000, 200), LinkShape("10gbit", 10_000, 50), LinkShape("100mbit", 100, 200))
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made a layout: its number, and when it started, in ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_hosts` hosts and their bridge."""

    owner: Owner
    num_hosts: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise ValueError(f"a layout of {self.num_hosts} hosts; expected 1 to {MAX_HOSTS}")

    @property
    def bridge(self) -> str:
        """The bridge's namespace."""
        return self._name("bridge")

    @property
    def hosts(self) -> list[str]:
        """The hosts' namespaces."""
        return [self._name(f"host{host}") for host in range(self.num_hosts)]

    def address(self, host: int) -> str:
        """Return a host's IPv4 address; it exists inside of the namespaces only."""
        return f"10.83.0.{host + 1}"

    def create(self) -> list[Command]:
        """Return the commands that make everything, unshaped."""
        made: list[Command] = [
            ("ip", "netns", "add", self.bridge),
            _in(self.bridge, "link", "add", BRIDGE, "type", "bridge"),
            _in(self.bridge, "link", "set", BRIDGE, "up"),
        ]
        for number, host in enumerate(self.hosts):
            made += [
                ("ip", "netns", "add", host),
                _in(
                    host, "link", "add", INTERFACE, "type", "veth", "peer", "name", _port(number), "netns", self.bridge
                ),
                _in(self.bridge, "link", "set", _port(number), "master", BRIDGE, "up"),
                _in(host, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE),
                _in(host, "link", "set", "lo", "up"),
                _in(host, "link", "set", INTERFACE, "up"),
            ]
        return made

    def shape(self, link: LinkShape, *, delays: bool) -> list[Command]:
        """Return the commands that give every link a rate, and with `delays` (netem) its delay, at the sender's end."""
        return [
            command
            for number, host in enumerate(self.hosts)
            for command in (
                *_shaped(host, INTERFACE, link, link.delay_us if delays else 0),
                *_shaped(self.bridge, _port(number), link, 0),
            )
        ]

    def remove(self) -> list[Command]:
        """Return the commands that remove everything; interfaces go with their namespaces."""
        return [("ip", "netns", "del", name) for name in (*self.hosts, self.bridge)]

    def _name(self, what: str) -> str:
        return f"{PREFIX}-{self.owner.pid}-{self.owner.start_ticks}-{what}"


def abandoned(names: Iterable[str], running: Collection[Owner]) -> list[str]:
    """Return the namespaces of layouts whose owner is none of the running processes."""
    return [name for name in names if (owner := owner_of(name)) is not None and owner not in running]


def owner_of(name: str) -> Owner | None:
    """Return the owner of a layout's namespace; None for a namespace of something else."""
    parts = name.removeprefix(f"{PREFIX}-").split("-")
    if not name.startswith(f"{PREFIX}-") or len(parts) != 3 or not all(part.isdecimal() for part in parts[:2]):
        return None
    return Owner(int(parts[0]), int(parts[1]))


def bytes_to_hosts(statistics: str, num_hosts: int) -> list[int]:
    """Read the answer of `tc -s -j qdisc show` in the bridge's namespace: the bytes that each host was sent so far.

    Counted by the qdiscs, so with the headers of every packet that a segment is cut into. Raises KeyError.
    """
    sent = {found["dev"]: int(found["bytes"]) for found in json.loads(statistics) if found.get("root")}
    return [sent[_port(host)] for host in range(num_hosts)]


def _port(host: int) -> str:
    return f"port{host}"


def _in(namespace: str, *arguments: str) -> Command:
    return ("ip", "-n", namespace, *arguments)


def _shaped(namespace: str, interface: str, link: LinkShape, delay_us: int) -> list[Command]:
    # from scratch: a qdisc of another kind cannot be changed into this one
    clear = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "handle", "9:", "pfifo")
    add = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface)
    rate = ("tbf", "rate", f"{link.rate_mbit}mbit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
    if not delay_us:
        return [clear, (*add, "root", "handle", "1:", *rate)]
    delay = ("netem", "delay", f"{delay_us}us", "limit", str(QUEUE_PACKETS))
    return [clear, (*add, "root", "handle", "1:", *delay), (*add, "parent", "1:1", "handle", "2:", *rate)]
