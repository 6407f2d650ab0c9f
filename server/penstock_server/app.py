"""The ASGI application: routers behind one guard, errors as problems, one envelope around it all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI

from penstock.version import __version__
from penstock_server import problems
from penstock_server.clock import Clock
from penstock_server.guard import guard
from penstock_server.middleware import Envelope
from penstock_server.problems import ProblemBody
from penstock_server.routers import access, agent_ws, attach_ws, jobs, nodes, operations, pages, stream_ws
from penstock_server.runtime import Runtime, open_runtime
from penstock_server.settings import Settings

ROUTERS: tuple[APIRouter, ...] = (
    jobs.router,
    jobs.replicas,
    nodes.router,
    nodes.snapshots,
    access.router,
    operations.router,
    agent_ws.router,
    attach_ws.router,
    stream_ws.router,
    pages.router,  # last: it takes every path that is left
)


def create_app(settings: Settings, *, clock: Clock | None = None) -> FastAPI:
    """Return an application that opens its runtime when it starts and closes it when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_runtime(settings, clock) as runtime:
            app.state.runtime = runtime
            yield

    return _assemble(FastAPI(lifespan=lifespan, **_OPTIONS))


def app_of(runtime: Runtime) -> FastAPI:
    """Return an application over a runtime that is open already."""
    app = FastAPI(**_OPTIONS)
    app.state.runtime = runtime
    return _assemble(app)


_OPTIONS: dict[str, Any] = {
    "title": "Penstock",
    "version": __version__,
    "summary": "Control plane of Penstock: jobs, nodes and live telemetry.",
    # The framework's own description routes would stand outside the guard; `operations` has ours.
    "openapi_url": None,
    "docs_url": None,
    "redoc_url": None,
}


def _assemble(app: FastAPI) -> FastAPI:
    problem = {"model": ProblemBody, "description": "Problem (RFC 9457)"}
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(guard)], responses={"4XX": problem, "5XX": problem})
    problems.install(app)
    app.add_middleware(Envelope)
    return app
