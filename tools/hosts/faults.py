"""Faults of the network of an emulated host, and how a process does something inside of one.

nftables drops packets without an answer, as a pulled cable does. The kernel may have no netem: delay is not emulated
then; loss is (nftables draws packets at random), and a slow link is (tbf).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
TABLE = "penstock_faults"


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Have this thread open its sockets, and start its processes, in a network namespace. Raises OSError."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with Path("/proc/thread-self/ns/net").open("rb") as ours, Path(f"/run/netns/{namespace}").open("rb") as theirs:
        if setns(theirs.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        try:
            yield
        finally:
            if setns(ours.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns back")


class LinkFaults:
    """What is wrong with the network of one host. `heal` undoes all of it. Raises RuntimeError if a command fails."""

    def __init__(self, namespace: str, address: str) -> None:
        self._namespace, self._address = namespace, address
        self._nft("add", "table", "inet", TABLE)
        for hook in ("input", "output"):
            self._nft("add", "chain", "inet", TABLE, hook, f"{{ type filter hook {hook} priority 0 ; }}")

    def partition(self) -> None:
        """Drop everything between this host and the others, both ways."""
        self.deafen()
        self.silence()

    def deafen(self) -> None:
        """Drop what comes in: one-way loss."""
        self._rule("input", "iifname", "eth0", "drop")

    def silence(self) -> None:
        """Drop what goes out: the other one-way loss."""
        self._rule("output", "oifname", "eth0", "drop")

    def lose(self, percent: int) -> None:
        """Drop packets at random, both ways."""
        for hook in ("input", "output"):
            self._rule(hook, "numgen", "random", "mod", "100", "<", str(percent), "drop")

    def heal(self) -> None:
        """Let everything pass."""
        self._nft("flush", "table", "inet", TABLE)

    def slow(self, rate: str) -> None:
        """Send at a bounded rate from now on."""
        self._run("tc", "qdisc", "replace", "dev", "eth0", "root", *f"tbf rate {rate} burst 16kb limit 256kb".split())

    def change_address(self, address: str) -> None:
        """Give this host another address in place of its own."""
        self._run("ip", "addr", "del", f"{self._address}/24", "dev", "eth0")
        self._run("ip", "addr", "add", f"{address}/24", "dev", "eth0")

    def _rule(self, chain: str, *rule: str) -> None:
        self._nft("add", "rule", "inet", TABLE, chain, *rule)

    def _nft(self, *command: str) -> None:
        self._run("nft", " ".join(command))

    def _run(self, *command: str) -> None:
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        with inside(self._namespace):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ, "PATH": path}
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
