"""What a benchmark reports: medians, with their quartiles beside them, and ratios against peers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

Figure = float | int


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of one or more samples."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


@dataclass(slots=True)
class Report:
    """One run of one benchmark. A ratio is ours over the peer's for rates and the peer's over ours for times."""

    bench: str
    rounds: int
    figures: dict[str, Figure] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Peers that could not take part, and why. Part of the JSON line only when there are any."""

    defects: dict[str, str] = field(default_factory=dict)
    """Contenders that are known to do something else than was asked, and what. In the line only when there are any."""

    def add(self, name: str, samples: Sequence[float], *, digits: int = 4) -> float:
        """Add the median of `samples` as `name`, its quartiles as `name_q1` and `name_q3`; return the median."""
        low, middle, high = quartiles(samples)
        self.figures[name] = round(middle, digits)
        self.figures[f"{name}_q1"] = round(low, digits)
        self.figures[f"{name}_q3"] = round(high, digits)
        return middle

    def table(self) -> str:
        """Lay the report out for a person."""
        width = max((len(name) for name in (*self.figures, *self.ratios)), default=0)
        shown = {name: value for name, value in self.figures.items() if not name.endswith(("_q1", "_q3"))}
        lines = [f"{self.bench}: {self.rounds} rounds"]
        for name, value in shown.items():
            low, high = self.figures.get(f"{name}_q1"), self.figures.get(f"{name}_q3")
            lines.append(f"  {name:<{width}}  {value}" + ("" if low is None else f"  ({low} .. {high})"))
        lines += [f"  {name:<{width}}  {ratio:.3f} x" for name, ratio in self.ratios.items()]
        lines += [f"  {name:<{width}}  missing: {why}" for name, why in self.missing.items()]
        lines += [f"  {name:<{width}}  defect: {what}" for name, what in self.defects.items()]
        return "\n".join(lines)

    def line(self) -> str:
        """Encode the report as the one JSON line that tools read."""
        body = {"bench": self.bench, "figures": self.figures, "ratios": self.ratios, "rounds": self.rounds}
        more = {"missing": self.missing, "defects": self.defects}
        return json.dumps({**body, **{name: said for name, said in more.items() if said}})
