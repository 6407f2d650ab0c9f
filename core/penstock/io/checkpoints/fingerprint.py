"""What of a program has to be the same for a checkpoint to fit it. Pure.

Its operators with all arguments, the variables that they use, and the seed. Not: lines of source; and what says
how many processes train it, and where they are, since a checkpoint may go on with other numbers of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import zip_longest

from penstock.distributed.collective import COLLECTIVE
from penstock.errors import UserError
from penstock.program.ir import Operator, Role, Structure
from penstock.program.program import Program
from penstock.program.text import to_text
from penstock.ps.remote import REMOTE_TYPES


def normal_text(program: Program) -> str:
    """Return the text of what has to be the same."""
    kept = [op for op in program.operators if not _is_about_processes(op)]
    used = {name for op in kept for name in (*op.input_names(), *op.output_names(), *op.writes)}
    variables = program.variables
    used |= {variables[name].storage for name in used}
    return to_text(
        Structure(
            seed=program.seed,
            symbols=program.symbols,
            variables={n: replace(v, source="") for n, v in variables.items() if n in used},
            operators=[replace(op, source="") for op in kept],
            guards=[replace(guard, source="") for guard in program.guards],
            is_test=program.is_test,
        )
    )


def _is_about_processes(op: Operator) -> bool:
    return op.type == COLLECTIVE or op.type in REMOTE_TYPES or bool(op.role & (Role.RPC | Role.DIST))


def fingerprint(text: str) -> str:
    """Return 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_same(mine: str, theirs: str, path: str) -> None:
    """Raise UserError, with the first difference, unless a checkpoint's program (`theirs`) is this one."""
    if mine == theirs:
        return
    pairs = zip_longest(theirs.splitlines(), mine.splitlines(), fillvalue="nothing")
    saved, now = next(pair for pair in pairs if pair[0] != pair[1])
    raise UserError(
        f"the checkpoint {path} is of another program. First difference: it was saved with\n    {saved}\nand this "
        f"program has\n    {now}\nRestore into the program that it was saved from, or give this one another folder",
        file=path, got=now, expected=saved,
    )  # fmt: skip
