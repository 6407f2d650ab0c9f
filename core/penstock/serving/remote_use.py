"""Parameter servers that the programs of an Executor use, so that closing it leaves them."""

from __future__ import annotations

import weakref

import torch

from penstock.compat.torch import schema_of
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.ps.communicator import remotes
from penstock.ps.remote import REMOTE_TYPES


def descriptors(program: Program) -> set[str]:
    """Return the descriptors of the remotes that a program's operators name."""
    return {_descriptor(op) for op in program.operators if op.type in REMOTE_TYPES}


def _descriptor(op: Operator) -> str:
    name = op.type.split(".")[1]
    arguments = [a.name for a in schema_of(getattr(torch.ops.penstock, name).default).arguments]
    index = arguments.index("remote")
    return str(op.args[index] if index < len(op.args) else dict(op.kwargs)["remote"])


class RemoteUse:
    """The remotes of the programs that one Executor has run."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        self._used: set[str] = set()

    def note(self, program: Program) -> None:
        """Remember what a program that is about to run uses."""
        if self._seen.get(program) != program.revision:
            self._seen[program] = program.revision
            self._used |= descriptors(program)

    def close(self) -> None:
        """Close them all: this trainer leaves their servers. Raises the first error when all were tried."""
        errors = []
        while self._used:
            try:
                remotes.close(self._used.pop())
            except Exception as error:  # noqa: BLE001  # raised below, when the others are closed
                errors.append(error)
        if errors:
            raise errors[0]
