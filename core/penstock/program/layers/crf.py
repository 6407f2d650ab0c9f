"""Conditional random fields over the tags of sequences: the cost to train on, and the best tags.

Source: fluid.layers.linear_chain_crf, crf_decoding (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.ragged import join_rows
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call
from penstock.program.training.parameters import ParamAttr, create_parameter


def linear_chain_crf(input: Any, label: Any, param_attr: Any = None, length: Any = None) -> Any:
    """Return what each sequence costs: the negative logarithm of the probability of its tags, [n, 1].

    Shapes: input [rows, tags], ragged, label int64 [rows, 1]; or input [n, t, tags], label [n, t] or [n, t, 1] and
    length int64 [n] or [n, 1]. Parameter w_0 [tags + 2, tags]: scores of the first tag, of the last tag, then of tag j
    behind tag i at [i + 2, j]. A label that is no tag is an OperatorError of the run. On CPU.
    """
    prefix = default_main_program().unique("linear_chain_crf")
    with name_scope(prefix):
        join_rows(input._recording, [input, label])
        lengths, tags = _lengths("linear_chain_crf", input, length), input.desc.shape[-1]
        wanted = ParamAttr.of(param_attr)
        if wanted is None:
            raise ProgramError(f"{user_line()}: linear_chain_crf needs its transitions; param_attr=False is impossible")
        transition = create_parameter([tags + 2, tags], input.desc.dtype, wanted, prefix=prefix, suffix="w_0")
        return record_call(torch.ops.penstock.linear_chain_crf, (input, transition, label, lengths), {})[0]


def crf_decoding(input: Any, param_attr: Any, label: Any = None, length: Any = None) -> Any:
    """Return the most probable tag of each row, int64; with `label`, whether it is the label: 1 or 0.

    Shapes: as of `linear_chain_crf`, whose parameter `param_attr` names; result [rows, 1], or [n, t, 1] with zeros
    beyond the ends. Raises ProgramError for a parameter that is not there.
    """
    main, wanted = default_main_program(), ParamAttr.of(param_attr)
    name = None if wanted is None else wanted.name
    if name not in main.variables:
        raise ProgramError(
            f"{user_line()}: crf_decoding reads the transitions {name!r}, which no linear_chain_crf has made. Give "
            "both layers param_attr=fluid.ParamAttr(name=…)",
            variable=name,
        )
    with name_scope(main.unique("crf_decoding")), torch.no_grad():
        operands = (input, main.handle(name), _lengths("crf_decoding", input, length))
        path = record_call(torch.ops.penstock.crf_decoding, operands, {})
        return path if label is None else (path == label.reshape(path.shape)).to(torch.int64)


def _lengths(layer: str, input: Any, length: Any) -> Any:
    if length is None and not is_sequence(input):
        raise ProgramError(
            f"{user_line()}: {layer} needs ragged rows (an input with lod_level=1), or `length` for a padded batch "
            f"[n, t, tags]; got {input}",
            variable=input.name,
        )
    return sequence_lengths(input) if length is None else length
