"""`paddle.dataset.uci_housing`: 13 features, centred and divided by their range, with a price, float64 [13] and [1].

Without its file, scikit-learn's diabetes data stands in: its 10 features and the squares of bmi, bp and s5, with the
progression of the disease / 20 as the price. Source: python/paddle/dataset/uci_housing.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.alias.dataset import shipped
from penstock.alias.dataset.common import download, path_of
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["fetch", "predict_reader", "test", "train"]

URL = "http://paddlemodels.bj.bcebos.com/uci_housing/housing.data"
MD5 = "d4accdce7a25600298819f8e28e8d593"
feature_names = ["CRIM", "ZN", "INDUS", "CHAS", "NOX", "RM", "AGE", "DIS", "RAD", "TAX", "PTRATIO", "B", "LSTAT"]
_COLUMNS = len(feature_names) + 1
_TRAIN_SHARE = 0.8
_SQUARED = ("bmi", "bp", "s5")
_PROGRESSION_UNIT = 20.0


def train() -> Reader:
    """Return a reader of the first 80 % of the rows. Raises SpecError."""
    rows = _rows()
    return _reader(rows[: int(len(rows) * _TRAIN_SHARE)])


def test() -> Reader:
    """Return a reader of the last 20 % of the rows. Raises SpecError."""
    rows = _rows()
    return _reader(rows[int(len(rows) * _TRAIN_SHARE) :])


def predict_reader() -> tuple[NDArray[Any]]:
    """Return the features of the first row of the test set, in a tuple."""
    features, _ = next(iter(test()()))
    return (features,)


def fetch() -> None:
    """Check that the file can be read, or that scikit-learn, which stands in, is there. Raises SpecError."""
    _rows()


def _reader(rows: NDArray[Any]) -> Reader:
    def samples() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for row in rows:
            yield row[:-1], row[-1:]

    return samples


def _rows() -> NDArray[Any]:
    path = path_of(URL, "uci_housing")
    if path.exists():
        values = np.array(Path(download(URL, "uci_housing", MD5)).read_text("ascii").split(), dtype=np.float64)
        if not values.size or values.size % _COLUMNS:
            raise SpecError(f"{path} has {values.size} numbers; expected {_COLUMNS} a row", pointer=str(path))
        rows = values.reshape(-1, _COLUMNS)
    else:
        rows = _diabetes(shipped.scikit_learn("uci_housing", [path], "data about diabetes").load_diabetes())
    features = rows[:, :-1]
    rows[:, :-1] = (features - features.mean(axis=0)) / (features.max(axis=0) - features.min(axis=0))
    return rows


def _diabetes(data: Any) -> NDArray[Any]:
    squares = [data.data[:, data.feature_names.index(name)] ** 2 for name in _SQUARED]
    return np.column_stack([data.data, *squares, data.target / _PROGRESSION_UNIT])
