"""Layers over sequences: ragged rows with their lengths, as Fluid's LoD tensors, or padded batches.

A *ragged* input, layers.data(name, [1], lod_level=1), is the rows of all sequences one after another; a variable with
the same rows belongs to it (program/sequences.py). A *padded* one, [batch, time, …] with lod_level=1, has zeros behind
each row's own steps; a variable belongs to the input whose time it has: its dimension 1 is the same symbol.
`sequence_pool` and `sequence_lengths` take both, the other layers ragged rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import VarDesc
from penstock.program.layers.inputs import fluid_data, rows_input, steps_input
from penstock.program.layers.levels import picked_rows, repeat_sequences
from penstock.program.layers.network import fc
from penstock.program.layers.sizes import known_size
from penstock.program.program import Program
from penstock.program.record.arrays import counted
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.ragged import join_rows
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.unsized import reads_unsized, sized_in_block
from penstock.program.record.variable import dtype_named, record_call
from penstock.program.sequences import LENGTHS, is_ragged, lengths_of, ragged_with_rows

_POOLS = ("sum", "average", "mean", "sqrt", "max", "first", "last")


@reads_unsized
def sequence_lengths(input: Any) -> Any:
    """Return the variable int64 [n, 1] of the true lengths of a sequence input, or of what was made of one.

    n is the number of the innermost sequences: the batch, if there is one level. Raises ProgramError if `input` is made
    of no sequence input.
    """
    program = default_main_program()
    if (ragged := _lengths(input)) is not None:
        return ragged
    name = _owner(input).name + LENGTHS
    if name in program.variables:
        return program.handle(name)
    return fluid_data(name, [None, 1], "int64")


@reads_unsized
def sequence_pool(
    input: Any, pool_type: str, is_test: bool = False, pad_value: float = 0.0, lengths: Any = None
) -> Any:
    """Reduce each sequence to one row: 'sum', 'average' (or 'mean'), 'sqrt' (sum / √length), 'max', 'first', 'last'.

    Shapes: input [rows, …], ragged; result [n, …], of two levels the inner sequences, which are ragged themselves. Or
    input [n, t, …], padded, with lengths int64 [n] or [n, 1], those of the sequence input if they are not given. A
    sequence without rows becomes `pad_value`. Source: fluid.layers.sequence_pool.
    """
    kind = pool_type.lower()
    if kind not in _POOLS:
        raise ProgramError(f"{user_line()}: sequence_pool has no pool_type {pool_type!r}; expected one of {_POOLS}")
    own = _lengths(input) if lengths is None else None
    if own is None:
        return _padded_pool(input, kind, pad_value, lengths)
    with name_scope(default_main_program().unique("sequence_pool")):
        call = torch.ops.penstock.sequence_pool
        return record_call(call, (input, own, "average" if kind == "mean" else kind, float(pad_value)), {})[0]


def sequence_first_step(input: Any) -> Any:
    """Return the first row of each sequence. Source: fluid.layers.sequence_first_step."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Any) -> Any:
    """Return the last row of each sequence. Source: fluid.layers.sequence_last_step."""
    return sequence_pool(input, "last")


def is_sequence(x: Any) -> bool:
    """Whether a variable has ragged rows."""
    return _lengths(x) is not None


def padded(layer: str, x: Any) -> tuple[Any, Any]:
    """Return ragged rows as [n, steps, …] with zeros behind, and their lengths."""
    own = _expect_lengths(layer, x)
    steps, recording = _steps(x), recording_of(default_main_program())
    if steps is None and recording.open_blocks:
        steps = counted(recording, torch.max(own))
    if steps is None:
        raise ProgramError(
            f"{user_line()}: {layer}: how long the longest sequence of {x} is follows from data; it is known of "
            "inputs, of what has their rows, and of images as sequences",
            variable=x.name,
        )
    return _in_rows(x, own, steps, x.new_zeros([1, *x.shape[1:]])), own


def unpadded(x: Any, like: Any) -> Any:
    """Return [n, steps, …] as rows, those of the ragged `like`."""
    return _one_after_another(x, _expect_lengths("", like), like.shape[0])


