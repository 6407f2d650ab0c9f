"""`paddle.utils.plot`: curves of numbers, drawn by matplotlib where it is installed.

`DISABLE_PLOT=True` draws nothing, as in Fluid. Source: python/paddle/utils/plot.py (Fluid 1.8).
"""

from __future__ import annotations

import logging
from typing import Any

from penstock.logger import warn_once
from penstock.settings import DISABLE_PLOT

_log = logging.getLogger(__name__)


class Ploter:
    """Curves with a title each."""

    def __init__(self, *args: str) -> None:
        self._curves: dict[str, list[tuple[float, float]]] = {title: [] for title in args}

    def append(self, title: str, step: float, value: Any) -> None:
        """Add a point to a curve. Raises KeyError for a title that was not declared."""
        self._curves[title].append((step, float(value)))

    def plot(self, path: str | None = None) -> None:
        """Draw the curves that have points to a file, or show them in a notebook."""
        pyplot = _pyplot()
        if pyplot is None:
            return
        figure, axes = pyplot.subplots()
        for title, points in self._curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=title)
        axes.legend(loc="upper left")
        if path is None:
            pyplot.show()
        else:
            figure.savefig(path)
        pyplot.close(figure)

    def reset(self) -> None:
        """Remove all points."""
        for points in self._curves.values():
            points.clear()


def _pyplot() -> Any:
    if DISABLE_PLOT.read():
        return None
    try:
        from matplotlib import pyplot  # an optional library
    except ModuleNotFoundError:
        warn_once(_log, "matplotlib is not installed: Ploter.plot draws nothing")
        return None
    return pyplot
