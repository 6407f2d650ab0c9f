"""Fully connected layers, embeddings, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Xavier
from penstock.program.layers.activations import activate
from penstock.program.parameters import ParamAttr, create_parameter
from penstock.program.record.composite import sparse_lookup
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.recording import recording_of
from penstock.program.record.variable import Variable, recording_modes, wrap


def _dtype(x: Variable) -> str:
    return x.desc.dtype


def fc(
    input: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Fully connected layer: act(sum_i x_i W_i + b).

    Shapes: x_i [.., k_i] flattened to [n, k_i] after `num_flatten_dims`; W_i [k_i, size]; result [.., size].
    Source: fluid.layers.fc.
    """
    inputs = [input] if isinstance(input, Variable) else list(input)
    prefix = name or default_main_program().unique("fc")
    weight_attr, bias = ParamAttr.of(param_attr), ParamAttr.of(bias_attr)
    if weight_attr is None:
        raise ProgramError("fc needs a weight; param_attr=False is not possible")
    with name_scope(prefix):
        total: Any = None
        for i, x in enumerate(inputs):
            flat: Any = x if x.ndim == 2 and num_flatten_dims == 1 else x.flatten(num_flatten_dims)
            width = _static_width(flat, prefix)
            w = create_parameter([width, size], _dtype(x), weight_attr, Xavier(), prefix=prefix, suffix=f"w_{i}")
            last = i == len(inputs) - 1
            b = _bias(bias, size, _dtype(x), prefix) if last and bias is not None else None
            total = _affine(flat, w, b, total)
        return activate(total, act)


def _static_width(flat: Any, prefix: str) -> int:
    width = flat.desc.shape[-1]
    if not isinstance(width, int):
        raise ProgramError(f"{prefix}: the last size of its input {flat.name!r} is {width}; fc needs a number there")
    return width


def _bias(attr: ParamAttr, size: int, dtype: str, prefix: str) -> Variable:
    return create_parameter([size], dtype, attr, Constant(0.0), prefix=prefix, suffix="b_0")


def _affine(x: Any, w: Variable, b: Variable | None, total: Any) -> Any:
    if total is None and b is not None and x.ndim == 2:
        return torch.addmm(b, x, w)  # type: ignore[call-overload]  # Variables stand for tensors
    product = torch.matmul(x, w)  # type: ignore[arg-type]  # Variables stand for tensors
    result: Any = product if total is None else total + product
    return result if b is None else result + b


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """Look up rows of a table [size[0], size[1]].

    Shapes: input int64 [.., 1] or [..]; result [.., size[1]] (a trailing 1 of the input is dropped).
    `is_sparse`: the gradient is SelectedRows, and the update touches only the rows that were used.
    `padding_idx`: this row reads as zeros and is never trained.
    Source: fluid.layers.embedding.
    """
    attr = ParamAttr.of(param_attr)
    if attr is None or len(size) != 2:
        raise ProgramError(f"embedding needs a table of two sizes; got size={list(size)}, param_attr={param_attr!r}")
    if is_distributed:
        raise ProgramError(
            "embedding(is_distributed=True) needs parameter servers, which this version does not have; "
            "use is_sparse=True"
        )
    prefix = default_main_program().unique("embedding")
    table = create_parameter(list(size), dtype, attr, Xavier(), prefix=prefix, suffix="w_0")
    ids: Any = input.squeeze(-1) if input.ndim > 1 and input.desc.shape[-1] == 1 else input
    padding = -1 if padding_idx is None else padding_idx % size[0]
    with name_scope(prefix):
        if is_sparse:
            recording = recording_of(default_main_program())
            with recording_modes(recording):
                return wrap(recording, sparse_lookup(recording, table.fake, ids.fake, padding, zero_padding=True))
        rows: Any = torch.embedding(table, ids, padding)  # type: ignore[arg-type]  # Variables stand for tensors
        return rows if padding < 0 else rows.masked_fill((ids == padding).unsqueeze(-1), 0.0)


def dropout(
    x: Any,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Any:
    """Zero each element with probability `dropout_prob` while training; the mask follows from the program's seed.

    downgrade_in_infer: training x * mask, at rest x * (1 - p).
    upscale_in_train: training x * mask / (1 - p), at rest x.
    Raises ProgramError for a `seed`: masks come from `Program.random_seed`, so that replicas draw as one batch would.
    """
    if seed:
        raise ProgramError(f"dropout(seed={seed}): masks follow from the program; set Program.random_seed instead")
    if dropout_implementation not in ("downgrade_in_infer", "upscale_in_train"):
        raise ProgramError(
            f"dropout_implementation is {dropout_implementation!r}; expected 'downgrade_in_infer' or 'upscale_in_train'"
        )
    with name_scope(name or default_main_program().unique("dropout")):
        kept = F.dropout(x, dropout_prob, training=not is_test)
        return kept if dropout_implementation == "upscale_in_train" else kept * (1.0 - dropout_prob)
