"""Greedy matching of rows with columns, one pair after another.

Source: paddle/fluid/operators/detection/bipartite_match_op.cc (Fluid 1.8).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CLOSE = 1e-6  # what is less close is no match
_MANY = 130  # rows from which on Fluid sorts all pairs, and matches what is close at all


def matched(closeness: Tensor, lengths: Tensor, kind: str, least: float) -> tuple[Tensor, Tensor]:
    """Return for each sequence of rows and each column the row that it is matched with, or -1, and how close it is."""
    counts = lengths.reshape(-1).tolist()
    parts = np.split(closeness.detach().numpy(), np.cumsum(counts)[:-1])
    indices = np.full((len(counts), closeness.shape[1]), -1, np.int32)
    for own, row in zip(parts, indices, strict=True):
        if own.size:
            _match_pairs(own, row)
        if own.size and kind == "per_prediction":
            _match_rest(own, row, least)
    found = np.zeros(indices.shape, closeness.numpy().dtype)
    for own, row, values in zip(parts, indices, found, strict=True):
        columns = np.flatnonzero(row >= 0)
        values[columns] = own[row[columns], columns]
    return torch.from_numpy(indices), torch.from_numpy(found)


def _match_pairs(own: np.ndarray, indices: np.ndarray) -> None:
    """Match the closest pair again and again; of equal ones that of the first column, then of the first row."""
    close = own >= _CLOSE if len(own) < _MANY else own > 0
    left = np.where(close, own, -1.0).T.copy()
    for _ in range(min(left.shape)):
        column, row = divmod(int(left.argmax()), len(own))
        if left[column, row] < 0:
            return
        indices[column] = row
        left[column, :] = left[:, row] = -1.0


def _match_rest(own: np.ndarray, indices: np.ndarray, least: float) -> None:
    """Match columns that are left with their closest row, if it is close enough."""
    best = own.argmax(0)
    value = own[best, np.arange(own.shape[1])]
    rest = (indices < 0) & (value >= max(least, _CLOSE))
    indices[rest] = best[rest]
