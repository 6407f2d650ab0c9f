"""What endpoints ask for: the runtime, the principal, and page arguments."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import HTTPConnection

from penstock_server.auth.principal import Principal
from penstock_server.guard import principal_of
from penstock_server.runtime import Runtime
from penstock_server.services.pages import DEFAULT_SIZE, MAX_SIZE, PLACED_TOKEN, TOKEN


def runtime_of(conn: HTTPConnection) -> Runtime:
    """Return the runtime of the app that serves this connection."""
    runtime = conn.app.state.runtime
    assert isinstance(runtime, Runtime)
    return runtime


def version_of(tag: str | None) -> int | None:
    """Return the version that an ETag stands for."""
    return None if tag is None else int(tag.strip('"'))


def tag_of(text: str | None) -> str | None:
    """Return an ETag without its quotes."""
    return None if text is None else text.strip('"')


Server = Annotated[Runtime, Depends(runtime_of)]
Asker = Annotated[Principal, Depends(principal_of)]
Id = Annotated[str, Path(json_schema_extra={"pattern": "^[^/:]+$"})]
ETag = Annotated[str, Field(pattern=r'^("[0-9]{1,9}"|[0-9]{1,9})$')]
IfMatch = Annotated[ETag | SkipJsonSchema[None], Header(description="ETag of the job as the caller saw it")]
Tag = Annotated[str, Field(pattern=r'^("[0-9a-f]{1,64}"|[0-9a-f]{1,64})$')]
IfTag = Annotated[Tag | SkipJsonSchema[None], Header(alias="If-Match", description="its `etag`, as the caller saw it")]
TAGGED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"ETag": {"schema": {"type": "string"}, "description": "for If-Match of a change"}}}
}
PageSize = Annotated[int, Query(ge=1, le=MAX_SIZE, description=f"default {DEFAULT_SIZE}")]
PlacedToken = Annotated[
    str | None, Query(json_schema_extra={"pattern": PLACED_TOKEN}, description="next_page_token of the page before")
]
PageToken = Annotated[
    str | None, Query(json_schema_extra={"pattern": TOKEN}, description="next_page_token of the page before")
]
