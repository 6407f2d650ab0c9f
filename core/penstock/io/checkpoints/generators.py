"""The random generators of Python, numpy and torch, which user's code may draw from: their states in plain types.

Operators draw from none of them: their numbers follow from the program's seed, the step and the row (ADR 11).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def captured() -> dict[str, Any]:
    """Return the states of this process's global generators."""
    name, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    return {
        "python": [version, list(numbers), gauss_next],
        "numpy": [name, np.asarray(keys, "<u4").tobytes().hex(), int(at), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def put_back(states: Mapping[str, Any]) -> None:
    """Put the generators into captured states; those that were not captured stay."""
    if not states:
        return
    version, numbers, gauss_next = states["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    name, keys, at, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), "<u4"), at, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
