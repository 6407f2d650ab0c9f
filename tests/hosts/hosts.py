"""Hosts that are hosts: network namespaces joined by veth pairs, each with its own address, HOME and processes.

A `HostSite` is a `Site` whose processes, and whose client, are on one of them. `Faults` breaks the network between two
hosts (`tools/hosts/faults.py`).
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

from tests.cli.conftest import Site
from tools.hosts.faults import LinkFaults, inside
from tools.hosts.namespaces import Namespaces

from penstock.protocol.rest import Job


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


class Faults(LinkFaults):
    """What is wrong with the network of one host."""

    def __init__(self, site: HostSite) -> None:
        super().__init__(site.namespace, site.address)
