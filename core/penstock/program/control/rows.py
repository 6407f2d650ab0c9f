"""Operators that run a block on a part of the rows: `dynamic_recurrent` and `if_else`.

dynamic_recurrent  counts = [s, m, d, c, o, batch, r, then r pairs]: inputs are the lengths int64 [n, 1], s ragged
                   sequences [rows, …], m memories [n, …], d statics, c states, then what each step reads. Sequences are
                   taken in the order of their lengths, longest first. Step t is of those that are longer than t: the
                   block is given their rows at t, their rows of memories and of statics, and as the symbol `batch` (a
                   position among the sizes) their number. A static is [n, …], or ragged itself: a pair has its position
                   among the inputs and that of its lengths, which are a static as well. Results: the o outputs of all
                   steps as rows in the order of the sequences' own, and the states after the last step.
if_else            counts = [d, batch]: inputs are a mask bool [n, 1], d variables [n, …], then what both blocks read.
                   blocks[0] is given the rows of which the mask is true, blocks[1] the others; a block without rows is
                   not run. Results: rows of both, in the order of the mask's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.program.control.interpreter import CompiledBlock, Value
from penstock.program.control.loops import Draws
from penstock.program.expr import Expr, evaluate
from penstock.program.ir import VarDesc


class _Statics:
    """What each step sees of inputs with one row, or one sequence of rows, for each sequence."""

    def __init__(self, given: Sequence[Tensor], first: int, pairs: Mapping[int, int], order: Tensor) -> None:
        self._first, self._given, self._order = first, given, order
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._dense: dict[int, Tensor] = {}
        for at in range(first, len(given)):
            if at in pairs:
                lengths = given[pairs[at]].reshape(-1)
                starts = lengths.cumsum(0) - lengths
                self._rows[at] = (lengths[order], starts[order])
            else:
                self._dense[at] = given[at].index_select(0, order)

    def of_step(self, num_active: int) -> tuple[list[Tensor], dict[int, int]]:
        """Return the values for the first sequences, and the rows of those that are ragged, by position."""
        found, sizes = [], {}
        for at in range(self._first, len(self._given)):
            if at in self._dense:
                found.append(self._dense[at][:num_active])
                continue
            lengths, starts = (part[:num_active] for part in self._rows[at])
            rows = rows_of(lengths, starts)
            sizes[at] = len(rows)
            found.append(self._given[at].index_select(0, rows))
        return found, sizes


def rows_of(lengths: Tensor, starts: Tensor) -> Tensor:
    """Return the positions of all rows of sequences, one sequence after another."""
    own = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - own, lengths) + torch.arange(int(lengths.sum()))


def dynamic_recurrent(
    blocks: Sequence[CompiledBlock], given: list[Value], sizes: Mapping[str, int], counts: Sequence[int]
) -> list[Value]:
    """Run a `dynamic_recurrent`."""
    num_sequences, num_memories, num_statics, num_states, num_outputs, batch, _, *paired = counts
    block, symbols = blocks[0], blocks[0].block.symbols
    after = [1 + num_sequences, num_memories, num_statics, num_states]
    ends = [sum(after[: i + 1]) for i in range(4)]
    lengths = given[0].reshape(-1)
    order = torch.argsort(lengths, descending=True, stable=True)
    ranked, starts = lengths[order], (lengths.cumsum(0) - lengths)[order]
    statics = _Statics(given[: ends[2]], ends[1], dict(zip(paired[::2], paired[1::2], strict=True)), order)
    memories = [m.index_select(0, order) for m in given[ends[0] : ends[1]]]
    states, rest, draws = given[ends[2] : ends[3]], given[ends[3] :], Draws(block, given)
    outputs: list[list[Tensor]] = []
    places: list[Tensor] = []
    for t in range(int(ranked[0]) if len(ranked) else 0):
        num_active = int((ranked > t).sum())
        places.append(starts[:num_active] + t)
        fixed, ragged = statics.of_step(num_active)
        bound = {**sizes, symbols[batch]: num_active}
        bound |= {symbol: size for at, size in ragged.items() if (symbol := _rows_symbol(block.inputs[at]))}
        now = [x.index_select(0, places[-1]) for x in given[1 : ends[0]]]
        before = [m[:num_active] for m in memories]
        made = block.run(draws.of_next([given[0], *now, *before, *fixed, *states, *rest]), bound)
        outputs.append(made[:num_outputs])
        memories, states = made[num_outputs : num_outputs + num_memories], made[num_outputs + num_memories :]
    return [*_in_order(outputs, places, block.outputs[:num_outputs], sizes), *states]


def _rows_symbol(var: VarDesc) -> str:
    """The symbol of ragged rows; '' where they are a multiple of the sequences, all of one length."""
    rows = var.shape[0]
    assert isinstance(rows, Expr)  # what the recorder gives as ragged
    return str(rows.args[0]) if rows.op == "sym" else ""


def _in_order(
    parts: Sequence[Sequence[Tensor]], places: Sequence[Tensor], described: Sequence[VarDesc], sizes: Mapping[str, int]
) -> list[Tensor]:
    """Rows that were made in parts, at the places that they belong to; without parts, results of no row."""
    if not parts:
        return [_no_rows(var, sizes) for var in described]
    back = torch.argsort(torch.cat(list(places)))
    return [torch.cat(column).index_select(0, back) for column in zip(*parts, strict=True)]


def _no_rows(var: VarDesc, sizes: Mapping[str, int]) -> Tensor:
    return torch.zeros([0, *(evaluate(dim, sizes) for dim in var.shape[1:])], dtype=getattr(torch, var.dtype))


def if_else(
    blocks: Sequence[CompiledBlock], given: list[Value], sizes: Mapping[str, int], counts: Sequence[int]
) -> list[Value]:
    """Run an `if_else`."""
    num_split, batch = counts
    mask = given[0].reshape(-1)
    parts: list[list[Tensor]] = []
    places: list[Tensor] = []
    for block, chosen in zip(blocks, (mask, ~mask), strict=True):
        rows: Any = chosen.nonzero().reshape(-1)
        if not len(rows):
            continue
        own = [x.index_select(0, rows) for x in given[1 : 1 + num_split]]
        bound = {**sizes, block.block.symbols[batch]: len(rows)}
        parts.append(block.run([given[0].index_select(0, rows), *own, *given[1 + num_split :]], bound))
        places.append(rows)
    return list(_in_order(parts, places, blocks[0].outputs, sizes))
