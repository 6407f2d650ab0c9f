"""Chunks of tagged sequences (named entities, phrases): precision, recall and F1.

Source: fluid.layers.chunk_eval, chunk_eval_op.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.native.chunks import SCHEMES
from penstock.program.layers.expected import expect_ids
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.ragged import join_rows
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call


def chunk_eval(
    input: Any,
    label: Any,
    chunk_scheme: str,
    num_chunk_types: int,
    excluded_chunk_types: Sequence[int] | None = None,
    seq_length: Any = None,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return (precision, recall, F1, number of chunks found, of chunks there, of those found that are there).

    Shapes: input and label int64 [rows, 1], ragged; or [n, t] or [n, t, 1] with seq_length int64 [n] or [n, 1]. The
    first three are float32, the others int64, all [1]. `chunk_scheme`: IOB, IOE, IOBES or plain; a tag is type *
    (number of kinds) + kind, and num_chunk_types * (number of kinds) is outside of chunks. On CPU.
    """
    for tags in (input, label):
        expect_ids("chunk_eval", tags)
    if chunk_scheme not in SCHEMES:
        raise ProgramError(
            f"{user_line()}: chunk_eval: chunk_scheme is {chunk_scheme!r}; expected one of {', '.join(SCHEMES)}"
        )
    join_rows(input._recording, [input, label])
    with name_scope(default_main_program().unique("chunk_eval")), torch.no_grad():
        lengths = _lengths(input, label) if seq_length is None else seq_length
        operands = (input, label, lengths, chunk_scheme, int(num_chunk_types), list(excluded_chunk_types or ()))
        found, there, both = record_call(torch.ops.penstock.chunk_eval, operands, {}).split(1)
        hits = both.to(torch.float32)
        precision, recall = (hits / total.clamp(min=1) for total in (found, there))
        # 2 p r / (p + r) of p = both / found, r = both / there; 0 where nothing was found.
        score = 2 * hits / (found + there).clamp(min=1)
        return precision, recall, score, found, there, both


def _lengths(input: Any, label: Any) -> Any:
    for tags in (label, input):
        if is_sequence(tags):
            return sequence_lengths(tags)
    raise ProgramError(
        f"{user_line()}: chunk_eval needs ragged rows (an input with lod_level=1), or seq_length for a padded batch "
        f"[n, t]; got {input}",
        variable=input.name,
    )


__all__ = ["chunk_eval"]
