"""The size symbols of one Program, and the guards that follow from what was asked of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard
from penstock.program.record.arithmetic import Size
from penstock.program.record.relations import Asked
from penstock.program.record.sizes import Sizes, size_of

_DATA_HINT = 6007  # apart from the hints of other symbols, see recording.py


class SymbolTable:
    """Sizes of one Program as torch and the Program have them: s0, s1, …"""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.recordings: weakref.WeakSet[Any] = weakref.WeakSet()  # of the Program and of its clones
        self.of_data: dict[str, None] = {}  # symbols of sizes that follow from data, in order; no Program has them

    def new_of_data(self) -> Any:
        """Return the torch.SymInt of a size that follows from data: within a block that finds it when it runs."""
        name = f"d{len(self.of_data)}"
        self.of_data[name] = None
        return self.sizes.new(name, _DATA_HINT + len(self.of_data))

    def new(self, name: str, hint: int) -> Any:
        """Return the torch.SymInt of a new symbol. `hint`: the size at hand, by which branches are taken."""
        return self.sizes.new(name, hint)

    def size(self, dim: Dim) -> Any:
        """Return the int or torch.SymInt of an expression of the Program."""
        return self.sizes.of_dim(dim)

    def dim(self, size: int | torch.SymInt) -> Dim:
        """Return the expression of a size."""
        return size_of(size).dim if isinstance(size, torch.SymInt) else int(size)

    def new_guards(self, source: str) -> list[Guard]:
        """Return the guards that arose since the last call, each with the line that asked for it.

        Raises ProgramError if one pins a symbol to a number, or if a line of the user's asked for a size that follows
        from data, which nothing could check; what was learnt since the last call is forgotten then.
        """
        fresh = self.sizes.asked
        if not fresh:
            return []
        guards: list[Guard] = []
        forgets, dropped = True, False
        try:
            for asked in fresh:
                if asked.line:
                    self._refuse_of_data(asked)
                guard = _guard(asked, asked.line or source, "" if asked.line else "a call of torch's")
                kept = bool(asked.line) or not _asks_for_few(guard)
                dropped = dropped or not kept
                guards += [guard] if kept else []
            forgets = dropped
        finally:
            self.sizes.forget(known=forgets)
        return guards

    def _refuse_of_data(self, asked: Asked) -> None:
        relation = asked.relation
        guard = Guard(relation.left.dim, relation.op, relation.right.dim, asked.line)
        if guard.symbols() & self.of_data.keys():
            raise ProgramError(
                f"{guard.source}: this line branches on a size that follows from data, or takes it for a number "
                f"({guard}); only a run knows it. Use fluid.layers.cond with a condition over fluid.layers.shape(x), "
                "masks over all rows, and the size itself as an operand: x.shape[0], or -1 in reshape",
                source=guard.source,
            )

    def forget_guards(self, source: str, asker: str) -> list[Guard]:
        """Forget the relations that arose since the last call, so that a branch of the user's evaluates them again.

        `asker`: the operator that was called. Returns those that its results depend on: a cut size that is equal to
        another (`min(20, s0) == 20`), which the kernel may broadcast where it is not. Raises ProgramError if one pins
        a symbol to a number.
        """
        fresh = self.sizes.asked
        self.sizes.forget(known=True)
        found = [_guard(asked, source, asker) for asked in fresh]
        return [g for g in found if g.relation == "==" and any(_is_cut(side) for side in (g.left, g.right))]


def _guard(asked: Asked, source: str, asker: str) -> Guard:
    relation = asked.relation
    if relation.op == "==":
        _refuse_pin(relation.left, relation.right, source, asker)
    return Guard(relation.left.dim, relation.op, relation.right.dim, source)


def _refuse_pin(left: Size, right: Size, source: str, asker: str) -> None:
    # x.shape[0] * 4 == 31680 and x.shape[0] // 2 == 3960 pin the batch as well; x.shape[0] % 2 == 0 is a relation.
    sides = (left, right)
    number = next((side.number for side in sides if side.number is not None), None)
    pins = ("sym", "//") if number else ("sym",)
    sizes = [s for s in sides if s.number is None and all(atom.op in pins for atom in s.atoms())]
    if number is None or not sizes:
        return
    if asker:
        raise ProgramError(
            f"{source}: {asker} cannot run with a symbolic batch: torch itself turns the batch size into the "
            f"number {number} there. Write it by other torch operations",
            source=source,
        )
    raise ProgramError(
        f"{source}: this line turns the batch size into the number {number} (int(x.shape[0]), len(x), range or a "
        "Python loop over the batch), so the program would run with this batch size alone. Keep the size "
        "symbolic: use x.shape[0] itself, -1 in reshape, or torch operations over the whole batch; make tensors of "
        "that size by x.new_ones or in an nn.Module's forward",
        source=source,
    )


def _is_cut(size: Dim) -> bool:
    """Whether `min` or `max` occurs in a size."""
    parts = [a for a in size.args if not isinstance(a, str)] if isinstance(size, Expr) else []
    return isinstance(size, Expr) and (size.op in ("min", "max") or any(map(_is_cut, parts)))


def _asks_for_few(guard: Guard) -> bool:
    """Whether torch asks if a size is 0 or 1, to choose between forms that give the same result."""
    number, small = guard.right, isinstance(guard.right, int) and 0 <= guard.right <= 2
    differs = guard.relation == "!=" and number in (0, 1)
    exceeds = guard.relation in (">", ">=") and small and _is_cut(guard.left)
    return differs or exceeds or _holds_from_two(guard)


def _holds_from_two(guard: Guard) -> bool:
    """Whether a guard excludes nothing but batches of no row or one; kept, it would refuse batch 1."""
    symbols = sorted({s for side in (guard.left, guard.right) if isinstance(side, Expr) for s in side.symbols()})
    sizes = (2, 3, 4, 5, 7, 8, 16, 100, 1 << 20)
    orders = (symbols, symbols[::-1])  # of several symbols each is the smaller one once
    return all(
        guard.holds({name: size + more * i for i, name in enumerate(order)})
        for size in sizes for more in (0, 3) for order in orders
    )  # fmt: skip
