"""Fully connected layers, embeddings, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Xavier
from penstock.program.layers.expected import expect_features, expect_ids, refuse
from penstock.program.layers.results import activated
from penstock.program.record.blocks import Stepped
from penstock.program.record.composite import sparse_lookup
from penstock.program.record.context import default_main_program, default_startup_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import Variable, recording_modes, wrap
from penstock.program.training.parameters import ParamAttr, create_parameter

_MAX_SIGHTINGS = 255  # what a table counts up to (penstock.ps.table)


def _dtype(x: Variable) -> str:
    return x.desc.dtype


@reads_unsized
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
    `param_attr`: of all weights, or a list with one for each input.
    Source: fluid.layers.fc.
    """
    inputs: list[Any] = list(input) if isinstance(input, (list, tuple)) else [input]
    prefix = name or default_main_program().unique("fc")
    weight_attrs, bias = _weight_attrs(param_attr, len(inputs)), ParamAttr.of(bias_attr)
    with name_scope(prefix):
        total: Any = None
        for i, x in enumerate(inputs):
            expect_features(prefix, x, num_flatten_dims)
            flat: Any = x if x.ndim == 2 and num_flatten_dims == 1 else x.flatten(num_flatten_dims)
            width = _static_width(flat, prefix)
            w = create_parameter([width, size], _dtype(x), weight_attrs[i], Xavier(), prefix=prefix, suffix=f"w_{i}")
            last = i == len(inputs) - 1
            b = _bias(bias, size, _dtype(x), prefix) if last and bias is not None else None
            total = _affine(flat, w, b, total)
        products = len(inputs) if len(inputs) > 1 else 0  # of several, each is a temporary of Fluid's before their sum
        return activated(total, act, prefix, products + (bias is not None))


def _weight_attrs(given: Any, count: int) -> list[ParamAttr]:
    """The attribute of each weight of fc."""
    each = [ParamAttr.of(one) for one in (given if isinstance(given, (list, tuple)) else [given] * count)]
    known = [attr for attr in each if attr is not None]
    if len(known) != len(each):
        raise ProgramError(f"{user_line()}: fc needs a weight; param_attr=False is not possible")
    if len(known) != count:
        raise ProgramError(f"{user_line()}: fc has {count} inputs, but {len(known)} attributes of weights (param_attr)")
    return known


def _static_width(flat: Any, prefix: str) -> int:
    width = flat.desc.shape[-1]
    if not isinstance(width, int):
        instead = "Give layers.data its sizes, or pool over the one that is not known"
        refuse(prefix, "a known last size of its input", flat, instead)
    return width


def _bias(attr: ParamAttr, size: int, dtype: str, prefix: str) -> Variable:
    return create_parameter([size], dtype, attr, Constant(0.0), prefix=prefix, suffix="b_0")


def _affine(x: Any, w: Variable, b: Variable | None, total: Any) -> Any:
    if total is None and b is not None and x.ndim == 2:
        return torch.addmm(b, x, w)  # type: ignore[call-overload]  # Variables stand for tensors
    product = torch.matmul(x, w)  # type: ignore[arg-type]  # Variables stand for tensors
    result: Any = product if total is None else total + product
    return result if b is None else result + b


@reads_unsized
def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
    *,
    admit_after: int = 0,
    expire_after_s: float | None = None,
) -> Any:
    """Look up rows of a table [size[0], size[1]].

    Shapes: input int64 [.., 1] or [..]; result [.., size[1]] (a trailing 1 of the input is dropped).
    `is_sparse`: the gradient is SelectedRows, and the update touches only the rows that were used.
    `is_distributed`: the table is on parameter servers alone, and any int64 is an id; size[0] says how many different
    ones there may be. It needs is_sparse, float32, and fluid.DistributeTranspiler before a program that uses it runs.
    `padding_idx`: this row reads as zeros and is never trained.
    `admit_after`, of a distributed table: the update that has an id and makes its row, counting from 1; before, it
    reads first values and its gradients are dropped. 0: the first look-up makes it. At most 255; approximate.
    `expire_after_s`, of a distributed table: a row that was neither looked up nor updated for longer is dropped, at one
    of the servers' next snapshots; its id begins anew. None: rows stay.
    Source: fluid.layers.embedding.
    """
    attr = ParamAttr.of(param_attr)
    if attr is None or not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ProgramError(
            f"{user_line()}: embedding needs a table of two sizes, [rows, width]; got size={size!r}, "
            f"param_attr={param_attr!r}"
        )
    expect_ids("embedding", input)
    if is_sparse and (stepped := _stepped(input)) is not None:
        more = {"admit_after": admit_after, "expire_after_s": expire_after_s}
        settings = (is_sparse, is_distributed, padding_idx, param_attr, dtype)
        return stepped(lambda ids: embedding(ids, size, *settings, **more))
    if is_distributed:
        _check_distributed(is_sparse, dtype)
        _refuse_in_block(input)
    _check_kept_ids(is_distributed, admit_after, expire_after_s)
    prefix = default_main_program().unique("embedding")
    table = create_parameter(list(size), dtype, attr, Xavier(), prefix=prefix, suffix="w_0")
    if is_distributed:
        _distribute(table.name, admit_after, expire_after_s)
    ids: Any = input.squeeze(-1) if input.ndim > 1 and input.desc.shape[-1] == 1 else input
    ids = ids.to(torch.int64) if is_sparse and ids.dtype == torch.int32 else ids
    padding = -1 if padding_idx is None else padding_idx % size[0]
    with name_scope(prefix):
        if is_sparse:
            recording = recording_of(default_main_program())
            with recording_modes(recording):
                return wrap(recording, sparse_lookup(recording, table.fake, ids.fake, padding, zero_padding=True))
        rows: Any = torch.embedding(table, ids, padding)  # type: ignore[arg-type]  # Variables stand for tensors
        return rows if padding < 0 else rows.masked_fill((ids == padding).unsqueeze(-1), 0.0)


