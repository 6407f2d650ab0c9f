"""Variables whose sizes follow from data, such as the sentences that a beam search has found.

A graph and its engine know tensors of sizes that follow from the feeds alone, so such a value is an array of one
element (program/control/arrays.py), which only blocks read. A call on one is recorded in a block of its own: there the
element has symbols for its sizes, which the block finds when it runs, and what the call makes of it is unsized again,
or an ordinary variable if its sizes are known. Cost: each such call copies what it makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.compat.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from penstock.errors import ProgramError
from penstock.program.ir import Operator, Ref, VarDesc
from penstock.program.record.arrays import TensorArray, append, set_kind
from penstock.program.record.blocks import Recorded, recorded_block, run_once
from penstock.program.record.context import current_role
from penstock.program.record.fakes import empty_fake
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_now
from penstock.program.sequences import LENGTHS, lengths_of


class Unsized(TensorArray):
    """The handle of a value whose sizes follow from data. `shape` has symbols for them.

    `is_open`: so do its dtype or its number of dimensions; no operator takes it, it can be fetched.
    """

    is_open = False

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same value in a clone of its Program."""
        copy = super().for_recording(recording)
        copy.is_open = self.is_open  # type: ignore[attr-defined]  # of this class
        return copy

    @property
    def shape(self) -> torch.Size:
        """Sizes; those that follow from data are symbols."""
        return empty_fake(list(self.sizes or ()), None, self.dtype).shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes or ())

    @property
    def lod_level(self) -> int:
        """Levels of sequences over its rows."""
        return len(self.levels)

    @property
    def desc(self) -> VarDesc:
        """Its description, with the sizes of the value."""
        described: VarDesc = self.program.variables[self.name]
        sizes = self._recording.symbols
        return replace(described, shape=tuple(sizes.dim(size) for size in self.sizes or ()))

    @staticmethod
    def lifted(recording: Recording, operands: Any, call: Callable[[Any], Any]) -> Any:
        """Record `call(operands)` in a block, with what it reads of unsized variables."""
        return sized_in_block(recording, lambda: call(read_all(recording, operands)))


def read_all(recording: Recording, values: Any) -> Any:
    """Return a nest of values with the elements of unsized variables, read in the block that is open."""
    read: dict[str, Any] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Unsized):
            return value
        if value.is_open:
            raise ProgramError(
                f"{user_line()}: {value.name!r} may have several dtypes or numbers of dimensions, as the branches that "
                "make it return. It can be fetched; for computations let all branches return the same",
                variable=value.name,
            )
        if value.name not in read:
            read[value.name] = read_element(recording, value, "array_first", (), lambda own: list(own.sizes or ()))
        return read[value.name]

    return tree_map(one, values)


def read_element(
    recording: Recording,
    array: TensorArray,
    kind: str,
    index: tuple[Variable, ...],
    sizes_of: Callable[[TensorArray], list[Any]],
) -> Any:
    """Read an element of an array in the block that is open, with the lengths of its sequences beside it."""

    def read(one: TensorArray) -> str:
        own = recording.own(one)
        (name,) = append(recording, kind, (own, *index), [empty_fake(sizes_of(own), None, own.dtype)])
        return name

    name, levels = read(array), recording.own(array).levels
    made = recording.handle(recording.tensor_of(name))
    variables = recording.program.variables
    for number, level in enumerate(reversed(levels)):
        rename_recorded(recording, recording.tensor_of(read(level)), name + LENGTHS)
        variables[name] = replace(variables[name], lod_level=len(levels) - number)
        name += LENGTHS
    return made


def sized_in_block(recording: Recording, build: Callable[[], Any]) -> Any:
    """Return what `build()` returns, recorded in a block; results whose sizes follow from data are unsized.

    In a block that is open already nothing of this is needed. Raises ProgramError for results that are arrays.
    """
    if recording.open_blocks:
        return build()
    with recorded_block(recording) as block:
        leaves, nest = tree_flatten(build())
        found = [_Result(recording, leaf) if isinstance(leaf, Variable) else None for leaf in leaves]
        names = [name for one in found if one is not None for name in one.names]
        names = list(dict.fromkeys(names))
        recorded = block.close(names)
    made = dict(zip(names, run_once(recording, recorded, names), strict=True))
    done: dict[str, Any] = {}
    for at, one in enumerate(found):
        if one is not None:
            leaves[at] = done[one.names[0]] = done.get(one.names[0]) or one.handle(made)
    return tree_unflatten(leaves, nest)


