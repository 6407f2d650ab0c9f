"""Parquet and Arrow files as the columns that text gives: each slot by its name, several values as lists.

Offsets count rows here. A row with a null, a number that is not finite, or too many values is a bad line, with the row
as its line and the slot's place as its column. A pipe command is refused (`dataset_base`). Needs pyarrow (extra
`parquet`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.dataset_base import Reading
from penstock.dataset.faults import DataError, file_error
from penstock.dataset.slots import Slot
from penstock.dataset.sources import PARQUET
from penstock.errors import UserError
from penstock.native import _feed

_ROWS = 16_384  # of a piece: what a core's cache holds of some tens of columns


def read_into(
    target: _feed.Stream | _feed.Chunk, file: int, path: str, slots: Sequence[Slot], reading: Reading, *, begin: int = 0
) -> tuple[int, list[DataError]]:
    """Append the rows of a file from row `begin` on; return how many were left out, and the first errors of these.

    Raises DataError for a bad row under the policy 'raise', and for what is wrong with the file.
    """
    row, skipped, errors = 0, 0, list[DataError]()
    for piece in _pieces(path, slots):
        first, num_rows = row, piece.num_rows
        row += num_rows
        if row <= begin:
            continue
        if first < begin:
            piece, first = piece.slice(begin - first), begin
        good, found = _good_rows(path, slots, piece, first)
        if found and reading.policy == "raise":
            raise found[0]
        skipped += int((~good).sum())
        errors += found
        for begin_of_run, num_good in _runs(good):
            run = piece.slice(begin_of_run, num_good)
            columns = [_column(run.column(i), slot) for i, slot in enumerate(slots)]
            if isinstance(target, _feed.Chunk):
                target.extend(columns, num_good)
                continue
            target.extend(columns, num_good, file=file, offset=first + begin_of_run)
            if target.stopped:
                return skipped, errors
    if isinstance(target, _feed.Stream):
        target.end(file=file, offset=row)
    return skipped, errors


def _runs(good: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Give the begin and length of each run of rows that are good."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2):
        yield int(begin), int(end - begin)


def _pyarrow() -> Any:
    try:
        import pyarrow.compute  # only where such files are read: an optional extra
    except ImportError as error:
        raise UserError(
            "Parquet and Arrow files need pyarrow, which is not installed; install it with: "
            "pip install 'penstock[parquet]'"
        ) from error
    return pyarrow


def _pieces(path: str, slots: Sequence[Slot]) -> Iterator[Any]:
    """Give the slots' columns, as record batches."""
    pyarrow = _pyarrow()
    names = [slot.name for slot in slots]
    try:
        if path.endswith(PARQUET):
            import pyarrow.parquet as parquet  # see _pyarrow

            with parquet.ParquetFile(path) as opened:
                _check_names(path, names, opened.schema_arrow.names)
                for piece in opened.iter_batches(batch_size=_ROWS, columns=names):
                    yield piece.select(names)
            return
        with pyarrow.OSFile(path) as file:  # not mapped: a file that is cut short would end the process
            opened = pyarrow.ipc.open_file(file)
            _check_names(path, names, opened.schema.names)
            for number in range(opened.num_record_batches):
                whole = opened.get_batch(number).select(names)
                for first in range(0, whole.num_rows, _ROWS):
                    yield whole.slice(first, _ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise file_error(path, f"cannot be read: {error}") from error


def _check_names(path: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise file_error(path, f"has no column {missing[0]!r}; it has {', '.join(map(repr, there))}")


def _good_rows(
    path: str, slots: Sequence[Slot], piece: Any, first: int
) -> tuple[npt.NDArray[np.bool_], list[DataError]]:
    """Return which rows can be taken, and an error for each of the others (ten at most)."""
    good = np.ones(piece.num_rows, np.bool_)
    reasons: dict[int, tuple[int, str]] = {}
    for place, slot in enumerate(slots, 1):
        column = piece.column(place - 1)
        for bad, reason in _bad_rows(path, column, slot):
            for row in np.flatnonzero(bad & good)[:10]:
                reasons.setdefault(int(row), (place, f"slot {slot.name!r} {reason}"))
            good &= ~bad
    errors = [
        DataError(
            f"{path}: row {first + row + 1}, column {place}: {reason}",
            file=path, line=first + row + 1, column=place, reason=reason,
        )
        for row, (place, reason) in sorted(reasons.items())[:10]
    ]  # fmt: skip
    return good, errors


def _bad_rows(path: str, column: Any, slot: Slot) -> Iterator[tuple[npt.NDArray[np.bool_], str]]:
    pyarrow = _pyarrow()
    types, compute = pyarrow.types, pyarrow.compute
    kind = column.type
    nested = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    of = kind.value_type if nested else kind
    if not (types.is_integer(of) or (slot.is_float and types.is_floating(of))) or nested != (slot.width != 1):
        raise file_error(
            path,
            f"column {slot.name!r} is {kind}; expected {'lists of ' if slot.width != 1 else ''}"
            f"{'numbers' if slot.is_float else 'whole numbers'}" + (f". {slot.hint}" if nested and slot.hint else ""),
        )
    yield _mask(column.is_null()), "has no value (null)"
    values = column.flatten() if nested else column
    bad = _mask(values.is_null())
    if slot.is_float:
        bad |= ~_mask(compute.fill_null(compute.is_finite(compute.cast(values, "float32", safe=False)), True))
    if not nested:
        yield bad, "has a value that is no finite number of float32"
        return
    lengths = _lengths(column)
    if slot.width:
        yield lengths != slot.width, f"has another number of values than the {slot.width} of its variable"
    else:
        yield lengths == 0, "has no values: pad the list with a 0, say"
    owner = np.repeat(np.arange(len(lengths)), lengths)
    yield np.bincount(owner, weights=bad, minlength=len(lengths)) > 0, "has a value that is no finite number"


def _mask(booleans: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(booleans.to_numpy(zero_copy_only=False), np.bool_)


def _lengths(column: Any) -> npt.NDArray[np.int64]:
    compute = _pyarrow().compute
    return np.asarray(compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False), np.int64)


def _column(column: Any, slot: Slot) -> tuple[_feed.Values, npt.NDArray[np.int64] | None]:
    """Return the values of good rows as one array, and the lengths of a ragged slot."""
    values = column if slot.width == 1 else column.flatten()
    array = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    typed: _feed.Values = array.astype(np.float32) if slot.is_float else array.astype(np.int64)
    return typed, None if slot.width else _lengths(column)
