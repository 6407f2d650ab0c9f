"""Layers of Fluid 1.8's fluid.contrib.layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.network import embedding
from penstock.program.layers.sequences import sequence_pool
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line

_KEY_BITS = 31


def fused_embedding_seq_pool(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    padding_idx: int | None = None,
    combiner: str = "sum",
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """Return the sum of the embeddings of each sequence's ids. Shapes: ids int64 [rows, 1], ragged; result [n, width].

    A graph makes one kernel of a sum over sparse rows in any case. Source: fluid.contrib.layers.
    """
    rows = embedding(input, size, is_sparse, padding_idx=padding_idx, param_attr=param_attr, dtype=dtype)
    return sequence_pool(rows, combiner)


def shuffle_batch(x: Any, seed: int | None = None) -> Any:
    """Return the rows of x in a random order, another one in each run; gradients go back to the rows.

    Each replica shuffles its own rows. The order follows from the seed of the program, so `seed` has to be None or 0,
    and a clone for testing keeps the rows as they are. Source: fluid.contrib.layers.shuffle_batch.
    """
    if seed:
        raise ProgramError(
            f"{user_line()}: shuffle_batch(seed={seed}): the order follows from the program; set Program.random_seed"
        )
    with name_scope(default_main_program().unique("shuffle_batch")):
        bits: Any = F.dropout(x.new_ones([x.shape[0], _KEY_BITS], dtype=torch.float64), 0.5)  # 0 or 2
        keys = (bits * (2.0 ** (x.new_ones([_KEY_BITS], dtype=torch.float64).cumsum(0) - 2.0))).sum(1)
        return x.index_select(0, torch.sort(keys, dim=0, stable=True)[1])
