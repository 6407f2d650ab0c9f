"""Metrics as operators. Their counters are buffers: one set a replica, replica 0's are saved."""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.layers.expected import expect_ids
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import recording_modes, wrap
from penstock.program.training.parameters import create_persistable


def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """Return the share of rows whose label is among the k largest. Shapes: input [n, classes], label [n, 1]."""
    if correct is not None or total is not None:
        raise ProgramError(f"{user_line()}: accuracy(correct=, total=) is not supported; fetch the result instead")
    expect_ids("accuracy", label)
    recording = recording_of(default_main_program())
    with name_scope(default_main_program().unique("accuracy")), torch.no_grad(), recording_modes(recording):
        indices = input.fake.detach().topk(k, -1).indices
        return wrap(recording, torch.ops.penstock.accuracy(indices, label.fake)[0])


def auc(
    input: Any,
    label: Any,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Any, Any, list[Any]]:
    """Return (auc over all rows so far, auc of this batch, their counters).

    Shapes: input [n, 2] probabilities (column 1 counts) or [n, 1]; label int64 [n, 1]; result a scalar.
    The counters stay until their variables are set to zero. Source: fluid.layers.auc.
    """
    if curve != "ROC":
        raise ProgramError(f"{user_line()}: auc(curve={curve!r}): only 'ROC' is supported")
    prefix = default_main_program().unique("auc")
    zero = Constant(0)
    states = [create_persistable(f"{prefix}.{s}", [num_thresholds + 1], "int64", zero) for s in ("pos", "neg")]
    recording = recording_of(default_main_program())
    with name_scope(prefix), torch.no_grad(), recording_modes(recording):
        predict = input.fake.detach()
        overall = torch.ops.penstock.auc(predict, label.fake, states[0].fake, states[1].fake)
        fresh = [torch.zeros(num_thresholds + 1, dtype=torch.int64) for _ in range(2)]
        batch = torch.ops.penstock.auc(predict, label.fake, *fresh)
        return wrap(recording, overall), wrap(recording, batch), states
