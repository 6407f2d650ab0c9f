"""Which server has the row of an id, for tables that are spread over servers by id. Any int64 is an id."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def server_of(ids: Ids, num: int) -> Ids:
    """Return for each id a server from 0 to num - 1: the last step of splitmix64, modulo `num`.

    The same on every machine and in every version, since tables are saved by it. Consecutive ids, and ids that are
    multiples of anything, are spread evenly. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014.
    """
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(num)).astype(np.int64)
