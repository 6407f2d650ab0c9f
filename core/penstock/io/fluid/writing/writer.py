"""What writes the operators of one model: variables by the Program's names, and operators in order.

`add` appends an operator of Fluid; the rest are what several rules need: casts, constants, sizes, broadcasting, LoD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.io.fluid.writing.description import TYPES, Attribute, FluidOperator, Longs, Value
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Structure
from penstock.program.sequences import is_ragged

Inputs = Mapping[str, Value | Sequence[Value]]

# What gradients of Fluid read of an operator; it has these outputs in every model.
_ALSO = {
    **dict.fromkeys(("reshape2", "transpose2", "squeeze2", "unsqueeze2"), ("XShape",)),
    "dropout": ("Mask",), "sequence_pool": ("MaxIndex",), "layer_norm": ("Mean", "Variance"),
    "batch_norm": ("SavedMean", "SavedVariance"), "group_norm": ("Mean", "Variance"),
    "lstm": ("BatchGate", "BatchCellPreAct"), "gru": ("BatchGate", "BatchResetHiddenPrev", "BatchHidden"),
}  # fmt: skip
# Operators whose result has the LoD of their first input, where it has its rows, in all versions.
_WITH_LOD = frozenset(
    [
        "assign", "scale", "cast", "clip", "dropout", "softmax", "concat", "sum", "mul", "lookup_table",
        "lookup_table_v2", "reshape2", "squeeze2", "unsqueeze2", "relu", "sigmoid", "tanh", "square", "sqrt", "exp",
        "log", "abs", "leaky_relu", "gelu", "swish",
    ]
)  # fmt: skip
_COMMUTATIVE = ("elementwise_add", "elementwise_mul", "elementwise_max", "elementwise_min")
_FLOAT32_DIGITS = 9


class Unsupported(Exception):
    """A recorded call that has no form in Fluid; the text says why."""


class ModelWriter:
    """The operators of a model, and its variables by the names of the Program."""

    def __init__(self, program: Structure) -> None:
        self.program = program
        self.operators: list[FluidOperator] = []
        self.values: dict[str, Value] = {}
        self.shared: dict[str, list[Value]] = {}  # results of calls that become one operator with what is behind them

    def value(self, name: str) -> Value:
        """Return a variable that is fed, persistable or made. Raises Unsupported."""
        found = self.values.get(name)
        if found is not None:
            return found
        var = self.program.variables[name]
        if var.distributed:
            raise Unsupported(f"it reads the table {name!r}, whose rows parameter servers have")
        if var.feed and not var.is_data:
            raise Unsupported(f"it reads {name!r}; Fluid has the lengths of sequences in their LoD alone")
        if not var.feed and not var.persistable:
            raise Unsupported(f"it reads {name!r}, which Fluid's form of the call that makes it has not")
        owner = name if is_ragged(self.program, name) else ""
        levels = var.lod_level if var.feed else 0
        made = Value(tuple(var.shape), var.dtype, owner, name, levels, var.feed, var.persistable)
        return self.values.setdefault(name, made)

    def append(
        self, kind: str, inputs: Inputs, outputs: Mapping[str, Value | Sequence[Value]], attrs: Mapping[str, Attribute]
    ) -> FluidOperator:
        """Append an operator with outputs that are given; those that gradients alone read are added."""
        given, made = ({slot: _listed(values) for slot, values in side.items()} for side in (inputs, outputs))
        first = next((value for values in given.values() for value in values), None)
        for slot in _ALSO.get(kind, ()):
            if slot not in made:
                shape: tuple[Dim, ...] = (0, *first.shape) if slot == "XShape" and first else (0,)
                made[slot] = [Value(shape, first.dtype if first else "float32")]
        op = FluidOperator(kind, given, made, dict(attrs))
        for value in (value for values in made.values() for value in values):
            value.maker = op
        self.operators.append(op)
        return op

    def add(
        self,
        kind: str,
        inputs: Inputs,
        attrs: Mapping[str, Attribute] | None = None,
        *,
        shape: Sequence[Dim],
        dtype: str | None = None,
        out: str = "Out",
    ) -> Value:
        """Append an operator of one result and return that. `dtype`: that of the first input unless given."""
        first = next((value for values in inputs.values() for value in _listed(values)), None)
        made = Value(tuple(shape), dtype or (first.dtype if first else "float32"))
        if first is not None and (kind in _WITH_LOD or kind.startswith("elementwise_")):
            source = _listed(inputs["Ids"])[0] if "Ids" in inputs else first
            made.owner = source.owner if source.shape[:1] == made.shape[:1] else ""
        self.append(kind, inputs, {out: made}, attrs or {})
        return made

    # -- values --------------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: str) -> Value:
        """Return x in a dtype: itself, if it has that."""
        if x.dtype == dtype:
            return x
        from_to: dict[str, Attribute] = {"in_dtype": dtype_number(x.dtype), "out_dtype": dtype_number(dtype)}
        return self.add("cast", {"X": x}, from_to, shape=x.shape, dtype=dtype)

    def constant(self, number: float, dtype: str, shape: Sequence[int] = (1,)) -> Value:
        """Return a variable that is full of a number."""
        return self.add(
            "fill_constant", {}, {**_number(number, dtype), "shape": Longs(shape)}, shape=shape, dtype=dtype
        )

    def filled(self, shape: Sequence[Dim], dtype: str, number: float) -> Value:
        """Return a variable of any shape that is full of a number. Raises Unsupported."""
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) == len(shape):
            return self.constant(number, dtype, sizes)
        like = next((v for v in self.values.values() if v.shape == tuple(shape) and not v.made_by("")), None)
        if like is not None:
            return self.filled_like(like, dtype, number)
        if len(shape) - len(sizes) > 1:
            raise Unsupported(f"no variable has the sizes {_sizes(shape)}, which feeds determine")
        at = next(i for i, size in enumerate(shape) if not isinstance(size, int))
        source, axis = self._with_size(shape[at])
        attrs: dict[str, Attribute] = {
            **_number(number, dtype), "shape": [size if isinstance(size, int) else -1 for size in shape],
            "input_dim_idx": axis, "output_dim_idx": at,
        }  # fmt: skip
        return self.add("fill_constant_batch_size_like", {"Input": source}, attrs, shape=shape, dtype=dtype)

    def filled_like(self, x: Value, dtype: str, number: float) -> Value:
        """Return a variable of x's shape that is full of a number."""
        if not is_float32(number):
            return self.binary(
                "elementwise_add", self.filled_like(x, dtype, 0.0), self.constant(number, dtype), x.shape
            )
        attrs: dict[str, Attribute] = {"value": float(number), "dtype": dtype_number(dtype)}
        return self.add("fill_any_like", {"X": x}, attrs, shape=x.shape, dtype=dtype)

    def _with_size(self, size: Dim) -> tuple[Value, int]:
        """Return a variable, and which of its dimensions has a size that feeds determine.

        Of a ragged input, dimension 0 stands for its sequences: fill_constant_batch_size_like counts those.
        """
        for var in self.program.variables.values():
            if var.feed and var.is_data and not is_ragged(self.program, var.name) and size in var.shape:
                return self.value(var.name), var.shape.index(size)
        for value in self.values.values():
            if not value.owner and size in value.shape:
                return value, value.shape.index(size)
        for name, var in self.program.variables.items():
            lengths = self.program.variables.get(f"{name}@LENGTHS")
            if var.is_data and lengths is not None and lengths.shape[0] == size and is_ragged(self.program, name):
                return self.value(name), 0
        raise Unsupported(f"no variable without LoD has the size {size}, which feeds determine")

    def binary(self, kind: str, x: Value, y: Value, shape: Sequence[Dim], dtype: str | None = None) -> Value:
        """Return the result of an operator of two inputs that are broadcast as torch does: Fluid extends Y alone."""
        shape = tuple(shape)
        if kind in _COMMUTATIVE and x.shape != shape and (len(y.shape) > len(x.shape) or y.shape == shape):
            x, y = y, x
        if len(x.shape) < len(y.shape):
            x = self.unsqueezed(x, range(len(y.shape) - len(x.shape)))
        return self.add(kind, {"X": x, "Y": y}, {"axis": -1}, shape=shape, dtype=dtype)

    def spread(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Return x with the sizes that it is broadcast to. Raises Unsupported."""
        if x.shape == tuple(shape):
            return x
        zeros = self.filled(shape, x.dtype, 0.0)
        if x.dtype == "bool":
            return self.add("logical_or", {"X": zeros, "Y": x}, shape=shape)
        return self.binary("elementwise_add", zeros, x, shape)

    # -- layouts -------------------------------------------------------------------------------------

    def reshaped(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Return x in other sizes, of which Fluid finds one and copies those at the same places.

        Several others are a problem of the model only if the result is needed: what flattens is often undone.
        """
        before = x.made_by("reshape2")
        if before is not None:
            x = before.inputs["X"][0]
        if x.shape == tuple(shape):
            return x
        free = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        copied = {i for i in free if i < len(x.shape) and x.shape[i] == shape[i]} if len(free) > 1 else set()
        sizes = [0 if i in copied else -1 if isinstance(size, Expr) else size for i, size in enumerate(shape)]
        made = self.add("reshape2", {"X": x}, {"shape": sizes}, shape=shape)
        if sizes.count(-1) > 1:
            self.operators[-1].problem = f"the sizes {_sizes(shape)} do not follow from {_sizes(x.shape)} alone"
        return made

    def unsqueezed(self, x: Value, axes: Sequence[int]) -> Value:
        """Return x with dimensions of size 1 at these places of the result, in ascending order."""
        shape = list(x.shape)
        for axis in axes:
            shape.insert(axis, 1)
        return self.add("unsqueeze2", {"X": x}, {"axes": list(axes)}, shape=shape)

    # -- sequences -----------------------------------------------------------------------------------

    def owner_of(self, lengths: str) -> str:
        """Return the ragged variable that has these lengths. Raises Unsupported for lengths of another kind."""
        owner = lengths.removesuffix("@LENGTHS")
        if owner == lengths or not is_ragged(self.program, owner):
            raise Unsupported(f"it takes lengths from {lengths!r}, which are not those of a ragged input")
        return owner

    def with_lod(self, x: Value, owner: str) -> Value:
        """Return x with the LoD of a ragged input. Raises Unsupported if only a result has it."""
        if x.owner == owner:
            return x
        var = self.program.variables[owner]
        if not var.is_data:
            raise Unsupported(f"the LoD of {owner!r} is at hand as that of a result only")
        made = self.add("lod_reset", {"X": x, "Y": self.value(owner)}, shape=x.shape)
        made.owner = owner
        return made

    def outer(self, owner: str) -> str:
        """Return what has the LoD of a ragged variable without its last level; "" if it has one level."""
        return f"{owner}@LENGTHS" if is_ragged(self.program, f"{owner}@LENGTHS") else ""


def _listed(values: Value | Sequence[Value]) -> list[Value]:
    return [values] if isinstance(values, Value) else list(values)


def _sizes(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def is_float32(number: float) -> bool:
    """Whether a number is the same in 32 bits, as attributes of Fluid are."""
    with np.errstate(over="ignore"):
        return bool(np.float32(number) == number) or math.isnan(number)


def dtype_number(dtype: str) -> int:
    """Return the number of a dtype. Raises Unsupported."""
    if dtype not in TYPES:
        raise Unsupported(f"Fluid has no dtype {dtype}")
    return TYPES[dtype]


def _number(number: float, dtype: str) -> dict[str, Attribute]:
    """A number as attributes: in 32 bits, and as a text, which is exact."""
    exact = float(number) if dtype.startswith(("float", "bfloat")) else int(number)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(exact))
    return {"value": rounded, "str_value": repr(exact), "dtype": dtype_number(dtype)}
