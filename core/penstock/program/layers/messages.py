"""Looking into a run: `Print` and `Assert`. Source: python/paddle/fluid/layers/control_flow.py (Fluid 1.8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.native.messages import PHASES
from penstock.program.layers.control_flow import expect_condition
from penstock.program.layers.sequences import is_sequence, sequence_lengths
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes, wrap


def Print(
    input: Any,
    first_n: int = -1,
    message: str | None = None,
    summarize: int = 20,
    print_tensor_name: bool = True,
    print_tensor_type: bool = True,
    print_tensor_shape: bool = True,
    print_tensor_layout: bool = True,
    print_tensor_lod: bool = True,
    print_phase: str = "both",
) -> Any:
    """Return `input`, and write it to standard output in each run; its gradient, too, where the result is used.

    `first_n`: only in the first runs (with an iteration's each). `summarize`: how many elements, -1 for all.
    `print_phase`: "forward", "backward" or "both". Each replica writes its own rows.
    """
    if not isinstance(input, Variable):
        raise ArgumentError(f"{user_line()}: Print needs a variable; got {input!r}")
    phase = print_phase.lower()
    if phase not in PHASES:
        raise ProgramError(f"{user_line()}: Print: print_phase is {print_phase!r}; expected one of {', '.join(PHASES)}")
    wanted = {
        "name": print_tensor_name,
        "type": print_tensor_type,
        "shape": print_tensor_shape,
        "layout": print_tensor_layout,
        "lod": print_tensor_lod,
    }
    shows = " ".join(part for part, is_shown in wanted.items() if is_shown)
    recording = recording_of(default_main_program())
    lengths = sequence_lengths(input) if print_tensor_lod and is_sequence(input) else None
    with name_scope(default_main_program().unique("print")), recording_modes(recording):
        settings = (input.name, message or "", int(first_n), int(summarize), shows, phase)
        own = None if lengths is None else lengths.fake
        return wrap(recording, torch.ops.penstock.print(recording.own(input).fake, own, recording.rng(), *settings))


def Assert(cond: Any, data: Sequence[Any] | None = None, summarize: int = 20, name: str | None = None) -> None:
    """End a run in which `cond`, one bool, is false with an OperatorError; write the variables `data` before.

    `summarize`: how many elements of each are written, -1 for all.
    """
    expect_condition("Assert", cond)
    values = list(data or ())
    if not all(isinstance(value, Variable) for value in values):
        raise ArgumentError(f"{user_line()}: Assert writes variables; data is {data!r}")
    main = default_main_program()
    recording = recording_of(main)
    with name_scope(name or main.unique("assert")), torch.no_grad(), recording_modes(recording):
        fakes = [recording.own(value).fake.detach() for value in values]
        names = [value.name for value in values]
        torch.ops.penstock.expect_true(recording.own(cond).fake, fakes, names, cond.name, int(summarize))


__all__ = ["Assert", "Print"]
