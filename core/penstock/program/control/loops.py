"""Operators that run a block several times, once for each iteration or step: `while` and `recurrent`.

while      counts = [c]: the first c inputs are carried from one iteration to the next; inputs[0] says whether there is
           one more. Results: what is carried, after the last iteration.
recurrent  counts = [s, m, c, o]: inputs are s sequences [time, …], m memories, c states, then what each step reads. In
           step t the block is given the sequences at t; it returns o outputs, and the memories and states of the next
           step. Results: the outputs of all steps, [time, …], and the states after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.program.control.interpreter import CompiledBlock, Value
from penstock.program.ir import VarDesc

RNG = "@RNG@"
_FACTOR, _STEP = 6364136223846793005, 1442695040888963407  # of a linear congruential generator with 64 bits


@dataclass(frozen=True, slots=True)
class Leading:
    """Sizes that a result has before those of the block's result, of which `dropped` fall away."""

    added: tuple[int, ...] = ()
    dropped: int = 0


def results_of(
    kind: str, block: CompiledBlock, inputs: Sequence[Tensor], counts: Sequence[int]
) -> list[tuple[VarDesc, Leading]]:
    """Return what the results of an operator are: descriptions from its block, and how their sizes differ."""
    described = block.outputs
    if kind == "recurrent":
        _, num_memories, _, num_outputs = counts
        outputs = [(var, Leading((inputs[0].shape[0],))) for var in described[:num_outputs]]
        return [*outputs, *((var, Leading()) for var in described[num_outputs + num_memories :])]
    if kind == "dynamic_recurrent":
        num_outputs, num_memories = counts[4], counts[1]
        outputs = [(var, Leading((inputs[1].shape[0],), 1)) for var in described[:num_outputs]]
        return [*outputs, *((var, Leading()) for var in described[num_outputs + num_memories :])]
    return [(var, Leading()) for var in described]


class Draws:
    """Gives each iteration a random state of its own: the seed of the step, mixed with the iteration's number."""

    def __init__(self, block: CompiledBlock, given: Sequence[Value]) -> None:
        names = block.block.inputs
        self._at = names.index(RNG) if RNG in names else -1
        self._first: Any = given[self._at] if self._at >= 0 else None
        self._number = 0

    def of_next(self, operands: list[Value]) -> list[Value]:
        """Set the random state among the operands of the next iteration."""
        if self._at >= 0:
            state = self._first.clone()
            state[0] = state[0] * _FACTOR + self._number * _STEP  # int64 wraps round
            operands[self._at] = state
        self._number += 1
        return operands


def repeated(
    blocks: Sequence[CompiledBlock], given: list[Value], sizes: Mapping[str, int], counts: Sequence[int]
) -> list[Value]:
    """Run a `while`."""
    (num_carried,) = counts
    draws = Draws(blocks[0], given)
    carried, rest = given[:num_carried], given[num_carried:]
    while bool(carried[0]):
        carried = blocks[0].run(draws.of_next([*carried, *rest]), sizes)
    return carried


def recurrent(
    blocks: Sequence[CompiledBlock], given: list[Value], sizes: Mapping[str, int], counts: Sequence[int]
) -> list[Value]:
    """Run a `recurrent`. Raises ValueError for sequences of different length, or of none."""
    num_sequences, num_memories, num_states, num_outputs = counts
    split = num_sequences + num_memories + num_states
    sequences, carried, rest = given[:num_sequences], given[num_sequences:split], given[split:]
    lengths, draws = {x.shape[0] for x in sequences}, Draws(blocks[0], given)
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"the sequences have {sorted(lengths)} steps; expected one number of steps, at least 1")
    outputs: list[list[Tensor]] = []
    for t in range(lengths.pop()):
        made = blocks[0].run(draws.of_next([*(x[t] for x in sequences), *carried, *rest]), sizes)
        outputs.append(made[:num_outputs])
        carried = made[num_outputs:]
    stacked = [torch.stack(column) for column in zip(*outputs, strict=True)]
    return [*stacked, *carried[num_memories:]]
