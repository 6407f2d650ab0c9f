"""Updates of dense blocks that are computed before their round is applied: on copies of what they write.

A block can be staged if its update writes nothing that another block or the round block has too. The round block
(learning-rate schedule, counters) runs on a copy of its numbers first, once a round. Copies of one update of each block
take `MOST_BYTES` at most: blocks beyond it, in the program's order, are not staged. A block has a set of copies for
each *slot* that is used, so that several updates of it are staged at the same time: in modes without rounds two, and
twice the memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.serving.blocks import PreparedBlock
from penstock.serving.plans import BlockUpdate

MOST_BYTES = 1 << 28
Tensors = dict[str, torch.Tensor]


class _Staged:
    """One update of a block: `copies` of what it writes."""

    def __init__(self, program: Program, update: BlockUpdate, written: set[str], numbers: Mapping[str, torch.Tensor]):
        self.lock = threading.Lock()
        self._name, self._kept = update.name, {name: update.bound[name] for name in written}
        self._copies: Tensors = {name: tensor.clone() for name, tensor in self._kept.items()}
        ahead = {name: numbers[name] for name in update.bound if name in numbers}
        self._block = PreparedBlock(program, update.operators, {**update.bound, **ahead, **self._copies})

    def run(self, fed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for name, tensor in self._kept.items():
            self._copies[name].copy_(tensor)
        self._block.run(fed)
        return self._copies[self._name].clone()

    def take(self) -> None:
        for name, tensor in self._kept.items():
            tensor.copy_(self._copies[name])


class StagedUpdates:
    """Updates of `updates` before their round. `numbers`: of the round block, changed under `round_lock`. Thread-safe.

    `others`: what blocks that are none of these have.
    """

    def __init__(
        self, program: Program, updates: Sequence[BlockUpdate], round_operators: Sequence[Operator],
        numbers: Mapping[str, torch.Tensor], others: Sequence[str], round_lock: threading.Lock,
    ) -> None:  # fmt: skip
        self._program, self._numbers, self._round_lock = program, numbers, round_lock
        self._round_operators = round_operators
        users = Counter([*numbers, *others, *(name for update in updates for name in update.bound)])
        self._written: dict[str, set[str]] = {}
        self._updates = {update.name: update for update in updates}
        left = MOST_BYTES
        for update in updates:
            written = {program.variables[name].storage for op in update.operators for name in op.writes}
            written &= update.bound.keys()
            num_bytes = sum(update.bound[name].nbytes for name in written)
            if update.name in written and all(users[name] == 1 for name in written) and num_bytes <= left:
                self._written[update.name], left = written, left - num_bytes
        self._ahead: Tensors | None = None  # the numbers of the round to come
        self._round: PreparedBlock | None = None
        self._is_begun = False
        self._blocks: dict[tuple[str, int], _Staged] = {}  # by slot
        self._making = threading.Lock()

    def __contains__(self, block: str) -> bool:
        return block in self._written

    def changed(self) -> None:
        """The numbers have changed: a round has begun, or they were restored. Under the round's lock."""
        self._is_begun = False

    def run(self, block: str, fed: Mapping[str, torch.Tensor], slot: int = 0) -> torch.Tensor:
        """Return a new tensor: the value of the block after the next round, if it is updated with this."""
        staged = self._staged(block, slot)
        with staged.lock:
            return staged.run(fed)

    def take(self, block: str, slot: int = 0) -> None:
        """Write what was run of the block in the slot last to where it is kept."""
        staged = self._blocks[block, slot]
        with staged.lock:
            staged.take()

    def _staged(self, block: str, slot: int) -> _Staged:
        with self._making:
            numbers = self._begun()
            if (block, slot) not in self._blocks:
                made = _Staged(self._program, self._updates[block], self._written[block], numbers)
                self._blocks[block, slot] = made
            return self._blocks[block, slot]

    def _begun(self) -> Tensors:
        """Return the numbers as they will be in the next round."""
        with self._round_lock:
            if self._ahead is None or self._round is None:
                self._ahead = {name: tensor.clone() for name, tensor in self._numbers.items()}
                self._round = PreparedBlock(self._program, self._round_operators, self._ahead)
            if not self._is_begun:
                for name, tensor in self._numbers.items():
                    self._ahead[name].copy_(tensor)
                self._round.run({})
                self._is_begun = True
            return self._ahead
