"""Data that scikit-learn ships, in place of a data set whose files are not there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.logger import warn_once

_log = logging.getLogger(__name__)


def scikit_learn(name: str, files: Sequence[Path], instead: str) -> Any:
    """Return `sklearn.datasets`, with a warning that it stands in for `files`. Raises SpecError without it."""
    wanted = ", ".join(map(str, files))
    try:
        from sklearn import datasets  # an optional library
    except ModuleNotFoundError as error:
        raise SpecError(
            f"paddle.dataset.{name} needs {wanted}: put the files there, or install scikit-learn, whose data stands in "
            "for them",
            pointer=str(files[0]),
        ) from error
    warn_once(_log, f"paddle.dataset.{name}: no file {wanted}; {instead} instead, from scikit-learn")
    return datasets