def _stepped(ids: Any) -> Stepped | None:
    """What looks up all ids of a recurrent block before it, so that the gradient is sparse; None for other ids."""
    blocks = recording_of(default_main_program()).open_blocks
    if not blocks or (ids.ndim == 1 and ids.desc.shape[0] == 1):  # of which a whole would lose its last size
        return None
    found: Stepped | None = blocks[-1].steps.get(ids.name)
    return found


def _refuse_in_block(ids: Variable) -> None:
    if recording_of(default_main_program()).open_blocks:
        raise ProgramError(
            f"{user_line()}: embedding(is_distributed=True) in a block of control flow: a table that is on parameter "
            "servers alone has no dense gradient, which lookups in blocks make. Look the ids up before the block, and "
            "take the rows in it (step_input, static_input, or by their name)",
            variable=ids.name,
        )


def _check_distributed(is_sparse: bool, dtype: str) -> None:
    if not is_sparse:
        raise ProgramError(
            f"{user_line()}: embedding(is_distributed=True) needs is_sparse=True: of a table that is on parameter "
            "servers alone, only the rows that a batch uses travel"
        )
    if dtype != "float32":
        raise ProgramError(f"{user_line()}: a distributed embedding holds float32; got dtype={dtype!r}")


def _check_kept_ids(is_distributed: bool, admit_after: int, expire_after_s: float | None) -> None:
    if not is_distributed and (admit_after or expire_after_s is not None):
        raise ProgramError(
            f"{user_line()}: embedding with admit_after or expire_after_s needs is_distributed=True: other tables have "
            "all their rows from the beginning to the end"
        )
    if not 0 <= admit_after <= _MAX_SIGHTINGS:
        raise ProgramError(
            f"{user_line()}: embedding(admit_after={admit_after!r}): updates that have an id are counted from 0 to "
            f"{_MAX_SIGHTINGS}"
        )
    if expire_after_s is not None and not 1 <= expire_after_s < math.inf:
        raise ProgramError(
            f"{user_line()}: embedding(expire_after_s={expire_after_s!r}): expected a number of seconds, at least 1, "
            "or None"
        )


def _distribute(table: str, admit_after: int, expire_after_s: float | None) -> None:
    """Mark a table, where it is trained and where it would be made, as one that no process here allocates."""
    after = None if expire_after_s is None else float(expire_after_s)
    for program in (default_main_program(), default_startup_program()):
        var = program.variables.get(table)
        if var is None:
            continue
        if var.distributed and (var.admit_after, var.expire_after_s) != (admit_after, after):
            raise ProgramError(
                f"{user_line()}: table {table!r} has admit_after={var.admit_after} and "
                f"expire_after_s={var.expire_after_s}, and is looked up with {admit_after} and {after} here; they are "
                "the table's, so let them be the same wherever it is looked up"
            )
        program.variables[table] = replace(var, distributed=True, admit_after=admit_after, expire_after_s=after)


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
        raise ProgramError(
            f"{user_line()}: dropout(seed={seed}): masks follow from the program; set Program.random_seed instead"
        )
    if dropout_implementation not in ("downgrade_in_infer", "upscale_in_train"):
        raise ProgramError(
            f"{user_line()}: dropout_implementation is {dropout_implementation!r}; expected 'downgrade_in_infer' or "
            "'upscale_in_train'"
        )
    with name_scope(name or default_main_program().unique("dropout")):
        kept = F.dropout(x, dropout_prob, training=not is_test)
        return kept if dropout_implementation == "upscale_in_train" else kept * (1.0 - dropout_prob)
