"""What a script logs beside numbers: tables and histograms, checked where they are made. No torch.

Tensors and arrays are taken by what they can do (`item`, `detach`), so that a script without torch can log as well.
Source of the idea: `wandb.Table` and `wandb.Histogram`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from penstock.protocol.media import MAX_BINS, MAX_COLUMN_NAME, MAX_COLUMNS, MAX_ROWS, packed
from penstock.telemetry.metrics import checked_name

Plain = str | bool | int | float | None


class Table:
    """Rows of cells under named columns, as `log({"confusion": Table(columns, rows)})` sends them.

    `columns`: 1 to 50 names. `rows`: at most 10,000 sequences of as many cells: text, numbers, truth values or None,
    and arrays or tensors of one element. Numbers that are not finite are shown as empty. Raises TypeError for another
    cell, ValueError for another size.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[object]] = ()) -> None:
        self.columns = tuple(_column(name) for name in columns)
        if not 1 <= len(self.columns) <= MAX_COLUMNS:
            raise ValueError(f"a Table has {len(self.columns)} columns; expected 1 to {MAX_COLUMNS}")
        self._rows: list[list[Plain]] = []
        for row in rows:
            self.add_row(*row)

    def __len__(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: object) -> None:
        """Append a row, one cell for each column. Raises as the class does."""
        number = len(self._rows)
        if len(cells) != len(self.columns):
            raise ValueError(
                f"row {number} of a Table has {len(cells)} cells; expected {len(self.columns)}, one for each column"
            )
        if number >= MAX_ROWS:
            raise ValueError(f"a Table takes at most {MAX_ROWS:,} rows; log fewer, such as the worst or a sample")
        self._rows.append([_cell(cell, number, name) for name, cell in zip(self.columns, cells, strict=True)])

    def content(self) -> dict[str, Any]:
        """Return what is sent (`protocol.media.TableContent`): of the rows as they are now."""
        return {"type": "table", "columns": list(self.columns), "rows": [list(row) for row in self._rows]}


class Histogram:
    """How values are distributed, as `log({"weights": Histogram(values)})` sends it.

    `values`: numbers of any shape, an array or a tensor; those that are not finite are counted apart. `bins`: 1 to 512
    of the same width between the lowest and the highest value. Raises ValueError for another number of bins, if no
    value is finite, or if their range is not.
    """

    def __init__(self, values: object, bins: int = 64) -> None:
        if not 1 <= bins <= MAX_BINS:
            raise ValueError(f"a Histogram has {bins} bins; expected 1 to {MAX_BINS}")
        found = _numbers(values)
        finite = found[np.isfinite(found)]
        if not len(finite):
            raise ValueError(f"a Histogram of {len(found)} values, none of them finite: there is nothing to count")
        counts, edges = np.histogram(finite, bins=bins, range=_range(finite, bins))
        self.counts: list[int] = counts.tolist()
        self.edges: list[float] = edges.tolist()
        self.left_out = len(found) - len(finite)

    @classmethod
    def of_counts(cls, edges: Sequence[SupportsFloat], counts: Sequence[int]) -> Histogram:
        """Return a histogram that the script has counted itself. `edges`: ascending, one more than counts.

        Raises ValueError if they are not, or more than 512 counts.
        """
        made = cls.__new__(cls)
        made.edges, made.counts, made.left_out = [float(edge) for edge in edges], [int(one) for one in counts], 0
        ascend = all(low < high for low, high in zip(made.edges, made.edges[1:], strict=False))
        is_finite = all(math.isfinite(edge) for edge in made.edges)
        if len(made.edges) != len(made.counts) + 1 or not ascend or not is_finite:
            raise ValueError(
                f"a Histogram of {len(made.counts)} counts has {len(made.edges)} edges; expected one more than counts, "
                "finite and ascending"
            )
        if not 1 <= len(made.counts) <= MAX_BINS or min(made.counts) < 0:
            raise ValueError(f"a Histogram has {len(made.counts)} counts; expected 1 to {MAX_BINS}, none below 0")
        return made

    def content(self) -> dict[str, Any]:
        """Return what is sent (`protocol.media.HistogramContent`)."""
        return {"type": "histogram", "edges": self.edges, "counts": self.counts, "left_out": self.left_out}


Loggable = SupportsFloat | Table | Histogram


def split(values: Mapping[str, Loggable]) -> tuple[dict[str, SupportsFloat], dict[str, dict[str, Any]]]:
    """Return the scalars and the content of tables and histograms, by name. Raises ValueError if one is too large.

    And for a name that cannot be stored.
    """
    scalars: dict[str, SupportsFloat] = {}
    media: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if isinstance(value, Table | Histogram):
            media[checked_name(name)] = value.content()
            try:
                packed(media[name])
            except ValueError as error:
                raise ValueError(f"{name!r} cannot be logged: {error}; log fewer rows or columns") from error
        else:
            scalars[name] = value
    return scalars, media


def _column(name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_COLUMN_NAME:
        raise ValueError(f"a column of a Table is named {name!r}; expected text of 1 to {MAX_COLUMN_NAME} characters")
    return _text(name)


def _cell(value: object, row: int, column: str) -> Plain:
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (ValueError, RuntimeError) as error:  # numpy's and torch's for more than one element
            raise TypeError(f"the cell of row {row}, column {column!r}, is {value!r}; expected one element") from error
    match value:
        case str():
            return _text(value)
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int():
            return value
        case _:
            raise TypeError(
                f"the cell of row {row}, column {column!r}, is {value!r}; expected text, a number, a bool or None"
            )


def _text(text: str) -> str:
    """Return text without lone surrogates, which no UTF-8 holds."""
    return text.encode("utf-8", "replace").decode()


def _range(values: npt.NDArray[np.float64], bins: int) -> tuple[float, float]:
    """Return the lowest and the highest value, or more where floats have no room for the edges of bins between them."""
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(high - low):
        raise ValueError(f"a Histogram of values from {low:g} to {high:g}: their range is no finite number")
    if (np.diff(np.linspace(low, high, bins + 1)) <= 0).any():
        pad = max(0.5, float(np.spacing(max(abs(low), abs(high)))) * bins)
        return low - pad, high + pad
    return low, high


def _numbers(values: Any) -> npt.NDArray[np.float64]:
    if hasattr(values, "detach"):  # a tensor of any device and dtype
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)
