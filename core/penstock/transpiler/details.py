"""Fluid's module path of the transpiler's helpers: `fluid.transpiler.details.program_to_code`."""

from __future__ import annotations

from typing import TextIO

from penstock.program.program import Program


def program_to_code(prog: Program, fout: TextIO | None = None, skip_op_callstack: bool = True) -> None:
    """Print a Program as its text to standard output, or to an open text file.

    The text has each operator's source line in any case; `skip_op_callstack` is accepted, as in Fluid.
    Source: paddle.fluid.transpiler.details.program_utils (Fluid 1.8).
    """
    print(prog.to_string(), file=fout)


__all__ = ["program_to_code"]
