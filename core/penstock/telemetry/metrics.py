"""Rows of METRICS, thinned so that a fast step does not flood the database, and checks of a script's own. Pure.

A row stands for its step and the steps since the row before it: LOSS is the loss of exactly its step (NaN if it was not
fetched), SAMPLES, STEP_NS, SYNC_BYTES and SYNC_NS are *means* over its steps, TIME_NS is the end of its step. So
STEP_NS is the step time however many steps a row stands for. SAMPLES / STEP_NS is no throughput: it leaves out what
lies between steps, which the server's `samples_per_s` counts (docs/protocol.md).
A row ends at the newest step of an interval whose loss is known; if none is, after `LOSS_WAIT_S`. With an interval
of 100 ms that is at most 10 rows a second, and one a step for steps slower than that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
import numpy.typing as npt

from penstock.protocol.frames import Array, Column

LOSS_WAIT_S = 0.5

ROW = np.dtype(
    [
        ("step", np.int64), ("end_ns", np.int64), ("loss", np.float64), ("samples", np.int64), ("step_ns", np.int64),
        ("sync_bytes", np.int64), ("sync_ns", np.int64),
    ]
)  # fmt: skip
"""What is known of one finished step."""

Rows = npt.NDArray[np.void]
Columns = dict[Column, Array]


class Thinner:
    """Merges the rows of one watch. Never drops a step: what is held back is part of the next row."""

    def __init__(self) -> None:
        self._held: Rows = np.empty(0, ROW)
        self._waited_s = 0.0

    def add(self, rows: Rows, *, interval_s: float) -> Columns | None:
        """Take the rows of an interval; return the columns of a METRICS frame if a row is ready."""
        self._held = np.concatenate([self._held, rows]) if len(self._held) else rows
        self._waited_s += interval_s
        known = np.flatnonzero(~np.isnan(self._held["loss"]))
        if len(known):
            return self._emit(int(known[-1]) + 1)
        if len(self._held) and self._waited_s >= LOSS_WAIT_S:
            return self._emit(len(self._held))
        return None

    def flush(self) -> Columns | None:
        """Return what is held back."""
        return self._emit(len(self._held)) if len(self._held) else None

    def _emit(self, count: int) -> Columns:
        merged, self._held = self._held[:count], self._held[count:]
        self._waited_s = 0.0
        last = merged[-1:]
        return {
            Column.STEP: last["step"],
            Column.TIME_NS: last["end_ns"],
            Column.LOSS: last["loss"],
            Column.SAMPLES: _mean(merged["samples"]),
            Column.STEP_NS: _mean(merged["step_ns"]),
            Column.SYNC_BYTES: _mean(merged["sync_bytes"]),
            Column.SYNC_NS: _mean(merged["sync_ns"]),
        }


OWN = "penstock/"
"""How the names of Penstock's own series begin that stand among those of scripts; no script can use them."""
EVALUATION_LOSS = f"{OWN}eval_loss"


def evaluation_apart(row: Columns) -> tuple[Columns, dict[str, float | None]]:
    """Return a row of evaluation without its loss, and the loss as a scalar of its own; nothing if it has none."""
    loss = float(row[Column.LOSS][-1])
    scalars = {} if math.isnan(loss) else {EVALUATION_LOSS: _finite(loss)}
    return {**row, Column.LOSS: np.array([math.nan])}, scalars


def _mean(values: npt.NDArray[Any]) -> Array:
    return np.array([round(float(values.mean()))])


END = 2**63  # the server keeps counts as signed 64-bit numbers


def checked_count(value: SupportsIndex, name: str) -> int:
    """Return `value` as an int. Raises TypeError if it is no integer, ValueError if it is not in [0, 2**63)."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; expected an integer") from error
    if not 0 <= number < END:
        raise ValueError(f"{name} is {number}; expected 0 or more, and less than 2**63")
    return number


def checked_scalars(values: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Return finite numbers as floats, others as None.

    Raises TypeError, and ValueError for a name that is no text or one of Penstock's own.
    """
    return {checked_name(name): _finite(value) for name, value in values.items()}


def _finite(value: SupportsFloat) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def checked_name(name: str) -> str:
    """Return the name of a series. Raises ValueError if it is no text that can be stored, or Penstock's."""
    if not name or "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"scalar name is {name!r}; expected text without NUL and without lone surrogates")
    if name.startswith(OWN):
        raise ValueError(f"scalar name is {name!r}; names that begin with {OWN!r} are of Penstock's own series")
    return name