def _lengths(x: Any) -> Any:
    """The lengths of ragged rows' innermost sequences; None if the rows are not ragged."""
    program = default_main_program()
    levels = lengths_of(program, x.desc.shape[0]) if x.desc.shape else []
    return program.handle(levels[-1]) if levels else None


@reads_unsized
def sequence_softmax(input: Any, use_cudnn: bool = False, name: str | None = None) -> Any:
    """Return the softmax over the rows of each sequence. Shapes: [rows] or [rows, 1]. Source: fluid.layers."""
    with name_scope(name or default_main_program().unique("sequence_softmax")):
        own, most = _expect_lengths("sequence_softmax", input), sequence_pool(input.detach(), "max")
        grown = torch.exp(input - _spread(most, own, input.shape[0]))
        return grown / _spread(sequence_pool(grown, "sum"), own, input.shape[0])


@reads_unsized
def sequence_expand_as(x: Any, y: Any, name: str | None = None) -> Any:
    """Repeat row i of x as often as sequence i of y has rows.

    Shapes: x [n, …]; y [rows, …], ragged; result [rows, …], with the sequences of y. Source: fluid.layers.
    """
    with name_scope(name or default_main_program().unique("sequence_expand_as")):
        if _lengths(x) is not None:
            raise ProgramError(
                f"{user_line()}: sequence_expand_as repeats rows, one for each sequence; {x} has sequences itself. "
                "Pool them first (layers.sequence_pool)",
                variable=x.name,
            )
        return _spread(x, _expect_lengths("sequence_expand_as", y), y.shape[0])


@reads_unsized
def sequence_expand(x: Any, y: Any, ref_level: int = -1, name: str | None = None) -> Any:
    """Repeat row i of x, or sequence i if x has some, as often as the i-th sequence of y has rows.

    `ref_level`: the level of y whose sequences are counted, of an outer one the sequences in it; -1: the last. What is
    made of sequences has a size that follows from data. Raises ProgramError for an x of two levels.
    """
    program = default_main_program()
    levels = lengths_of(program, y.desc.shape[0])
    if not -1 <= ref_level < max(len(levels), 1):
        raise ProgramError(f"{user_line()}: sequence_expand(ref_level={ref_level}): {y!r} has {len(levels)} levels")
    if not levels or (_lengths(x) is None and ref_level in (-1, len(levels) - 1)):
        return sequence_expand_as(x, y, name)
    with name_scope(name or program.unique("sequence_expand")):
        counts = program.handle(levels[ref_level])
        if _lengths(x) is not None:
            return repeat_sequences(x, counts)
        return _spread(x, counts, program.handle(levels[ref_level + 1]).shape[0])


@reads_unsized
def sequence_reverse(x: Any, name: str | None = None) -> Any:
    """Turn the rows of each sequence round. Source: fluid.layers.sequence_reverse."""
    with name_scope(name or default_main_program().unique("sequence_reverse")):
        own = _expect_lengths("sequence_reverse", x)
        return x.index_select(0, _rows(own, x.shape[0], "mirror"))


@reads_unsized
def sequence_mask(x: Any, maxlen: Any = None, dtype: str = "int64", name: str | None = None) -> Any:
    """Return 1 for steps below a length, else 0. Shapes: x int [n, …]; result [n, …, maxlen].

    `maxlen`: a number, a size as a variable (`layers.shape(y)[1]`), or a variable of one element whose value decides
    when it is run, as the largest length does without `maxlen`; the result has a size that follows from data then.
    """
    with name_scope(name or default_main_program().unique("sequence_mask")):
        most = None if maxlen is None else known_size(maxlen)
        if most is None:
            value = torch.max(x) if maxlen is None else maxlen
            recording = recording_of(default_main_program())
            return sized_in_block(recording, lambda: _below(x, counted(recording, value), dtype))
        return _below(x, x.new_ones([most]).cumsum(0) - 1, dtype)


def _below(x: Any, steps: Any, dtype: str) -> Any:
    return (steps < x.unsqueeze(-1)).to(dtype_named(dtype))


