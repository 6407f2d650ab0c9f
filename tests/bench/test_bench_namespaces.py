"""Network namespaces as hosts: real ones where this process may make them; elsewhere the error says what is missing."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.hosts.layout import LINKS
from tools.hosts.namespaces import Namespaces, NamespacesUnavailable, missing, namespaces, remove_abandoned

ROOT = Path(__file__).resolve().parents[2]
MAKE = """
import time
from tools.hosts.namespaces import Namespaces
from bench.peers.race import ended_by_signals
with ended_by_signals(), Namespaces(1) as network:
    print(network.layout.hosts[0], flush=True)
    for _ in range(6000):  # one long call would sleep on after a signal that arrives just before its system call
        time.sleep(0.02)
"""


@functools.cache
def refusal() -> str:
    """Return why namespaces cannot be made here; nothing if they can."""
    try:
        with Namespaces(1):
            return ""
    except NamespacesUnavailable as error:
        return str(error)


@contextlib.contextmanager
def kept_open() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that makes a host and waits, for two minutes at most; yield the host's namespace too."""
    with subprocess.Popen([sys.executable, "-c", MAKE], cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        try:
            yield maker, maker.stdout.readline().strip()
        finally:
            maker.kill()


@pytest.mark.parametrize(
    ("platform", "is_root", "programs", "text"),
    [
        ("darwin", True, ("ip", "tc"), "need Linux; this is darwin"),
        ("linux", True, (), "no ip and no tc on this machine; install iproute2"),
        ("linux", True, ("ip",), "no tc on this machine"),
        ("linux", False, ("ip", "tc"), "need root"),
        ("linux", True, ("ip", "tc"), ""),
    ],
)
def test_what_is_missing_is_named(platform: str, is_root: bool, programs: tuple[str, ...], text: str) -> None:
    found = missing(platform, is_root=is_root, programs=programs)
    assert (text in found) if text else not found


def test_hosts_reach_each_other_and_nothing_remains() -> None:
    if refusal():
        assert any(word in refusal() for word in ("root", "iproute2", "ended with"))
        return
    with Namespaces(2) as network:
        made = [*network.layout.hosts, network.layout.bridge]
        network.shape(LINKS["1gbit"])
        before = network.bytes_to_hosts()
        assert network.round_trip_us() > 0.0
        assert all(after > first for first, after in zip(before, network.bytes_to_hosts(), strict=True))
        assert set(made) <= set(namespaces())
    assert not set(made) & set(namespaces())


def test_a_host_has_no_way_out_of_its_network() -> None:
    if refusal():
        return
    with Namespaces(1) as network:
        routes = subprocess.run([*network.enter(0), "ip", "route"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in routes.stdout.splitlines()] == ["10.83.0.0/24"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_what_was_made(number: signal.Signals) -> None:
    if refusal():
        return
    with kept_open() as (maker, host):
        maker.send_signal(number)
        assert maker.wait(30)
    assert not [name for name in namespaces() if name.startswith(host.removesuffix("host0"))]


def test_the_next_start_removes_what_a_killed_one_left() -> None:
    if refusal():
        return
    with kept_open() as (maker, host), subprocess.Popen(["ip", "netns", "exec", host, "sleep", "600"]) as left:
        assert host not in remove_abandoned()  # its owner runs
        maker.kill()
        maker.wait()
        assert host in remove_abandoned()
        assert left.wait(30) == -signal.SIGKILL
    assert host not in namespaces()
