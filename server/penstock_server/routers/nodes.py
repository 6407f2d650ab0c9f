"""Nodes and snapshots: what agents use, and what an administrator does with nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import FileResponse

from penstock_server.auth.certificates import check_node
from penstock_server.auth.principal import by_project, scoped, unauthenticated
from penstock_server.description import problems
from penstock_server.guard import certificate_of, count_wrong
from penstock_server.problems import NotFound, Problem
from penstock_server.routers.deps import TAGGED, Asker, Id, IfTag, Server, tag_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.schemas import api
from penstock_server.schemas.nodes import NodeLoad

router = guarded_router("/api/v1", tag="nodes")
CLUSTER_NAME = r"^[a-z0-9][a-z0-9-]{0,30}$"


@router.get("/nodes", operation_id="listNodes")
@scoped("read")
@by_project  # nodes are of all projects, and no job is in this answer
async def list_nodes(server: Server) -> api.Page[api.Node]:
    """List all nodes."""
    return api.Page(items=await server.nodes.page())


@router.get("/nodes/{node_id:id}", operation_id="getNode", responses=TAGGED)
@scoped("read")
@by_project  # as the list
async def get_node(server: Server, response: Response, node_id: Id) -> api.Node:
    """Return one node."""
    return _tagged(response, await server.nodes.get(node_id))


@router.get("/node-loads", operation_id="listNodeLoads")
@scoped("read")
@by_project  # as the list
async def list_node_loads(server: Server) -> api.Items[NodeLoad]:
    """Return processor and memory of each node over the last hour, a mean for each minute."""
    return api.Items(items=await server.nodes.loads())


def _tagged(response: Response, node: api.Node) -> api.Node:
    response.headers["ETag"] = f'"{node.etag}"'
    return node


@router.post("/nodes", status_code=201, operation_id="joinNode", responses=problems(401, 403, 429))
@unauthenticated  # the join token in the body is what opens it, once
async def join_node(server: Server, request: Request, body: api.NodeJoin) -> api.NodeJoined:
    """Turn a join token into a node's identity."""
    if server.settings.tls_client_ca is not None:
        check_node(certificate_of(request), body.name)  # before the token is used up
    try:
        return await server.nodes.join(body)
    except Problem as problem:
        if problem.status == 401:
            count_wrong(request, server)
        raise


@router.post("/nodes/{node_id:id}:cordon", status_code=202, operation_id="cordonNode", responses=problems(409, 412))
@scoped("admin")
async def cordon_node(server: Server, response: Response, node_id: Id, if_match: IfTag = None) -> api.Node:
    """Place nothing more on a node."""
    return _tagged(response, await server.nodes.want(node_id, "cordon", tag=tag_of(if_match)))


@router.post("/nodes/{node_id:id}:uncordon", status_code=202, operation_id="uncordonNode", responses=problems(409, 412))
@scoped("admin")
async def uncordon_node(server: Server, response: Response, node_id: Id, if_match: IfTag = None) -> api.Node:
    """Use a node again."""
    return _tagged(response, await server.nodes.want(node_id, "run", tag=tag_of(if_match)))


@router.post("/nodes/{node_id:id}:drain", status_code=202, operation_id="drainNode", responses=problems(409, 412))
@scoped("admin")
async def drain_node(
    server: Server, response: Response, node_id: Id, body: api.NodeDrain | None = None, if_match: IfTag = None
) -> api.Node:
    """Place nothing more on a node, and call it drained once what runs there has ended, or was preempted."""
    deadline_s = None if body is None else body.deadline_s
    return _tagged(response, await server.nodes.want(node_id, "drain", tag=tag_of(if_match), deadline_s=deadline_s))


@router.get("/pilots", operation_id="listPilots")
@scoped("read")
@by_project  # as nodes
async def list_pilots(server: Server, asker: Asker) -> api.Items[api.Pilot]:
    """List the agents that other schedulers were asked for, as `penstock cluster` has reported them last."""
    found = server.pilots.all()
    if asker.projects is not None:  # reasons name the jobs that pilots are for
        found = [pilot.model_copy(update={"reason": ""}) for pilot in found]
    return api.Items(items=found)


@router.put("/clusters/{cluster}/pilots", operation_id="reportPilots")
@scoped("admin")
async def report_pilots(
    server: Server, cluster: Annotated[str, Path(pattern=CLUSTER_NAME)], body: api.PilotReports
) -> api.Items[api.Pilot]:
    """Replace what is known of the pilots of a cluster."""
    server.pilots.report(cluster, body.pilots)
    return api.Items(items=server.pilots.all())


snapshots = guarded_router("/api/v1", tag="snapshots")


@snapshots.post(
    "/snapshots",
    status_code=201,
    operation_id="uploadSnapshot",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
@scoped("submit")
@by_project  # stored under its content's hash, which gives nothing to those who do not know it
async def upload_snapshot(server: Server, request: Request) -> api.Snapshot:
    """Store the tar.gz of a workdir under its SHA-256."""
    return await server.storage.save_snapshot(request.stream())


@snapshots.get(
    "/snapshots/{sha256:id}",
    operation_id="downloadSnapshot",
    response_class=FileResponse,
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
)
@scoped("agent", "read")
async def download_snapshot(server: Server, sha256: Id) -> FileResponse:
    """Return the tar.gz of a workdir."""
    path = await server.storage.snapshot(sha256)
    if not path.is_file():
        raise NotFound("snapshot", sha256)
    return FileResponse(path, media_type="application/gzip")
