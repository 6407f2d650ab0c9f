"""Hosts that are hosts: network namespaces joined by veth pairs, each with its own address, HOME and processes.

A `HostSite` is a `Site` whose processes, and whose client, are on one of them. `Faults` breaks the network between two
hosts with nftables, which drops packets without an answer, as a pulled cable does. The kernel may have no netem: delay
is not emulated then; loss is (nftables draws packets at random), and a slow link is (tbf).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.conftest import Site
from tools.hosts.namespaces import Namespaces

from penstock.protocol.rest import Job

CLONE_NEWNET = 0x40000000
TABLE = "penstock_faults"


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Have this thread open its sockets, and start its processes, in a network namespace."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with Path("/proc/thread-self/ns/net").open("rb") as ours, Path(f"/run/netns/{namespace}").open("rb") as theirs:
        if setns(theirs.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        try:
            yield
        finally:
            if setns(ours.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns back")


class HostSite(Site):
    """One host."""

    def __init__(self, home: Path, network: Namespaces, number: int) -> None:
        super().__init__(home, grace_s=2.0)
        self.environ["PENSTOCK_SERVER_LEASE_TTL_S"] = "2"
        self.network, self.number = network, number

    @property
    def address(self) -> str:
        return self.network.address(self.number)

    @property
    def namespace(self) -> str:
        return self.network.layout.hosts[self.number]

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return inside(self.namespace)

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> subprocess.CompletedProcess[str]:
        with self.inside():
            return super().run(*arguments, timeout_s=timeout_s, **environ)

    def start(self, *argv: str) -> subprocess.Popen[str]:
        with self.inside():
            return super().start(*argv)

    def look(self, job: str) -> Job:
        with self.inside():
            return super().look(job)

    def node_states(self) -> list[str]:
        with self.inside():
            return super().node_states()

    def log(self, job: str) -> str:
        with self.inside():
            return super().log(job)

    def inside_ready(self) -> bool:
        """Whether the server answers."""
        with self.inside():
            return super().ready()

    def nodes(self) -> dict[str, Any]:
        """Return the nodes by name."""
        with self.inside(), self.client as client:
            return {node["name"]: node for node in client.nodes()}

    def serve(self) -> str:
        """Start server and agent on this host; return the server's address."""
        self.up("--host", self.address, "--insecure")
        with self.inside(), self.client as client:
            return client.url

    def join(self, url: str, token: str, name: str) -> subprocess.Popen[str]:
        """Run the agent of this host."""
        return self.start("penstock.cli", "agent", "join", "--url", url, "--join-token", token, "--name", name)

    def join_token(self) -> str:
        """Make a token, as an administrator."""
        made = self.run("agent", "token")
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()


class Faults:
    """What is wrong with the network of one host. `heal` undoes all of it."""

    def __init__(self, site: HostSite) -> None:
        self._site = site
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
        self._run("ip", "addr", "del", f"{self._site.address}/24", "dev", "eth0")
        self._run("ip", "addr", "add", f"{address}/24", "dev", "eth0")

    def _rule(self, chain: str, *rule: str) -> None:
        self._nft("add", "rule", "inet", TABLE, chain, *rule)

    def _nft(self, *command: str) -> None:
        self._run("nft", " ".join(command))

    def _run(self, *command: str) -> None:
        with self._site.inside():
            path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ, "PATH": path}
            )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