@reads_unsized
def sequence_pad(x: Any, pad_value: Any, maxlen: int | None = None, name: str | None = None) -> tuple[Any, Any]:
    """Put each sequence in a row of its own; return it with the lengths.

    Shapes: x [rows, …], ragged; pad_value: a variable of one element, or of a row's shape; result [n, maxlen, …] and
    int64 [n]. Without `maxlen` it is that of the longest sequence, a size that follows from data unless the sequences
    are an input's. A sequence that is longer than `maxlen` is an OperatorError of the run.
    Source: fluid.layers.sequence_pad.
    """
    with name_scope(name or default_main_program().unique("sequence_pad")):
        own = lengths = _expect_lengths("sequence_pad", x)
        if maxlen is not None:
            own = record_call(torch.ops.penstock.checked_lengths, (own, int(maxlen), "sequence_pad"), {})
        steps = _steps(x) if maxlen is None else own.new_ones([int(maxlen)]).cumsum(0) - 1
        filler = pad_value.to(x.dtype).expand(1, *x.shape[1:])
        if steps is not None:
            return _in_rows(x, own, steps, filler), lengths.reshape(-1)
        recording = recording_of(default_main_program())
        padded = sized_in_block(recording, lambda: _in_rows(x, own, counted(recording, torch.max(own)), filler))
        return padded, lengths.reshape(-1)


@reads_unsized
def sequence_unpad(x: Any, length: Any, name: str | None = None) -> Any:
    """Return the rows' own steps one after another.

    Shapes: x [n, t, …]; length int [n] or [n, 1]. The result has the rows and sequences of an input whose lengths these
    are (`sequence_lengths`, or from `sequence_pad`), or which they are; else its rows follow from data. A length above
    t is an OperatorError of the run.
    """
    program = default_main_program()
    with name_scope(name or program.unique("sequence_unpad")):
        join_rows(recording_of(program), (x, length))
        source = _rows_with(length)
        if source is None:
            counts = length.reshape([-1, 1]).to(torch.int64)
            counts = record_call(torch.ops.penstock.checked_lengths, (counts, x.shape[1], "sequence_unpad"), {})
            ends: Any = torch.ones_like(counts).cumsum(0) * x.shape[1]
            return picked_rows(x.flatten(0, 1), ends - x.shape[1], counts, ends)
        own = record_call(
            torch.ops.penstock.checked_lengths,
            (program.handle(source.name + LENGTHS), x.shape[1], "sequence_unpad"), {},
        )  # fmt: skip
        return _one_after_another(x, own, source.shape[0])


def _rows_with(length: Any) -> Any:
    """The ragged input that has these lengths; None if no input does."""
    program = default_main_program()
    whole = program.variables[program.variables[length.name].storage]
    if whole.feed and is_ragged(program, whole.name.removesuffix(LENGTHS)):
        return program.handle(whole.name.removesuffix(LENGTHS))
    if whole.feed and whole.dtype == "int64" and whole.shape[1:] in ((), (1,)):
        return rows_input(whole.name)
    return None


@reads_unsized
def sequence_enumerate(input: Any, win_size: int, pad_value: int = 0, name: str | None = None) -> Any:
    """Return each id with those that follow it in its sequence. Shapes: ids [rows, 1]; result [rows, win_size]."""
    with name_scope(name or default_main_program().unique("sequence_enumerate")):
        own = _expect_lengths("sequence_enumerate", input)
        return _windows(input, own, 0, win_size, pad_value).reshape(-1, win_size)


