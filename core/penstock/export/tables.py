"""Tables of operators as CSV or Parquet files, written process by process."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import TYPE_CHECKING, BinaryIO

from penstock.errors import SpecError
from penstock.export.statistics import COLUMNS, Row

if TYPE_CHECKING:
    from pyarrow import Schema

Tables = Iterable[list[Row]]
_FLOATS = frozenset({"mean_ns", "p50_ns", "p99_ns"})
_TEXTS = frozenset({"process", "graph", "name", "type", "kind", "role", "module", "line"})


def write_csv(tables: Tables, file: BinaryIO) -> int:
    """Write rows with a header, UTF-8, an empty field for None; return how many."""
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    count = 0
    for rows in tables:
        writer.writerows(astuple(row) for row in rows)
        count += len(rows)
    text.detach()
    return count


def parquet_writer() -> Callable[[Tables, BinaryIO], int]:
    """Return the writer of Parquet files. Raises SpecError if pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SpecError(
            "--format parquet needs pyarrow: pip install 'penstock[parquet]', or take --format csv"
        ) from error

    schema: Schema = pa.schema([(name, _type_of(pa, name)) for name in COLUMNS])

    def write(tables: Tables, file: BinaryIO) -> int:
        count = 0
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in tables:
                columns = zip(*map(astuple, rows), strict=True)
                writer.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True)), schema=schema))
                count += len(rows)
        return count

    return write


def _type_of(pa: object, name: str) -> object:
    kind = "float64" if name in _FLOATS else "string" if name in _TEXTS else "int64"
    return getattr(pa, kind)()
