"""What is trained by the benchmarks, as plain arrays: feeds, initial values and the shape of the work.

Each name of `NAMES` is a function that makes a `Workload`; `build(name)` makes one by its name. Only the source of the
data is imported, and only when it is asked for: a peer's environment has numpy and nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.workloads.workload import Workload

NAMES = ("criteo", "slots", "bags", "ragged_slots", "din", "flights", "lenet", "transformer")

__all__ = ["NAMES", "Workload", "build", "criteo"]


def criteo(**options: Any) -> Workload:
    """Make the Criteo-shaped workload; options as `bench.workloads.ctr.criteo` has them."""
    return build("criteo", **options)


def build(name: str, **options: Any) -> Workload:
    """Make a workload by its name: one of NAMES. Raises KeyError for another."""
    module = {
        "criteo": "ctr",
        "slots": "ctr",
        "bags": "bags",
        "ragged_slots": "bags",
        "din": "clicks",
        "flights": "ctr",
        "lenet": "digits",
        "transformer": "sequences",
    }[name]
    # imported here: each needs packages of its own (pandas, scikit-learn) that not every process has
    made: Workload = getattr(importlib.import_module(f"bench.workloads.{module}"), name)(**options)
    return made
