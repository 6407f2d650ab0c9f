"""Hosts emulated by network namespaces: made on entry, removed on any way out of the block.

A process that is killed cannot remove its namespaces; the next one that makes some removes them, with every process
in them. Needs Linux, iproute2 and CAP_NET_ADMIN and CAP_SYS_ADMIN; what is missing is in the error. Rates are made by
tbf, delays by netem: where the kernel has no netem links have a rate only, and `has_delays` says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.hosts.layout import Command, Layout, LinkShape, Owner, abandoned, bytes_to_hosts, owner_of

SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
CONGESTION_CONTROLS = ("cubic", "reno")
"""The first that a namespace may use: Linux's default, and what every namespace may use. On links this short they are
alike. The machine's own setting belongs to its own network.
"""
PROGRAMS = ("ip", "tc")
COMMAND_LIMIT_S = 30.0
PROBES = 40
_PROBE_PORT = 6100
_ECHO = """
import socket
with socket.create_server(("", {port})) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while byte := connection.recv(1):
        connection.sendall(byte)
"""
_ASK = """
import socket, time
with socket.create_connection(("{address}", {port})) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range({probes}):
        begin = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        print(1e6 * (time.perf_counter() - begin))
"""


class NamespacesUnavailable(Exception):
    """Network namespaces cannot be made here. The text says what is missing."""


class Namespaces:
    """`num_hosts` emulated hosts, within a `with` block. Raises NamespacesUnavailable."""

    def __init__(self, num_hosts: int) -> None:
        self.layout = Layout(this_process(), num_hosts)
        self.has_delays = False
        self.congestion_control = ""

    def __enter__(self) -> Self:
        check_machine()
        remove_abandoned()
        try:
            for command in self.layout.create():
                _run(command)
            for host in range(self.layout.num_hosts):
                self.congestion_control = self._choose_congestion_control(host)
            self.has_delays = self._can("netem", "delay", "1us")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def enter(self, host: int) -> Command:
        """Return what to put before a command line so that it runs on a host, as the same process."""
        return (_program("ip"), "netns", "exec", self.layout.hosts[host])

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        return self.layout.address(host)

    def shape(self, link: LinkShape) -> None:
        """Give every link a rate, and a delay where the kernel can; connections stay. Counters start from 0 again."""
        for command in self.layout.shape(link, delays=self.has_delays):
            _run(command)

    def bytes_to_hosts(self) -> list[int]:
        """Return the bytes that each host was sent since the links were shaped, headers included."""
        answer = _run(("tc", "-n", self.layout.bridge, "-s", "-j", "qdisc", "show"))
        return bytes_to_hosts(answer, self.layout.num_hosts)

    def round_trip_us(self) -> float:
        """Return the median time of one byte from the first host to the second and back, over TCP."""
        echo = [*self.enter(1), sys.executable, "-c", _ECHO.format(port=_PROBE_PORT)]
        ask = _ASK.format(address=self.address(1), port=_PROBE_PORT, probes=PROBES)
        with subprocess.Popen(echo, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                times = _run((*self.enter(0), sys.executable, "-c", ask)).split()
            finally:
                server.kill()
        return statistics.median(map(float, times))

    def _choose_congestion_control(self, host: int) -> str:
        refused = ""
        for name in CONGESTION_CONTROLS:
            try:
                _run((*self.enter(host), "sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control"))
            except NamespacesUnavailable as error:
                refused = str(error)
            else:
                return name
        raise NamespacesUnavailable(refused)

    def _can(self, *qdisc: str) -> bool:
        try:
            _run(("tc", "-n", self.layout.hosts[0], "qdisc", "replace", "dev", "lo", "root", *qdisc))
        except NamespacesUnavailable:
            return False
        _run(("tc", "-n", self.layout.hosts[0], "qdisc", "del", "dev", "lo", "root"))
        return True

    def _remove(self) -> None:
        present = namespaces()
        for name in (*self.layout.hosts, self.layout.bridge):
            if name in present:
                _end_and_delete(name)


def this_process() -> Owner:
    """Return this process as the owner of what it makes."""
    return Owner(os.getpid(), _start_ticks(os.getpid()))


def missing(platform: str, *, is_root: bool, programs: Collection[str]) -> str:
    """Return what a machine lacks for network namespaces; nothing if it has all. `programs`: those it has."""
    if not platform.startswith("linux"):
        return f"network namespaces need Linux; this is {platform}"
    absent = [name for name in PROGRAMS if name not in programs]
    if absent:
        return f"no {' and no '.join(absent)} on this machine; install iproute2"
    return "" if is_root else "network namespaces need root (CAP_NET_ADMIN, CAP_SYS_ADMIN); run it as root"


def check_machine() -> None:
    """Raise NamespacesUnavailable if a program or a right is missing."""
    present = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED)]
    lacks = missing(sys.platform, is_root=os.geteuid() == 0, programs=present)
    if lacks:
        raise NamespacesUnavailable(lacks)


def namespaces() -> list[str]:
    """List the names of all network namespaces of the machine."""
    return [line.split()[0] for line in _run(("ip", "netns", "list")).splitlines() if line]


def remove_abandoned() -> list[str]:
    """Remove what killed processes have left, and the processes in it; return the names."""
    names = namespaces()
    owners = {owner for name in names if (owner := owner_of(name)) is not None}
    found = abandoned(names, {owner for owner in owners if _start_ticks(owner.pid) == owner.start_ticks})
    for name in found:
        _end_and_delete(name)
    return found


def _end_and_delete(name: str) -> None:
    for pid in _run(("ip", "netns", "pids", name)).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run(("ip", "netns", "del", name))


def _start_ticks(pid: int) -> int:
    """Return when a process started; -1 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(text.rpartition(")")[2].split()[19])


def _program(name: str) -> str:
    found = shutil.which(name, path=SEARCHED)
    if found is None:
        raise NamespacesUnavailable(f"no {name} on this machine; install iproute2")
    return found


def _run(command: Command) -> str:
    line = [_program(command[0]), *command[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if done.returncode:
        raise NamespacesUnavailable(f"'{' '.join(command)}' ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
