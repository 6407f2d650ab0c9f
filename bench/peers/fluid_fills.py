"""First values of parameters that are compared with PaddlePaddle's: filled ones exactly, drawn ones by how they lie.

`fluid_cases.INITIALIZERS` has what initializers write into the startup program; here it is run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.fluid_cases import Array, values

GIVEN = values((3, 4), 131)
"""What NumpyArrayInitializer is given."""
FILLED: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "Bilinear 4": ("Bilinear", (2, 3, 4, 4)),
    "Bilinear 3": ("Bilinear", (1, 2, 3, 3)),
    "NumpyArrayInitializer": ("NumpyArrayInitializer", (3, 4)),
}


@dataclass(frozen=True, slots=True)
class DrawnCase:
    """A parameter of DRAWN elements: the shares of elements that are less than each of `edges`.

    `kind`, `arguments`: as of fluid_cases.INITIALIZERS.
    """

    kind: str
    edges: tuple[float, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def shares(self, drawn: Array) -> list[float]:
        """Return the shares."""
        return [float((drawn < edge).mean()) for edge in self.edges]


DRAWN = (400, 500)
ACROSS = 5 * math.sqrt(0.5 / math.prod(DRAWN))
"""Five deviations of the difference of two shares, whose variance is p (1 - p) / n each, at most 0.25 / n."""


def _across(low: float, high: float, parts: int = 6) -> tuple[float, ...]:
    """Edges from `low`, below which nothing lies, to just above `high`."""
    return (*(low + (high - low) * k / parts for k in range(parts)), high + 1e-6)


def _around(mean: float, deviation: float, numbers: Sequence[float] = (-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)) -> Any:
    return tuple(mean + deviation * k for k in numbers)


_XAVIER, _MSRA = math.sqrt(6 / sum(DRAWN)), math.sqrt(6 / DRAWN[0])
DRAWS: Mapping[str, DrawnCase] = {
    "Uniform": DrawnCase("Uniform", _across(-0.25, 0.5), {"low": -0.25, "high": 0.5}),
    "Normal": DrawnCase("Normal", _around(0.5, 0.25), {"loc": 0.5, "scale": 0.25}),
    "TruncatedNormal": DrawnCase(
        "TruncatedNormal", (-1e-6, *_around(0.5, 0.25)[1:-1], 1 + 1e-6), {"loc": 0.5, "scale": 0.25}
    ),
    "Xavier": DrawnCase("Xavier", _across(-_XAVIER, _XAVIER)),
    "Xavier, normal": DrawnCase("Xavier", _around(0.0, math.sqrt(2 / sum(DRAWN))), {"uniform": False}),
    "MSRA": DrawnCase("MSRA", _across(-_MSRA, _MSRA)),
    "MSRA, normal": DrawnCase("MSRA", _around(0.0, math.sqrt(2 / DRAWN[0])), {"uniform": False}),
}
