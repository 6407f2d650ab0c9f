"""Tables and histograms that a script logs beside its scalars: what a SCALARS frame and the REST API hold of them.

Pure. The bounds hold on both sides: `penstock.telemetry` refuses what is beyond them where the script made it, and a
server refuses and counts what another sender makes.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from penstock.errors import PeerError

MAX_ROWS = 10_000
MAX_COLUMNS = 50
MAX_BINS = 512
MAX_BYTES = 1 << 20
"""Of the content as compact JSON."""
MAX_COLUMN_NAME = 200

Cell = StrictBool | StrictInt | StrictFloat | StrictStr | None
"""A value of a table; None: there is none, or it is not finite."""
ColumnName = Annotated[str, Field(max_length=MAX_COLUMN_NAME)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Content(BaseModel):
    """Base of what is logged."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableContent(Content):
    """Rows of cells under named columns, in the order in which the script gave them."""

    type: Literal["table"]
    columns: Annotated[list[ColumnName], Field(min_length=1, max_length=MAX_COLUMNS)]
    rows: Annotated[list[list[Cell]], Field(max_length=MAX_ROWS)]

    @model_validator(mode="after")
    def _rows_are_whole(self) -> TableContent:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {number} has {len(row)} cells; expected one for each of {len(self.columns)} columns"
                )
        return self


class HistogramContent(Content):
    """Counts of values between ascending edges, of which there is one more. `left_out`: values that are not finite."""

    type: Literal["histogram"]
    edges: Annotated[list[Finite], Field(min_length=2, max_length=MAX_BINS + 1)]
    counts: Annotated[list[Count], Field(min_length=1, max_length=MAX_BINS)]
    left_out: Count = 0

    @model_validator(mode="after")
    def _bins_are_whole(self) -> HistogramContent:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts have {len(self.edges)} edges; expected one more than counts")
        if any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("the edges do not ascend")
        return self


MediaContent = Annotated[TableContent | HistogramContent, Field(discriminator="type")]
MEDIA: TypeAdapter[TableContent | HistogramContent] = TypeAdapter(MediaContent)


def packed(content: dict[str, Any]) -> bytes:
    """Return content as compact JSON. Raises ValueError if it is larger than `MAX_BYTES`, or holds what JSON cannot."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is {len(text):,} bytes as JSON; expected at most {MAX_BYTES:,}")
    return text


def received(content: object) -> tuple[str, bytes]:
    """Return the type of content that another process sent, and its JSON. Raises PeerError if it is none."""
    try:
        found = MEDIA.validate_python(content)
        return found.type, packed(found.model_dump(mode="json"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "/".join(str(part) for part in first["loc"])
        raise PeerError(f"it is no table and no histogram: /{where}: {first['msg']}") from error
    except ValueError as error:
        raise PeerError(str(error)) from error
