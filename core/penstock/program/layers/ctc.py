"""Connectionist temporal classification: its loss, the best labels, and how far labels are from what was wanted.

Source: fluid.layers.warpctc, ctc_greedy_decoder, edit_distance (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.program.layers.expected import expect_ids, expect_rank, refuse
from penstock.program.layers.sequences import is_sequence, padded, sequence_unpad
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import record_call


def warpctc(
    input: Any,
    label: Any,
    blank: int = 0,
    norm_by_times: bool = False,
    input_length: Any = None,
    label_length: Any = None,
) -> Any:
    """Return minus the logarithm of the probability of each label, [n, 1].

    Shapes: input, of which the softmax is taken, [rows, classes] and label int [rows, 1], both ragged; or input
    [t, n, classes], label int [n, l] and lengths int64 [n] or [n, 1]. `blank`: the class that is no id of a label.
    `norm_by_times`: gradients, not the loss, are divided by the steps of a sequence. On CPU.
    """
    with name_scope(default_main_program().unique("warpctc")):
        if input_length is None or label_length is None:
            input, input_length = _rows("warpctc", input)
            label, label_length = _rows("warpctc", label)
        else:
            expect_rank("warpctc", input, 3)
            input = input.transpose(0, 1)
        expect_ids("warpctc", label)
        steps, sizes = (v.reshape([-1]).to(torch.int64) for v in (input_length, label_length))
        ids = label.flatten(1).to(torch.int64)
        loss = record_call(torch.ops.penstock.ctc, (input, ids, steps, sizes, int(blank)), {})
        if not norm_by_times:
            return loss
        share = 1.0 / steps.clamp(min=1).to(loss.dtype).unsqueeze(1)
        return loss * share + loss.detach() * (1.0 - share)


@reads_unsized
def ctc_greedy_decoder(
    input: Any, blank: int, input_length: Any = None, padding_value: int = 0, name: str | None = None
) -> Any:
    """Return the ids of the most probable classes, without repetitions and blanks, and how many there are.

    Shapes: input [n, t, classes], input_length int64 [n, 1]; results int64 [n, t], `padding_value` behind the ids, and
    [n, 1]. Or, without `input_length`, ragged rows [rows, classes]; the one result is the ids int64 [found, 1], ragged,
    whose rows follow from data. Fluid's has one row of -1 where no id is found at all, this one has none.
    """
    if input_length is None:
        steps, own = _rows("ctc_greedy_decoder", input)
        return sequence_unpad(*ctc_greedy_decoder(steps, blank, own, padding_value, name)).reshape([-1, 1])
    expect_rank("ctc_greedy_decoder", input, 3)
    with name_scope(name or default_main_program().unique("ctc_greedy_decoder")), torch.no_grad():
        best = input.argmax(2)
        steps = torch.ones_like(best).cumsum(1) - 1
        own = steps < input_length.reshape([-1, 1])
        before = torch.cat([torch.full_like(best[:, :1], -1), best], 1).narrow(1, 0, best.shape[1])
        kept = torch.logical_and(own, torch.logical_and(best != blank, best != before))
        place = torch.where(kept, kept.to(torch.int64).cumsum(1) - 1, torch.full_like(best, best.shape[1]))
        room = best.new_full([best.shape[0], best.shape[1] + 1], padding_value)
        found = torch.scatter(room, 1, place, best).narrow(1, 0, best.shape[1])
        return found, kept.to(torch.int64).sum(1, keepdim=True)


@reads_unsized
def edit_distance(
    input: Any,
    label: Any,
    normalized: bool = True,
    ignored_tokens: Sequence[int] | None = None,
    input_length: Any = None,
    label_length: Any = None,
) -> tuple[Any, Any]:
    """Return (how many ids differ, inserted or missing ones among them, float32 [n, 1]; the number of sequences [1]).

    Shapes: input and label int64 [rows, 1], ragged; or [n, l] with their lengths int64 [n] or [n, 1]. `normalized`:
    divided by the label's length, which is not zero then. `ignored_tokens` are left out of both. On CPU.
    """
    for ids in (input, label):
        expect_ids("edit_distance", ids)
    with name_scope(default_main_program().unique("edit_distance")), torch.no_grad():
        if input_length is None or label_length is None:
            input, input_length = _rows("edit_distance", input)
            label, label_length = _rows("edit_distance", label)
        found, wanted = (v.flatten(1).to(torch.int64) for v in (input, label))
        sizes = [v.reshape([-1]).to(torch.int64) for v in (input_length, label_length)]
        operands = (found, wanted, *sizes, list(ignored_tokens or ()), bool(normalized))
        distance = record_call(torch.ops.penstock.edit_distance, operands, {})
        return distance, distance.new_full([1], distance.shape[0], dtype=torch.int64)


def _rows(layer: str, x: Any) -> tuple[Any, Any]:
    if not is_sequence(x):
        refuse(layer, "ragged rows (lod_level=1), or input_length and label_length", x, "Declare it so, or give both")
    return padded(layer, x)
