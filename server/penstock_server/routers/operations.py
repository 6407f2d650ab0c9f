"""What operators and their tools ask: health, metrics, the API's own description."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from prometheus_client import generate_latest

from penstock_server.auth.principal import by_project, scoped, unauthenticated
from penstock_server.db import DatabaseAway
from penstock_server.problems import Problem
from penstock_server.routers.deps import Server
from penstock_server.routers.guarded import guarded_router
from penstock_server.schemas import api
from penstock_server.schemas.conditions import ServerCondition
from penstock_server.services.conditions import check

router = guarded_router(tag="operations")

PROMETHEUS = "text/plain; version=0.0.4"


@router.get("/healthz", operation_id="getHealth")
@unauthenticated
async def get_health() -> api.Health:
    """The process lives."""
    return api.Health()


@router.get("/readyz", operation_id="getReadiness")
@unauthenticated
async def get_readiness(server: Server) -> api.Health:
    """The server can do its work: the database answers, and takes writes."""
    try:
        await check(server.database)
    except DatabaseAway as error:
        raise Problem(503, error.code, str(error)) from error
    except Exception as error:  # whatever the driver raises, the answer is the same
        raise Problem(503, "database_away", f"the database does not answer: {type(error).__name__}") from error
    return api.Health()


@router.get("/api/v1/conditions", operation_id="listConditions")
@scoped("read")
@by_project  # they are of the whole server
async def list_conditions(server: Server) -> api.Items[ServerCondition]:
    """List what keeps the server from storing what it receives; nothing if all is well. Needs no database."""
    return api.Items(items=server.conditions.all())


@router.get(
    "/metrics",
    operation_id="getServerMetrics",
    response_class=Response,
    responses={200: {"content": {PROMETHEUS: {"schema": {"type": "string"}}}}},
)
@scoped("read")
async def get_server_metrics(server: Server) -> Response:
    """Prometheus metrics of the server."""
    server.meters.agents.set(len(server.agents.all()))
    await server.storage.count(server.meters)
    return Response(generate_latest(server.meters.registry), media_type=PROMETHEUS)


@router.get("/openapi.json", operation_id="getOpenApi", include_in_schema=False)
@scoped("read")
@by_project
async def get_openapi(request: Request) -> dict[str, Any]:
    """The description of this API."""
    described: dict[str, Any] = request.app.openapi()
    return described
