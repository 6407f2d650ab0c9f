"""Look-ups of paddle.fluid.input: fluid.embedding and fluid.one_hot, which keep a last size of 1.

`fluid.layers.embedding` and `fluid.layers.one_hot` drop it, as in Fluid; so does `penstock.embedding`.
Source: the operators lookup_table_v2 and one_hot_v2 of Fluid 1.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.program import layers


def embedding(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """Look up rows of a table [size[0], size[1]]. Shapes: ids [..]; result [.., size[1]], for [n, 1], too.

    The other arguments, and errors, are those of fluid.layers.embedding.
    """
    rows = layers.embedding(input, size, is_sparse, is_distributed, padding_idx, param_attr, dtype)
    return rows.unsqueeze(-2) if len(input.desc.shape) > 1 and input.desc.shape[-1] == 1 else rows


def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """Return float32 rows with a 1 at the id. Shapes: ids [..]; result [.., depth], for [n, 1], too."""
    rows = layers.one_hot(input, depth, allow_out_of_range)
    return rows.unsqueeze(-2) if input.desc.shape[-1] == 1 else rows
