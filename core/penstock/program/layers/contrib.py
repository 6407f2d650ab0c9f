"""Layers of Fluid 1.8's fluid.contrib.layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.elementwise import elementwise_add, elementwise_mul
from penstock.program.layers.expected import expect_known, expect_rank, expect_same_shape, refuse
from penstock.program.layers.network import embedding
from penstock.program.layers.sequences import sequence_pool
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import constant_state

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


_UNARY: dict[str, Callable[[Any], Any]] = {"relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
_BINARY: dict[str, Callable[..., Any]] = {"elementwise_add": elementwise_add, "elementwise_mul": elementwise_mul}


def fused_elemwise_activation(
    x: Any,
    y: Any,
    functor_list: str | Sequence[str],
    axis: int = -1,
    scale: float = 0.0,
    save_intermediate_out: bool = True,
) -> Any:
    """Return one function of x and y and one of a single variable, as the list nests them.

    ["relu", "elementwise_add"]: relu(x + y); ["elementwise_add", "relu"]: x + relu(y). Of two: elementwise_add or
    elementwise_mul; of one: relu, tanh, sigmoid or scale. Source: fluid.contrib.layers.fused_elemwise_activation.
    """
    names = functor_list.split(",") if isinstance(functor_list, str) else list(functor_list)
    unary: dict[str, Callable[[Any], Any]] = {**_UNARY, "scale": lambda value: value * scale}
    if len(names) == 2 and names[0] in _BINARY and names[1] in unary:
        return _BINARY[names[0]](x, unary[names[1]](y), axis)
    if len(names) == 2 and names[0] in unary and names[1] in _BINARY:
        return unary[names[0]](_BINARY[names[1]](x, y, axis))
    raise ProgramError(
        f"{user_line()}: fused_elemwise_activation: functor_list is {names}; expected one of {sorted(_BINARY)} and one "
        f"of {sorted(unary)}"
    )


def partial_concat(input: Sequence[Any], start_index: int = 0, length: int = -1) -> Any:
    """Return columns `start_index` to `start_index + length` (-1: the last) of each input [n, d], side by side."""
    return torch.cat(_columns("partial_concat", input, start_index, length), 1)


def partial_sum(input: Sequence[Any], start_index: int = 0, length: int = -1) -> Any:
    """Return the sum of columns `start_index` to `start_index + length` (-1: the last) of the inputs [n, d]."""
    parts = _columns("partial_sum", input, start_index, length)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _columns(layer: str, input: Sequence[Any], start_index: int, length: int) -> list[Any]:
    found: list[Any] = []
    parts: Sequence[Any] = input if isinstance(input, (list, tuple)) else [input]
    for x in parts:
        expect_rank(layer, x, 2)
        width = expect_known(layer, x, 1)
        first = start_index + width if start_index < 0 else start_index
        last = width if length < 0 else first + length
        if not 0 <= first < last <= width:
            refuse(layer, f"columns from start_index={start_index}, length={length}", x, f"It has {width}")
        found.append(x[:, first:last])
    return found


def ctr_metric_bundle(input: Any, label: Any) -> tuple[Any, ...]:
    """Add up metrics of clicks; return the sums over all runs, float32 [1] each.

    They are the squared error, the absolute error, input, sigmoid(input), label, and the number of rows. Shapes: input
    and label [n, 1]. They are buffers: one set a replica. Source: fluid.contrib.layers.ctr_metric_bundle.
    """
    expect_same_shape("ctr_metric_bundle", input, label)
    prefix = default_main_program().unique("ctr_metric_bundle")
    with name_scope(prefix), torch.no_grad():
        away, wanted = input - label, label.to(input.dtype)
        batch = {
            "sqrerr": away * away,
            "abserr": torch.abs(away),
            "prob": input,
            "q": torch.sigmoid(input),
            "pos_num": wanted,
            "ins_num": torch.ones_like(input),
        }
        sums: list[Any] = []
        for kind, values in batch.items():
            state: Any = constant_state(f"{prefix}.{kind}", 0.0, "float32", [1])
            state.add_(values.sum().to(torch.float32))
            sums.append(state)
        return tuple(sums)
