"""What keeps a server from doing its work, as the API shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock_server.schemas.api import Answer, Timestamp

ConditionCode = Literal["database_away", "database_damaged", "storage_full"]


class ServerCondition(Answer):
    """Something that keeps the server from storing what it receives."""

    code: ConditionCode = Field(description="as in the 503 of what is refused meanwhile")
    since: Timestamp = Field(description="when the server noticed it")
    summary: str
    detail: str = Field(description="what the database or the operating system reported")
    meanwhile: str = Field(description="what goes on, and what does not")
    advice: str
