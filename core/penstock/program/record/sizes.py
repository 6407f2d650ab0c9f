"""Sizes of a Program under record as torch takes part in them: the nodes behind torch.SymInt and torch.SymBool.

A node holds a size in canonical form, or a relation of two. A relation that holds for every batch, or for none, is
answered; any other is answered by the sizes at hand (`Sizes.hints`), and kept as a guard with the line that asked.
Compared with -1 by a line of the script, a size that a feed has is -1, as in Fluid's shapes: no size is -1 else. In a
module and a captured loss, and for what a script calculates of a size, it is not, as in torch.
torch calls nodes by the names of its own SymNode.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from penstock.compat.torch import SYMBOL_FILES
from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr, renamed
from penstock.program.record import arithmetic
from penstock.program.record.alignment import follows_fluid
from penstock.program.record.arithmetic import Size, constant
from penstock.program.record.relations import HOLDS, MIRRORED, All, Asked, Condition, Not, Real, Relation, RelationOp
from penstock.program.record.source import line_of_frame, running_module, user_line

_symint: Any = torch.SymInt  # torch has not typed it


@dataclass(slots=True)
class Sizes:
    """The size symbols of one Program, and what was asked of them.

    `hints`: symbol -> the size at hand. `asked`: since the last `forget`. `known`: relations that hold, as asked.
    `shapes`: those of calls that were made before; shapes.py keeps them.
    `recording`: returns the Recording that the sizes belong to; None once it is gone.
    """

    recording: Callable[[], Any] = lambda: None
    hints: dict[str, int] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    known: set[Relation] = field(default_factory=set)
    shapes: dict[Any, Any] = field(default_factory=dict)
    equal: dict[str, str | Dim] = field(default_factory=dict)
    """Symbol -> the one, or the size, that it was found to be equal to, after it had been used."""
    declared: dict[str, int] = field(default_factory=dict)  # symbol -> the number that the script declared
    _renamed: dict[str, Size] = field(default_factory=dict)

    def new(self, name: str, hint: int) -> Any:
        """Return the torch.SymInt of a new symbol."""
        self.hints[name] = hint
        return self.int_of(arithmetic.symbol(name))

    def int_of(self, size: Size) -> Any:
        """Return a size as an int or a torch.SymInt."""
        number = size.number
        return _symint(SizeNode(self, size)) if number is None else number

    def of_dim(self, dim: Dim) -> Any:
        """Return the int or torch.SymInt of an expression of a Program."""
        return self.int_of(arithmetic.of_dim(dim)) if not isinstance(dim, int) else dim

    def take_as_equal(self, names: Mapping[str, str | Dim]) -> None:
        """Let symbols stand for others, also in sizes that exist already; what was asked of them is void."""
        self.equal, self._renamed = dict(names), {}
        void = {r for r in self.known if any(a.key in names for side in (r.left, r.right) for a in side.atoms())}
        self.known -= void
        self.asked = [asked for asked in self.asked if asked.relation not in void]

    def current(self, size: Size) -> Size:
        """Return a size by the symbols that others were found to be equal to."""
        if not self.equal:
            return size
        found = self._renamed.get(size.key)
        if found is None:
            found = self._renamed[size.key] = arithmetic.of_dim(renamed(size.dim, self.equal))
        return found

    def forget(self, *, known: bool) -> None:
        """Begin a new list of what was asked. `known`: what was asked is no longer taken for granted."""
        if known:
            self.known.difference_update(asked.relation for asked in self.asked)
        self.asked = []

    def always(self, condition: Condition) -> bool | None:
        """Whether a condition holds for every batch that the Program accepts, or for none; None if not known."""
        if isinstance(condition, bool):
            return condition
        if isinstance(condition, Not):
            found = self.always(condition.part)
            return None if found is None else not found
        if isinstance(condition, All):
            each = [self.always(part) for part in condition.parts]
            return False if False in each else None if None in each else True
        if condition in self.known:
            return True
        if condition.negated() in self.known:
            return False
        return self._exact(condition).always()

    def ask(self, condition: Condition) -> bool:
        """Return whether a condition holds at the sizes at hand; what follows from that is kept as guards."""
        found = self.always(condition)
        if found is not None:
            return found
        if isinstance(condition, Not):
            return not self.ask(condition.part)
        if isinstance(condition, All):
            return all(self.ask(part) for part in condition.parts)
        assert isinstance(condition, Relation)
        if self.declared and self._fixes(condition):
            return self.ask(Relation(condition.op, self.current(condition.left), self.current(condition.right)))
        holds = condition.at(self.hints)
        relation = condition if holds else condition.negated()
        self.known.add(relation)
        self.asked.append(Asked(relation, _asking_line()))
        return holds

    def _fixes(self, relation: Relation) -> bool:
        """Whether declared sizes are numbers now, since a line outside of torch's calls asks for them."""
        atoms = {atom.key for side in map(self.current, (relation.left, relation.right)) for atom in side.atoms()}
        recording, asked = self.recording(), atoms & self.declared.keys()
        if not asked or recording is None or recording.active:
            return False
        recording.fix_sizes(recording, asked)
        return True

    def number(self, size: Size) -> int:
        """Return the number that a size is at hand, which pins the batch to it unless it is one."""
        if size.number is not None:
            return size.number
        value = size.value(self.hints)
        self.ask(Relation("==", size, constant(value)))
        return value

    def _exact(self, relation: Relation) -> Relation:
        """The relation with `a // b` as a fraction where the Program has a guard that b divides a."""
        for known in self.known:
            if known.op != "==" or known.right.number != 0:
                continue
            rest = arithmetic.call_of(known.left, "%")
            if rest is not None:
                sides = arithmetic.without_quotient(relation.left, relation.right, *rest)
                relation = Relation(relation.op, *sides)
        return relation


