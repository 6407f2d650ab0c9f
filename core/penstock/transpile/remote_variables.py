"""Remote variables of a trainer's program, which servers keep: blocks, their servers, their rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.program.ir import Operator, Ref
from penstock.program.program import Program
from penstock.ps.remote import GEO, PREFETCH, RECV

Kind = Literal["dense", "rows", "ids"]


@dataclass(frozen=True, slots=True)
class RemoteVariable:
    """`blocks[i]` is on server `at[i]` and has `heights[i]` rows.

    `kind`: how it is read. "dense": whole blocks; "rows": by row number; "ids": by any id, and then it has no heights.
    """

    name: str
    blocks: tuple[str, ...]
    at: tuple[int, ...]
    heights: tuple[int, ...]
    kind: Kind


def remote_variables(programs: Iterable[Program]) -> list[RemoteVariable]:
    """Return the variables that are read from servers, each once: tables as they are looked up, else whole."""
    found: dict[str, RemoteVariable] = {}
    for program in programs:
        for op in program.operators:
            one = _read_by(program, op)
            if one is not None and (one.name not in found or one.kind != "dense"):
                found[one.name] = one
    return list(found.values())


def _read_by(program: Program, op: Operator) -> RemoteVariable | None:
    args = list[Any](op.args)
    if op.type == RECV:
        out, _, _, variable, blocks, at = args
        heights = [int(str(program.variables[ref.name].shape[0])) for ref in out if isinstance(ref, Ref)]
        return RemoteVariable(variable, tuple(blocks), tuple(at), tuple(heights), "dense")
    if op.type == PREFETCH:
        _, _, variable, blocks, at, heights = args[:6]
        kind: Kind = "rows" if heights else "ids"
        return RemoteVariable(variable, tuple(blocks), tuple(at), tuple(heights), kind)
    if op.type == GEO:
        # Of a table a server sends a trainer what others changed, once: a read of the whole would count as that.
        _, touched, _, variable, blocks, at, heights = args
        as_a_whole: Kind = "dense" if touched is None else "rows"
        return RemoteVariable(variable, tuple(blocks), tuple(at), tuple(heights), as_a_whole)
    return None
