"""Variables that stand for another value from some operator on: a new version of a name, or a write into its memory.

A temporary gets a new version: what is recorded after it means the new value by the old name, what was recorded before
keeps the old value, which autograd may have saved, under another name. State, inputs and views keep their memory, as do
variables from outside of the block that is recorded: they are written in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.program.ir import Operator, Ref
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.variable import Variable, recording_modes


def take_over(recording: Recording, name: str, made: torch.Tensor) -> None:
    """Let a variable stand for a tensor of its shape and dtype that was just recorded."""
    program = recording.program
    handle, kind = recording.handles[name], program.variables[name].kind
    if not is_replaceable(recording, name):
        if kind == "array":
            args = (Ref(name), Ref(recording.name_of(made)))
            program.append(Operator(program.unique_operator("array_assign"), ARRAY_ASSIGN, args, (), writes=(name,)))
            return
        with recording_modes(recording), torch.set_grad_enabled(torch.is_grad_enabled() and not handle.persistable):
            handle.fake.copy_(made)
        return
    _stand_for(recording, name, made)
    program.variables[name] = replace(program.variables[name], kind=kind)


def _stand_for(recording: Recording, name: str, made: torch.Tensor) -> None:
    """Give what was just recorded the name of another variable, which gets a name of its own."""
    program, handle = recording.program, recording.handles[name]
    old = handle.fake
    former = program.unique(f"{name}@BEFORE")
    rename_recorded(recording, old, former)
    recording.handles[former] = Variable(recording, former, old)
    rename_recorded(recording, made, name)
    handle.stand_for(made, name)
    recording.handles[name] = handle


def copy_view(recording: Recording, name: str) -> None:
    """Let the name of a view mean a copy of it from now on; what was recorded before reads the view."""
    handle = recording.handles[name]
    with recording_modes(recording):
        made = handle.fake.clone(memory_format=torch.contiguous_format)
    _stand_for(recording, name, made)


Recording.copy_view = staticmethod(copy_view)
ARRAY_ASSIGN = "penstock.array_assign"


def is_replaceable(recording: Recording, name: str) -> bool:
    """Whether a name may mean another tensor from now on: a temporary of this block.

    Views of it keep the old value: in Fluid what a reshape or a slice returns is a copy.
    """
    var = recording.program.variables[name]
    if var.feed or var.persistable or var.storage != name:
        return False
    return not recording.open_blocks or recording.open_blocks[-1].makes(name)