def _asking_line() -> str:
    """The user's line that asks for a relation; '' if torch or the recorder does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith((__file__, *SYMBOL_FILES)):
        frame = frame.f_back
    return "" if frame is None else line_of_frame(frame.f_code.co_filename, frame.f_lineno)


class SizeNode:
    """A size, a condition, or a floating-point number that was computed of sizes. Never changed.

    torch calls its methods from C++ and from torch.SymInt; every name is torch's.
    """

    __slots__ = ("_value", "sizes")
    constant = None

    def __init__(self, sizes: Sizes, value: Size | Condition | float | Real) -> None:
        self.sizes, self._value = sizes, value

    @property
    def value(self) -> Size | Condition | float | Real:
        """The size in its symbols of now, or the condition or number."""
        return self.sizes.current(self._value) if isinstance(self._value, Size) else self._value

    # -- what it is

    def is_int(self) -> bool:
        return isinstance(self.value, Size)

    def is_float(self) -> bool:
        return isinstance(self.value, (float, Real))

    def is_bool(self) -> bool:
        return not isinstance(self.value, (Size, float, Real))

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_constant(self) -> bool:
        return self.maybe_as_int() is not None or isinstance(self.value, bool)

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return self.value.number if isinstance(self.value, Size) else None

    def clone(self) -> SizeNode:
        return self

    def str(self) -> str:
        return str(self.value)

    __str__ = __repr__ = _graph_repr = str

    # -- asking

    def int_(self) -> int:
        return self.sizes.number(_size(self))

    def bool_(self) -> bool:
        return self.sizes.ask(_condition(self))

    def guard_int(self, file: object, line: object) -> int:
        return self.sizes.number(_size(self))

    def guard_bool(self, file: object, line: object) -> bool:
        return self.sizes.ask(_condition(self))

    def guard_float(self, file: object, line: object) -> float:
        return self.value if isinstance(self.value, float) else float(self.sizes.number(_size_behind(self)))

    guard_or_false = guard_or_true = guard_size_oblivious = expect_true = expect_size = guard_bool

    def statically_known_true(self, file: object, line: object) -> bool:
        return self.sizes.always(_condition(self)) is True

    # -- constants

    def wrap_int(self, number: int) -> SizeNode:
        return SizeNode(self.sizes, constant(number))

    def wrap_float(self, number: float) -> SizeNode:
        return SizeNode(self.sizes, number)

    def wrap_bool(self, condition: bool) -> SizeNode:
        return SizeNode(self.sizes, condition)

    # -- arithmetic

    def neg(self) -> SizeNode:
        if self.is_float():
            return SizeNode(self.sizes, Real())
        return SizeNode(self.sizes, arithmetic.scaled(_size(self), -1))

    def abs(self) -> SizeNode:
        return self.sym_max(self.neg())  # type: ignore[attr-defined,no-any-return]  # set below

    def floor(self, _digits: object = None) -> SizeNode:
        return SizeNode(self.sizes, _size_behind(self))

    ceil = trunc = round = pos = sym_int = floor

    def sym_float(self) -> SizeNode:
        return SizeNode(self.sizes, Real(_size(self)))

    def int_truediv(self, other: SizeNode) -> SizeNode:
        return SizeNode(self.sizes, Real())

    truediv = float_truediv = float_pow = int_truediv

    def pow_by_natural(self, other: SizeNode) -> SizeNode:
        if _size(self).number is not None:
            raise _refusal("a power whose exponent follows from the batch size")
        result = arithmetic.ONE
        for _ in range(self.sizes.number(_size(other))):
            result = arithmetic.mul(result, _size(self))
        return SizeNode(self.sizes, result)

    pow = pow_by_natural

    def lshift(self, other: SizeNode) -> SizeNode:
        return SizeNode(self.sizes, arithmetic.scaled(_size(self), 1 << self.sizes.number(_size(other))))

    def rshift(self, other: SizeNode) -> SizeNode:
        return SizeNode(self.sizes, arithmetic.floordiv(_size(self), constant(1 << self.sizes.number(_size(other)))))

    def bitwise_and(self, other: SizeNode) -> SizeNode:
        raise _refusal("a bitwise operation on the batch size")

    bitwise_or = bitwise_xor = bitwise_and

    # -- conditions

    def sym_not(self) -> SizeNode:
        return SizeNode(self.sizes, Not(_condition(self)))

    def sym_and(self, other: SizeNode) -> SizeNode:
        return SizeNode(self.sizes, All((_condition(self), _condition(other))))

    def sym_or(self, other: SizeNode) -> SizeNode:
        return SizeNode(self.sizes, Not(All((Not(_condition(self)), Not(_condition(other))))))

    def sym_ite(self, then: SizeNode, otherwise: SizeNode) -> SizeNode:
        return then if self.bool_() else otherwise

    # -- of a tensor: by the sizes at hand, since its strides come from the same sizes

    def is_contiguous(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        return self.wrap_bool(_is_dense(sizes, strides, range(len(sizes) - 1, -1, -1)))

    def is_channels_last_contiguous_2d(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        return self.wrap_bool(len(sizes) == 4 and _is_dense(sizes, strides, (1, 3, 2, 0)))

    def is_channels_last_contiguous_3d(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        return self.wrap_bool(len(sizes) == 5 and _is_dense(sizes, strides, (1, 4, 3, 2, 0)))

    def is_channels_last_strides_2d(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        return self.wrap_bool(len(sizes) == 4 and _is_ordered(sizes, strides, (1, 3, 2, 0)))

    def is_channels_last_strides_3d(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        return self.wrap_bool(len(sizes) == 5 and _is_ordered(sizes, strides, (1, 4, 3, 2, 0)))

    def is_non_overlapping_and_dense(self, sizes: Sequence[SizeNode], strides: Sequence[SizeNode]) -> SizeNode:
        order = sorted(range(len(sizes)), key=lambda dim: (_at_hand(strides[dim]), _at_hand(sizes[dim])))
        return self.wrap_bool(_is_dense(sizes, strides, order))


def _binary(calculate: Callable[[Size, Size], Size]) -> Any:
    def call(self: SizeNode, other: SizeNode) -> SizeNode:
        if self.is_float() or other.is_float():
            return SizeNode(self.sizes, Real())
        return SizeNode(self.sizes, calculate(_size(self), _size(other)))

    return call


def _relation(op: RelationOp) -> Any:
    def call(self: SizeNode, other: SizeNode) -> SizeNode:
        if self.is_bool() or other.is_bool():
            return self.wrap_bool((self.bool_() == other.bool_()) == (op == "=="))
        if isinstance(self.value, float):
            return SizeNode(self.sizes, _beside_number(MIRRORED[op], _size_behind(other), self.value))
        if isinstance(other.value, float):
            return SizeNode(self.sizes, _beside_number(op, _size_behind(self), other.value))
        relation = Relation(op, _size_behind(self), _size_behind(other))
        if op in ("==", "!=") and _is_of_unknown(relation, self.sizes) and _is_of_script(sys._getframe(1), self.sizes):
            return self.wrap_bool(op == "==")
        return SizeNode(self.sizes, relation)

    return call


def _is_of_unknown(relation: Relation, sizes: Sizes) -> bool:
    """Whether a relation compares -1 with a size of a variable that Fluid does not know before a feed."""
    beside = {relation.left.number: relation.right, relation.right.number: relation.left}.get(-1)
    if beside is None or not any(atom.op == "sym" and atom.key not in sizes.declared for atom in beside.atoms()):
        return False
    recording = sizes.recording()
    programs = [] if recording is None else [one.program for one in recording.symbols.recordings]
    is_of_feed = isinstance(beside.dim, Expr) and beside.dim.op == "sym"
    return is_of_feed or any(beside.dim in var.shape for program in programs for var in program.variables.values())


def _is_of_script(frame: FrameType | None, sizes: Sizes) -> bool:
    """Whether a line of the script, where operators have Fluid's meaning, compares; `frame`: of the method's caller."""
    if frame is None or not frame.f_code.co_filename.endswith(SYMBOL_FILES):
        return False  # torch does, in C++
    while frame is not None and frame.f_code.co_filename.endswith(SYMBOL_FILES):
        frame = frame.f_back
    if frame is None or not line_of_frame(frame.f_code.co_filename, frame.f_lineno):
        return False
    recording = sizes.recording()
    return running_module() is None if recording is None else follows_fluid(recording)


def _beside_number(op: RelationOp, size: Size, number: float) -> Condition:
    """The relation of a size and a floating-point number, which is one of the size and an integer."""
    if not math.isfinite(number):
        return HOLDS[op](0, number)  # type: ignore[arg-type]  # of floats too
    if op in ("==", "!=") and not number.is_integer():
        return op == "!="
    return Relation(op, size, constant(math.floor(number) if op in (">", "<=") else math.ceil(number)))


for _name, _exact in (
    ("add", arithmetic.add), ("sub", arithmetic.sub), ("mul", arithmetic.mul), ("mod", arithmetic.mod),
    ("floordiv", arithmetic.floordiv), ("int_floordiv", arithmetic.floordiv),
    ("sym_max", arithmetic.maximum), ("sym_min", arithmetic.minimum),
):  # fmt: skip
    setattr(SizeNode, _name, _binary(_exact))
for _name, _op in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(SizeNode, _name, _relation(_op))  # type: ignore[arg-type]  # each is a RelationOp


def _size(node: SizeNode) -> Size:
    assert isinstance(node.value, Size)
    return node.value


def _size_behind(node: SizeNode) -> Size:
    """The size of a node, as int or as float. Raises ProgramError for any other floating-point number."""
    value = node.value.size if isinstance(node.value, Real) else node.value
    if isinstance(value, Size):
        return value
    raise _refusal("a floating-point number of the batch size")


def _refusal(what: str) -> ProgramError:
    line = user_line()
    return ProgramError(
        f"{line}: this line computes {what}, which a program cannot hold: a size is an integer of + - * // % max min. "
        "Write x.shape[0] // 2 for half of the rows, and x / x.shape[0] or a tensor (x.new_full((), x.shape[0])) in "
        "arithmetic on values",
        source=line,
    )


def _condition(node: SizeNode) -> Condition:
    assert not isinstance(node.value, (Size, float, Real))
    return node.value


def _at_hand(node: SizeNode) -> int:
    return _size(node).value(node.sizes.hints)


def _is_dense(sizes: Sequence[SizeNode], strides: Sequence[SizeNode], order: Sequence[int]) -> bool:
    expected = 1
    for dim in order:
        size = _at_hand(sizes[dim])
        if size == 0:
            return True
        if size != 1 and _at_hand(strides[dim]) != expected:
            return False
        expected *= size
    return True


def _is_ordered(sizes: Sequence[SizeNode], strides: Sequence[SizeNode], order: Sequence[int]) -> bool:
    least = 0
    for dim in order:
        size, stride = _at_hand(sizes[dim]), _at_hand(strides[dim])
        if stride == 0 or stride < least or (dim == 0 and least == _at_hand(strides[1])):
            return False
        least = stride * max(size, 1)
    return True


def size_of(value: Any) -> Size:
    """Return the canonical form of an int or a torch.SymInt."""
    return _size(value.node) if isinstance(value, torch.SymInt) else constant(int(value))


def always_holds(condition: Any) -> bool:
    """Whether a bool or torch.SymBool is true for every batch that the Program accepts; asks for no guard."""
    if isinstance(condition, torch.SymBool):
        return condition.node.sizes.always(condition.node.value) is True
    return bool(condition)


def recording_of_size(size: torch.SymInt) -> Any:
    """Return the Recording that a size belongs to; None for a size of torch's own, or of one that is gone."""
    return size.node.sizes.recording() if isinstance(size.node, SizeNode) else None
