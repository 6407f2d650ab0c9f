"""Bodies of the API: sparse tables of parameter servers."""

from __future__ import annotations

from pydantic import Field

from penstock_server.schemas.api import Answer


class TablePart(Answer):
    """One parameter server's part of a sparse table, as of its newest report; sums since the server's start."""

    pserver: int
    rows: int
    held_bytes: int = Field(description="of rows, the optimizer's state and the index")
    pulled: int = Field(description="ids that were looked up, duplicates included")
    absent: int = Field(description="of these, ids that had no row yet")
    pushed: int = Field(description="ids of gradients, duplicates included")


class HotId(Answer):
    """An id whose row is updated often."""

    id: str = Field(description="a whole number of 64 bits")
    share: float = Field(description="of the table's pushed ids, estimated from a sample of the newest")
    pserver: int


class SparseTable(Answer):
    """A sparse table over all parameter servers."""

    name: str
    width: int = Field(description="values of a row, the optimizer's state not counted")
    capacity: int
    rows: int
    held_bytes: int
    pulled: int
    absent: int
    pushed: int
    skew_rows: float = Field(description="rows of the largest part over the mean: 1 is even")
    skew_pushes: float
    hot: list[HotId]
    parts: list[TablePart]


class SparseTables(Answer):
    """The sparse tables of a job's newest attempt."""

    job_id: str
    attempt: int
    tables: list[SparseTable]
