"""What endpoints ask for: the runtime, the principal, and page arguments."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import HTTPConnection

from penstock_server.auth.principal import Principal
from penstock_server.guard import principal_of
from penstock_server.runtime import Runtime
from penstock_server.services.pages import DEFAULT_SIZE, MAX_SIZE


def runtime_of(conn: HTTPConnection) -> Runtime:
    """Return the runtime of the app that serves this connection."""
    runtime = conn.app.state.runtime
    assert isinstance(runtime, Runtime)
    return runtime


Server = Annotated[Runtime, Depends(runtime_of)]
Asker = Annotated[Principal, Depends(principal_of)]
PageSize = Annotated[int, Query(ge=1, le=MAX_SIZE, description=f"default {DEFAULT_SIZE}")]
PageToken = Annotated[str | None, Query(description="next_page_token of the page before")]