class _Result:
    """What a block returns of a variable of its own. `names`: of the value, then of its lengths, innermost first."""

    def __init__(self, recording: Recording, value: Variable) -> None:
        own = recording.own(value)
        if isinstance(own, TensorArray):
            raise ProgramError(f"{user_line()}: {own!r} is an array; expected variables", variable=own.name)
        self._recording, self._sizes = recording, list(own.fake.shape)
        self.is_unsized = follows_from_data(recording, own)
        self.names = [own.name]
        if self.is_unsized:
            levels = lengths_of(recording.program, own.desc.shape[0]) if own.desc.shape else []
            values = [own, *(recording.handle(recording.tensor_of(name)) for name in reversed(levels))]
            self._level_sizes = [list(v.fake.shape) for v in values[1:]]
            self.names = [_packed(recording, one) for one in values]

    def handle(self, made: dict[str, torch.Tensor]) -> Any:
        """The variable outside of the block."""
        recording = self._recording
        tensors = [made[name] for name in self.names]
        if not self.is_unsized:
            return recording.handle(tensors[0])
        name = recording.name_of(tensors[0])
        array = self._unsized(name, tensors[0], self._sizes)
        levels: list[Unsized] = []
        for tensor, sizes in zip(tensors[1:], self._level_sizes, strict=True):
            name += LENGTHS
            rename_recorded(recording, tensor, name)
            levels.insert(0, self._unsized(name, tensor, sizes))
        array.levels = levels
        return array

    def _unsized(self, name: str, tensor: torch.Tensor, sizes: list[Any]) -> Unsized:
        set_kind(self._recording, name, "unsized")
        array = Unsized(self._recording, name, tensor)
        array.sizes = sizes
        self._recording.handles[name] = array
        return array


def _packed(recording: Recording, value: Any) -> str:
    (name,) = append(recording, "array_of", (value,), [empty_fake([0], None, value.dtype)])
    set_kind(recording, name, "array")
    return name


# ---------------------------------------------------------------- branches


def packed_result(recording: Recording, recorded: Recorded, name: str) -> tuple[Recorded, str]:
    """Let a block return a variable as an array of one element, of any sizes; return the block and the array's name."""
    var = recorded.made.get(name) or recording.program.variables[name]
    if var.kind in ("array", "unsized"):  # of a branch within the branch
        made = {**recorded.made, name: replace(var, kind="array")} if name in recorded.made else recorded.made
        return replace(recorded, made=made), name
    own = recording.program.unique_operator("array_of")
    array = f"{own}.tmp_0"
    role, _ = current_role()
    op = Operator(own, "penstock.array_of", (Ref(name),), (array,), role=role, source=user_line())
    made = {**recorded.made, array: VarDesc(array, (0,), var.dtype, "array", source=op.source)}
    reads = recorded.reads if name in recorded.made else tuple(dict.fromkeys((*recorded.reads, name)))
    return Recorded((*recorded.operators, op), made, reads, recorded.writes), array


def of_branches(recording: Recording, name: str, tensor: torch.Tensor, shapes: Sequence[Any]) -> Unsized:
    """Return the handle of what branches return in different (shape, dtype, …)s: unequal sizes become symbols."""
    (first, dtype, _), *others = shapes
    set_kind(recording, name, "array" if recording.open_blocks else "unsized")
    array = Unsized(recording, name, tensor)
    array.is_open = first is None or any(s is None or (len(s), d) != (len(first), dtype) for s, d, _ in others)
    symbols = recording.symbols
    columns = () if array.is_open else zip(*(shape for shape, *_ in shapes), strict=True)
    array.sizes = [symbols.size(one[0]) if len(set(one)) == 1 else symbols.new_of_data() for one in columns]
    recording.handles[name] = array
    return array


def follows_from_data(recording: Recording, value: Variable) -> bool:
    """Whether a size of a variable in a block is one that follows from data."""
    late = recording.symbols.of_data.keys()
    return any(not isinstance(size, int) and size.symbols() & late for size in value.desc.shape)


def reads_unsized(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer take unsized variables: it is recorded in a block then, as torch functions on them are."""

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unsized)), None)
        if found is None:
            return layer(*args, **kwargs)
        recording = recording_now(found._recording)

        def inside() -> Any:
            positional, named = read_all(recording, (args, kwargs))
            return layer(*positional, **named)

        return sized_in_block(recording, inside)

    return call
