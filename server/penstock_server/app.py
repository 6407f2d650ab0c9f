"""The ASGI application: routers behind one guard, errors as problems, one envelope around it all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI

from penstock.version import __version__
from penstock_server import description, problems
from penstock_server.clock import Clock
from penstock_server.middleware import Envelope
from penstock_server.routers import (
    access,
    agent_ws,
    attach_ws,
    jobs,
    nodes,
    operations,
    pages,
    projects,
    stream_ws,
    webhooks,
)
from penstock_server.runtime import Runtime, open_runtime
from penstock_server.settings import Settings

ROUTERS: tuple[APIRouter, ...] = (
    jobs.router,
    jobs.replicas,
    projects.router,
    nodes.router,
    nodes.snapshots,
    access.router,
    webhooks.router,
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

    return _assemble(_Application(lifespan=lifespan, **_OPTIONS))


def app_of(runtime: Runtime) -> FastAPI:
    """Return an application over a runtime that is open already."""
    app = _Application(**_OPTIONS)
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


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the description of this API. Made once."""
        if self.openapi_schema is None:
            runtime: Runtime | None = getattr(self.state, "runtime", None)
            cookie = description.SESSION_COOKIE if runtime is None else runtime.tokens.cookie
            description.complete(super().openapi(), ROUTERS, cookie=cookie)
        assert self.openapi_schema is not None  # FastAPI's method keeps what it made
        return self.openapi_schema


def _assemble(app: FastAPI) -> FastAPI:
    for router in ROUTERS:  # not `include_router`, which works out each route anew
        app.router.routes.extend(router.routes)
    app.state.methods_of = partial(description.methods_of, routers=ROUTERS)
    problems.install(app)
    app.add_middleware(Envelope)
    return app
