"""cluster kubernetes: pilots as the pods of Indexed Jobs (docs/clusters.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.cluster import Cluster, MakeProvisioner, engine_command

if TYPE_CHECKING:
    from penstock.cluster.provisioner import Provisioner


@engine_command
def kubernetes(
    cluster: Cluster,
    image: Annotated[str, typer.Option("--image", help="of the pods: Python with Penstock on PATH")] = "",
    namespace: Annotated[str, typer.Option("--namespace", help="of the pods (that of the context)")] = "",
    context: Annotated[str | None, typer.Option("--context", help="of the kubeconfig (the current one)")] = None,
    queue: Annotated[str, typer.Option("--queue", help="LocalQueue of Kueue, which admits each gang whole")] = "",
    node_selector: Annotated[
        list[str] | None, typer.Option("--node-selector", metavar="LABEL=VALUE", help="of the nodes; several times")
    ] = None,
    toleration: Annotated[
        list[str] | None, typer.Option("--toleration", metavar="KEY[=VALUE]:EFFECT", help="of taints; several times")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="variable of the agents; several times")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option("--ca-file", help="authority of the server's certificate")] = None,
    pull_secret: Annotated[str, typer.Option("--pull-secret", help="Secret by which the image is pulled")] = "",
    priority_class: Annotated[str, typer.Option("--priority-class", help="PriorityClass of the pods")] = "",
    gpu_resource: Annotated[str, typer.Option("--gpu-resource", help="what a GPU is called there")] = "nvidia.com/gpu",
) -> MakeProvisioner:
    """Submit, grow, shrink and cancel pilots on Kubernetes, from a kubeconfig or within a pod, until it is stopped."""
    if not image and not cluster.down:
        raise typer.BadParameter("--image is needed: an image with Penstock, see docs/clusters.md")

    def make(folder: Path) -> Provisioner:
        from penstock.cluster.kubernetes import access, manifests
        from penstock.cluster.kubernetes.api import Api
        from penstock.cluster.kubernetes.engine import Kubernetes
        from penstock.command.passing import given  # loads pydantic and yaml

        found = access.find(context, os.environ)
        options = manifests.PodOptions(
            image, namespace or found.namespace, cluster.name or cluster.engine, queue, given(node_selector or ()),
            tuple(toleration or ()), given(env or ()), ca_file.read_text() if ca_file else "", pull_secret,
            priority_class, gpu_resource,
        )  # fmt: skip
        return Kubernetes(Api(found), options)

    return make