@reads_unsized
def sequence_conv(
    input: Any,
    num_filters: int,
    filter_size: int = 3,
    filter_stride: int = 1,
    padding: bool = True,
    padding_start: int | None = None,
    bias_attr: Any = None,
    param_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Convolve over the rows of each sequence, with zeros before its first and after its last row.

    Shapes: input [rows, d], ragged; weight [filter_size * d, num_filters]; result [rows, num_filters].
    `padding_start`: the first row of a window, from the row in its middle: -(filter_size // 2) if it is not given.
    Source: fluid.layers.sequence_conv.
    """
    if filter_stride != 1:
        raise ProgramError(f"{user_line()}: sequence_conv(filter_stride={filter_stride}): it is 1, as in Fluid")
    own = _expect_lengths("sequence_conv", input)
    with name_scope(name or default_main_program().unique("sequence_conv")):
        first = -(filter_size // 2) if padding_start is None else padding_start
        seen = _windows(input, own, first, filter_size, 0.0).flatten(1)
    return fc(seen, num_filters, param_attr=param_attr, bias_attr=bias_attr, act=act, name=name)


@reads_unsized
def sequence_reshape(input: Any, new_dim: int) -> Any:
    """Lay the rows of each sequence out anew. Shapes: [rows, d], ragged, to [rows * d / new_dim, new_dim].

    Sequences whose values do not fill rows have lengths that do not add up, an OperatorError of the layer that uses
    them. Source: fluid.layers.sequence_reshape.
    """
    own, width = _expect_lengths("sequence_reshape", input), input.desc.shape[1]
    with name_scope(default_main_program().unique("sequence_reshape")):
        return with_lengths(input.reshape(-1, new_dim), own * width // new_dim)


@reads_unsized
def sequence_concat(input: Sequence[Any], name: str | None = None) -> Any:
    """Concatenate the i-th sequences of ragged variables. Shapes: [rows_k, …]; result [sum of rows, …]."""
    parts = list(input)
    if len(parts) == 1:
        return parts[0]
    owns = [_expect_lengths("sequence_concat", part) for part in parts]
    with name_scope(name or default_main_program().unique("sequence_concat")):
        lengths = owns[0]
        for own in owns[1:]:
            lengths = lengths + own
        first, places = lengths.cumsum(0) - lengths, []
        for part, own in zip(parts, owns, strict=True):
            rows = part.shape[0]
            places.append(_spread(first, own, rows).reshape(-1) + _rows(own, rows, "position"))
            first = first + own
        order = torch.argsort(torch.cat(places))
        return with_lengths(torch.cat(parts).index_select(0, order), lengths)


# ---------------------------------------------------------------- rows


def _expect_lengths(layer: str, x: Any) -> Any:
    own = _lengths(x)
    if own is None:
        raise ProgramError(
            f"{user_line()}: {layer} needs ragged rows; {x} has none{_taken_for_batch()}. Declare the input as "
            "fluid.layers.data(name, shape=[1], dtype='int64', lod_level=1)",
            variable=x.name,
        )
    return own


def _rows(lengths: Any, rows: Any, kind: str) -> Any:
    return record_call(torch.ops.penstock.sequence_rows, (lengths, rows, kind), {})


def _spread(x: Any, lengths: Any, rows: Any) -> Any:
    """Row i of x for each row of sequence i."""
    return x.index_select(0, _rows(lengths, rows, "sequence"))


def _windows(x: Any, lengths: Any, first: int, size: int, pad_value: float) -> Any:
    """[rows, size, …]: the rows from `first` on, counted from each row; `pad_value` beyond its sequence's ends."""
    rows = x.shape[0]
    place = _rows(lengths, rows, "position").unsqueeze(1)
    offsets = place.new_ones([1, size]).cumsum(1) + (first - 1)
    seen = place + offsets
    inside = torch.logical_and(seen >= 0, seen < _spread(lengths.reshape(-1, 1), lengths, rows))
    at = place.new_ones([rows, 1]).cumsum(0) - 1 + offsets
    found = x.index_select(0, torch.where(inside, at, torch.zeros_like(at)).reshape(-1))
    found = found.reshape(rows, size, *x.shape[1:])
    outside = inside.logical_not().reshape(rows, size, *[1] * (x.ndim - 1))
    return found.masked_fill(outside, pad_value)


def _steps(x: Any) -> Any:
    """The steps of the longest of the sequences that x has; None where neither an input nor one length tells."""
    program = default_main_program()
    owner = ragged_with_rows(program, x.desc.shape[0])
    if owner is None or owner.feed:
        return None if owner is None else steps_input(owner.name)
    length = one_length(program, owner.name + LENGTHS)
    if length is None:
        return None
    return program.handle(owner.name + LENGTHS).new_ones([recording_of(program).symbols.size(length)]).cumsum(0) - 1


def one_length(program: Program, lengths: str) -> Dim | None:
    """The length of all sequences, where an operator has made `lengths` of one number, as im2sequence does."""
    maker = next((op for op in program.operators if lengths in op.outputs), None)
    if maker is None or maker.type != "aten.new_full.default":
        return None
    length = maker.args[2]
    return length if isinstance(length, (int, Expr)) else None


def _in_rows(x: Any, lengths: Any, steps: Any, filler: Any) -> Any:
    """Ragged rows as [n, steps, …], with `filler` [1, …] beyond the ends."""
    counts = lengths.reshape(-1, 1)
    first = counts.cumsum(0) - counts + 1  # behind the filler
    inside = steps.unsqueeze(0) < counts
    at = torch.where(inside, first + steps.unsqueeze(0), torch.zeros_like(inside, dtype=torch.int64))
    rows = torch.cat([filler, x]).index_select(0, at.reshape(-1))
    return rows.reshape(counts.shape[0], steps.shape[0], *x.shape[1:])


def _one_after_another(x: Any, lengths: Any, rows: Any) -> Any:
    """[n, steps, …] as ragged rows."""
    at = _rows(lengths, rows, "sequence") * x.shape[1] + _rows(lengths, rows, "position")
    return x.flatten(0, 1).index_select(0, at)


def with_lengths(x: Any, lengths: Any) -> Any:
    """Let x be ragged, with these lengths int64 [n, 1]."""
    recording = x._recording
    rename_recorded(recording, lengths.fake, x.name + LENGTHS)
    recording.program.variables[x.name] = replace(x.desc, lod_level=1)
    return x


# ---------------------------------------------------------------- padded batches


def _padded_pool(input: Any, kind: str, pad_value: float, lengths: Any) -> Any:
    if input.ndim < 2:
        raise ProgramError(
            f"{user_line()}: sequence_pool needs an input [batch, time, …]; got {input}", variable=input.name
        )
    if lengths is None:
        lengths = sequence_lengths(input)
    lengths = record_call(torch.ops.penstock.checked_lengths, (lengths, input.shape[1], "sequence_pool"), {})
    counts = lengths.reshape(-1, *[1] * (input.ndim - 1))
    steps = input.new_zeros(input.shape[1], dtype=torch.int64).add(1).cumsum(0) - 1
    outside = (steps.reshape(1, -1, *[1] * (input.ndim - 2)) >= counts).expand_as(input)
    pooled = _pooled(kind, input, counts, outside)
    return pooled.masked_fill((counts == 0).squeeze(1).expand_as(pooled), pad_value)


def _pooled(kind: str, x: Any, counts: Any, outside: Any) -> Any:
    if kind == "max":
        return x.masked_fill(outside, float("-inf")).amax(1)
    if kind == "first":
        return x[:, 0]
    if kind == "last":
        last = (counts - 1).clamp(min=0).expand(-1, 1, *x.shape[2:])
        return torch.gather(x, 1, last).squeeze(1)
    total = x.masked_fill(outside, 0.0).sum(1)
    if kind == "sum":
        return total
    divisor = counts.squeeze(1).clamp(min=1).to(total.dtype)
    return total / (divisor.sqrt() if kind == "sqrt" else divisor)


def _owner(variable: Any) -> VarDesc:
    """Return the sequence input whose time a variable has."""
    shape = variable.desc.shape
    time = shape[1] if len(shape) > 1 else None
    if isinstance(time, Expr):
        for known in default_main_program().feeds():
            if known.lod_level >= 1 and len(known.shape) > 1 and known.shape[1] == time:
                return known
    raise ProgramError(
        f"{user_line()}: {variable} has neither the rows nor the time of a sequence input, so its lengths are not "
        "known. Declare the input as "
        f"fluid.layers.data(name, shape=[1], dtype='int64', lod_level=1), or pass lengths=…{_taken_for_batch()}",
        variable=variable.name,
    )


def _taken_for_batch() -> str:
    """Return a sentence about ragged inputs that have been used as if they had one row a sample, if there are any."""
    program = default_main_program()
    names = [v.name for v in program.feeds() if v.lod_level and not is_ragged(program, v.name) and len(v.shape) > 1]
    names = [name for name in names if isinstance(program.variables[name].shape[1], int)]
    if not names:
        return ""
    return f". {', '.join(map(repr, names))} was used together with what has one row a sample, so it has one, too"
