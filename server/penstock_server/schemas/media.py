"""Tables and histograms that jobs log, as the API lists them; their content is `penstock.protocol.media`'s."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock_server.schemas.api import Answer


class MediaItem(Answer):
    """One table or histogram, of one step."""

    id: str
    attempt: int
    step: int
    time_ns: int = Field(description="Unix time by the clock of the process")
    size_bytes: int = Field(description="of its content as JSON")


class MediaSeries(Answer):
    """What a job has logged under one name, oldest first. Of processes other than trainer 0 the name has a suffix."""

    name: str
    type: Literal["table", "histogram"] = Field(description="of the newest")
    removed: int = Field(description="older ones that made room for newer ones")
    items: list[MediaItem]
