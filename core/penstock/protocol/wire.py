"""JSON messages on websockets (docs/protocol.md): what `agent`, `attach` and `stream` have in common.

Unknown fields are ignored, so that an older peer reads a newer one's messages; a message that lacks a field or has one
of the wrong type raises `PeerError`. What is sent holds the fields that were set, and the type.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.errors import PeerError
from penstock.protocol.jobspec import Text

Short = Annotated[Text, Field(max_length=255)]
Epoch = Annotated[int, Field(ge=0, lt=1 << 31)]
Pid = Annotated[int, Field(ge=0, lt=1 << 31)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
T = TypeVar("T")


class Message(BaseModel):
    """Base of every message and of what messages hold."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def fields(self) -> dict[str, Any]:
        """Return the message as plain data: the fields that were set, and its type."""
        kind = {"type": found} if (found := getattr(self, "type", None)) else {}
        return {**kind, **self.model_dump(exclude_unset=True)}

    def encode(self) -> str:
        """Return the message as it goes over the websocket."""
        return json.dumps(self.fields())


def parse(adapter: TypeAdapter[T], text: str | bytes) -> T:
    """Parse one message. Raises PeerError that names the field."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise PeerError(f"message is not understood: {where}: {first['msg']}; it starts {text[:80]!r}") from error
