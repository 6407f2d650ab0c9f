"""cluster ray: pilots as detached actors in placement groups (docs/clusters.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.cluster import Cluster, MakeProvisioner, engine_command

if TYPE_CHECKING:
    from penstock.cluster.provisioner import Provisioner


@engine_command
def ray(
    cluster: Cluster,
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
) -> MakeProvisioner:
    """Submit, grow, shrink and cancel pilots on Ray. Runs on a node of the cluster, until it is stopped."""

    def make(folder: Path) -> Provisioner:
        from penstock.cluster.ray.engine import Options, Ray

        return Ray(Options(address, f"penstock-{cluster.name or cluster.engine}", strategy, python, pilot_dir))

    return make
