"""Routers of which each HTTP route and websocket passes the guard.

Given to the router, not as it is included: what a route needs is worked out once in a process, as the route is
declared, and not once more for each application.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends

from penstock_server.guard import guard
from penstock_server.problems import ProblemBody


def guarded_router(prefix: str = "", *, tag: str | None = None, include_in_schema: bool = True) -> APIRouter:
    """Return a router without routes."""
    return APIRouter(
        prefix=prefix,
        tags=[] if tag is None else [tag],
        include_in_schema=include_in_schema,
        dependencies=[Depends(guard)],
        # the model stands here for its schema; `description` writes the responses anew
        responses={500: {"model": ProblemBody}},
    )
