"""cluster ray: pilots as detached actors in placement groups (docs/clusters.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.cluster import (
    Cluster,
    Cpus,
    Down,
    Every,
    Folder,
    Gpus,
    Idle,
    Least,
    Memory,
    Most,
    Name,
    Once,
    PilotUrl,
    Plan,
    Ttl,
    serve,
)  # fmt: skip
from penstock.command.options import Token, Url

if TYPE_CHECKING:
    from penstock.cluster.provisioner import Provisioner


def ray(
    url: Url = None,
    token: Token = None,
    name: Name = None,
    most: Most = 10,
    least: Least = 0,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    memory: Memory = "2GiB",
    ttl: Ttl = 3600.0,
    idle: Idle = 60.0,
    once: Once = False,
    pilot_url: PilotUrl = None,
    state_dir: Folder = None,
    every: Every = 5.0,
    plan: Plan = False,
    down: Down = False,
    address: Annotated[
        str, typer.Option("--address", help="of Ray: HOST:PORT of its head, or that of this node")
    ] = "auto",
    strategy: Annotated[
        str, typer.Option("--strategy", help="of a gang's placement group: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD")
    ] = "PACK",
    python: Annotated[
        str, typer.Option("--python", help="interpreter with Penstock on the nodes (that of Ray's workers)")
    ] = "",
    pilot_dir: Annotated[
        str, typer.Option("--pilot-dir", help="folder on the nodes for the state of pilots (the temporary one)")
    ] = "",
) -> None:
    """Submit, grow, shrink and cancel pilots on Ray. Runs on a node of the cluster, until it is stopped."""
    cluster = Cluster("ray", url, token, name, pilot_url, state_dir, most, least, cpus, gpus, memory, ttl, idle, once)

    def make(folder: Path) -> Provisioner:
        from penstock.cluster.ray.engine import Options, Ray

        return Ray(Options(address, f"penstock-{cluster.name or cluster.engine}", strategy, python, pilot_dir))

    serve(cluster, make, every_s=every, plan=plan, down=down)
