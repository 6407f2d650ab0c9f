"""RecordMode: every ATen call on fake tensors becomes one Operator.

What it refuses, at the user's line: sizes that depend on data, operators that draw from torch's global
generator, and guards that pin the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.compat.torch import (
    DEVICE_QUERY,
    TorchDispatchMode,
    next_sequence_number,
    running_sequence_number,
    schema_of,
    tree_leaves,
)
from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Guard, Operator, Output, Role, VarDesc
from penstock.program.kernels import written_operands
from penstock.program.record.context import current_layer, current_role
from penstock.program.record.recording import Recording
from penstock.program.record.shapes import Pinned, call_on_fakes
from penstock.program.record.sizes import always_holds, size_of
from penstock.program.record.source import user_line
from penstock.program.text import parse_block

aten = torch.ops.aten
# Calls that return as many tensors as a size says: type -> position of the dimension.
_COUNTED = {"aten::split": 2, "aten::unsafe_split": 2, "aten::unbind": 1}
_OF_ARRAYS = ("penstock.control_backward.default", "penstock.add_arrays.default")  # what makes gradients of arrays
_ALIASES = {"aten::detach", "aten::alias", "aten::lift", "aten::lift_fresh"}

_ALSO_LAYERS = frozenset({  # operators of torch with names of Fluid's layers
    "abs", "acos", "asin", "atan", "ceil", "clamp", "cos", "cross", "cumsum", "dot", "dropout", "elu", "erf",
    "exp", "expand", "expand_as", "flip", "floor", "gather", "gelu", "huber_loss", "kron", "leaky_relu", "log",
    "log_softmax", "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "mean", "mul", "pow",
    "reciprocal", "relu", "relu6", "roll", "round", "rsqrt", "scatter", "selu", "sigmoid", "sign", "sin", "slice",
    "smooth_l1_loss", "softmax", "softplus", "split", "sqrt", "square", "squeeze", "stack", "sum", "tanh", "trace",
    "transpose", "tril", "triu", "unfold", "unique", "where",
})  # fmt: skip
_ONLY_PARTS = frozenset({"dropout", "huber_loss", "slice", "smooth_l1_loss"})  # of the layers that have their names


class RecordMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """Appends to `recording.program`; see the module."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if func is DEVICE_QUERY:
            return args[0].device
        if func is aten.size.default:  # of torch's own error texts, which the user reads without these numbers
            return [size_of(n).value(self.recording.symbols.sizes.hints) for n in args[0].shape]
        cuts = self.recording.open_blocks or self.recording.detaches
        if schema.name in _ALIASES and not (cuts and schema.name == "aten::detach"):
            out, _ = call_on_fakes(func, self._known(args), kwargs)
            self.recording.alias(out, self.recording.name_of(args[0]))
            return out
        if func is aten.add.Tensor and self._adds_arrays(args):
            func = torch.ops.penstock.add_arrays.default
        _refuse(func, args, kwargs)
        # A real operand becomes its fake stand-in before the call, so that the call never touches it.
        args, kwargs = self._known(args), {k: self._known(v) for k, v in kwargs.items()}
        rec = self.recording
        rec.add_guards(rec.symbols.new_guards(user_line()))
        out = results_of(rec, func, args, kwargs)
        self._append(func, args, kwargs, out)
        return out

    def _known(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if self.recording.is_named(value):
                return self._where_tape_ends(value)
            if value.requires_grad:  # its stand-in would come too late: autograd has seen the tensor itself
                raise ProgramError(
                    f"{user_line()}: a tensor of shape {list(value.shape)} that wants a gradient is read where "
                    "autograd cannot follow it into the program. Hold it in the module that uses it, or detach it"
                )
            return self.recording.capture(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._known(v) for v in value)
        return value

    def _adds_arrays(self, operands: Sequence[Any]) -> bool:
        """Whether autograd adds two gradients of an unsized variable, which are arrays: it has several readers."""
        rec = self.recording
        names = {rec.name_of(x) for x in operands if isinstance(x, torch.Tensor) and x.ndim == 1 and rec.is_named(x)}
        if not names or any(rec.program.variables[name].shape != (0,) for name in names):
            return False
        makers = [op.type for op in rec.program.operators if names & {*op.output_names()}]
        return bool(makers) and all(type_ in _OF_ARRAYS for type_ in makers)

    def _where_tape_ends(self, value: torch.Tensor) -> torch.Tensor:
        """Within a block, which is differentiated from its operators alone, the place where a gradient ends is one."""
        rec = self.recording
        handle = rec.handles.get(rec.name_of(value)) if rec.open_blocks and not value.requires_grad else None
        if handle is None or handle.fake is value or not handle.fake.requires_grad:
            return value
        detached: torch.Tensor = call_on_fakes(aten.detach.default, (value,), {})[0]
        self._append(aten.detach.default, (value,), {}, detached)
        return detached

    def _append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        rec, schema = self.recording, schema_of(func)
        module, source = self._origin()
        base = schema.name.split("::")[1].rstrip("_")
        name = self._name_operator(base.lstrip("_"), schema.name.partition("::")[0])
        role, role_vars = current_role()
        writes = tuple(dict.fromkeys(rec.name_of(t) for t in written_operands(schema, args, kwargs)))
        op = Operator(
            name,
            f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}",
            tuple(rec.argument(a) for a in with_blocks(schema, args)),
            self._outputs(name, out, source),
            tuple((k, rec.argument(v)) for k, v in kwargs.items()),
            writes,
            role,
            role_vars,
            module,
            source,
            train_only=self._counts_batches(writes, role),
        )
        self._mark_buffers(op)
        self._refuse_sizes_of_data(op)
        rec.program.append(op)

    def _name_operator(self, base: str, library: str) -> str:
        """Return a free name: not that of a layer of Fluid's that the operator is not, or only a part of."""
        layer, results = current_layer(), self.recording.results
        is_layer = base not in _ALSO_LAYERS or (layer == base and base not in _ONLY_PARTS)
        part = base if is_layer else f"{layer or library}_{base}"
        while f"{(name := self.recording.program.unique_operator(part))}.tmp_0" in results:
            pass
        return name

    def _refuse_sizes_of_data(self, op: Operator) -> None:
        """Raise ProgramError for a size that follows from data as a number, where no block finds it."""
        rec = self.recording
        if not rec.symbols.of_data or rec.open_blocks:
            return
        sizes = [leaf for leaf in tree_leaves([op.args, [value for _, value in op.kwargs]]) if isinstance(leaf, Expr)]
        if any(size.symbols() & rec.symbols.of_data.keys() for size in sizes):
            raise ProgramError(
                f"{op.source}: {op.type} takes a size that follows from data, {', '.join(map(str, sizes))}, without "
                "the variable that it is of; only a run knows it. Take it as a variable: fluid.layers.shape(x)[0]",
                operator=op.name, source=op.source,
            )  # fmt: skip

    def _origin(self) -> tuple[str, str]:
        """Module and line: of the forward call when autograd runs, else of now."""
        running = running_sequence_number()
        if running is not None:
            return self.recording.origins.get(running, ("", user_line()))
        origin = (self.recording.module_path(), user_line())
        self.recording.origins.setdefault(next_sequence_number() - 1, origin)
        return origin

    def _outputs(self, op_name: str, out: Any, source: str) -> tuple[Output, ...]:
        if out is None:
            return ()
        results = out if isinstance(out, tuple) else (out,)
        names: list[Output] = []
        counter = 0
        for result in results:
            group = result if isinstance(result, list) else [result]
            named: list[str | None] = []
            for tensor in group:
                named.append(self._output(f"{op_name}.tmp_{counter}", tensor))
                counter += 1
            names.append(tuple(n for n in named if n) if isinstance(result, list) else named[0])
        return tuple(names)

    def _output(self, name: str, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor):
            if tensor is None:
                return None
            raise ProgramError(f"{user_line()}: a call returns {type(tensor).__name__}, which depends on data")
        if self.recording.is_named(tensor):
            return None  # in place: the operand itself
        self.recording.bind(tensor, self.recording.describe(tensor, name))
        return name

    def _counts_batches(self, writes: tuple[str, ...], role: Role) -> bool:
        """A normalisation's own counter (`num_batches_tracked += 1`), which only training moves."""
        variables = self.recording.program.variables
        forward = bool(role & Role.FORWARD) and self.recording.normalises
        return forward and bool(writes) and all(variables[w].dtype == "int64" for w in writes)

    def _mark_buffers(self, op: Operator) -> None:
        """State that the forward pass writes is kept per replica. Raises ProgramError if it is trained.

        Where a program has no inputs and trains nothing of it, all replicas write the same: a copy of one network's
        parameters to another's.
        """
        if not op.role & Role.FORWARD:
            return
        variables = self.recording.program.variables
        for name in op.writes:
            var: VarDesc = variables[variables[name].storage]
            if var.parameter and var.trainable and (self._has_inputs() or self._is_updated(var.name)):
                raise ProgramError(
                    f"{op.source}: {op.type} writes the trainable parameter {var.name!r} in place, which each replica "
                    "would do with its own share. Update it by an optimizer (minimize, or apply_gradients with "
                    "gradients of your own), or make it untrainable (requires_grad=False) if it is state",
                    operator=op.name,
                    variable=var.name,
                )
            if (var.feed or var.persistable) and not var.buffer:
                variables[var.name] = replace(var, buffer=True)

    def _has_inputs(self) -> bool:
        return any(True for _ in self.recording.program.feeds())

    def _is_updated(self, parameter: str) -> bool:
        """Whether an optimizer has recorded its update."""
        return any(Role.OPTIMIZE in op.role and parameter in op.writes for op in self.recording.program.operators)


def with_blocks(schema: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands with blocks in the place of the texts that an operator of control flow takes."""
    if not schema.name.startswith("penstock::control"):
        return args
    position = next(i for i, argument in enumerate(schema.arguments) if argument.name == "blocks")
    return (*args[:position], tuple(parse_block(text) for text in args[position]), *args[position + 1 :])


def results_of(rec: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Call on fakes. Raises ProgramError if the call turns the batch into a number and has no shapes in symbols."""
    asker = f"torch's {rec.calling or func}"
    if func is aten.slice.Tensor:
        out = sliced(rec, *args, **kwargs)
    else:
        try:
            out, cuts = call_on_fakes(func, args, kwargs, step=rec.batch_step())
        except Pinned as pinned:
            line = user_line()
            raise ProgramError(
                f"{line}: {asker} cannot run with a symbolic batch: {pinned}. Write it by other torch operations",
                operator=str(func),
                source=line,
            ) from pinned
        rec.add_guards([Guard(cut.size.dim, "==", cut.number, user_line()) for cut in cuts])
    # Relations that the call's own kernel asked for choose a form; the kernel chooses again when it runs. Only a
    # pinned batch counts, and sizes that are equal for some batches alone.
    rec.add_guards(rec.symbols.forget_guards(user_line(), asker))
    return out


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: attention without dropout is tagged so, and does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value != 0.0)
    return True


def _refuse_count(func: Any, args: tuple[Any, ...]) -> None:
    position = _COUNTED.get(schema_of(func).name)
    if position is None:
        return
    dim = args[position] if position < len(args) else 0
    if isinstance(args[0].shape[dim], torch.SymInt):
        line = user_line()
        raise ProgramError(
            f"{line}: {func} along dimension {dim} returns as many tensors as the batch has rows or parts, which a "
            "recorded program cannot do. Work on the whole batch (reshape, narrow, index_select), or split along "
            "another dimension",
            operator=str(func),
            source=line,
        )


def _indexes_by_position(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is `x[i]` with integers: only masks give a size that depends on data."""
    return func is aten.index.Tensor and all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _refuse_count(func, args)
    dynamic = torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_position(func, args)
    if dynamic or torch.Tag.data_dependent_output in func.tags:
        line = user_line()
        what = (
            "reads a value back into Python"
            if "scalar" in str(func) or "item" in str(func)
            else "has a size that depends on data"
        )
        raise ProgramError(
            f"{line}: the result of {func} {what}, which a recorded program cannot do. "
            "Use torch.where, masks or topk instead of selecting, and fetch values from run() instead of .item()",
            operator=str(func),
            source=line,
        )
    if _draws(func, args, kwargs):
        line = user_line()
        raise ProgramError(
            f"{line}: {func} draws from torch's global generator, which would differ between replicas and runs. "
            "Use torch.nn.functional.dropout, which is seeded by the program, or feed random numbers",
            operator=str(func),
            source=line,
        )


_slice = torch.ops.aten.slice.Tensor
_sym_max: Any = torch.sym_max
_sym_min: Any = torch.sym_min


def sliced(recording: Recording, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Return the fake result of aten::slice; for sizes that are numbers it is torch's own."""
    dim = dim % x.dim() if x.dim() else 0
    given = (start, end, step)
    if x.dim() == 0 or not any(isinstance(v, torch.SymInt) for v in (x.shape[dim], *given)):
        return call_on_fakes(_slice, (x, dim, *given), {})[0]
    size = x.shape[dim]
    low = _position(recording, 0 if start is None else start, size)
    to_end = end is None or always_holds(end == sys.maxsize)
    if to_end and isinstance(start, int) and start < 0:
        length = _lower(recording, size, -start)
    else:
        high = size if to_end else _position(recording, end, size)
        high = high if isinstance(end, int) and end < 0 else _lower(recording, high, size)
        length = high - low if always_holds(high >= low) else _sym_max(high - low, 0)
    _expect_rows(recording, length)
    sizes, strides = list(x.shape), list(x.stride())
    offset = x.storage_offset() + _lower(recording, low, size) * strides[dim]
    sizes[dim], strides[dim] = length if _is(step, 1) else (length + step - 1) // step, strides[dim] * step
    return call_on_fakes(aten.as_strided.default, (x, sizes, strides, offset), {})[0]


def _position(recording: Recording, index: Any, size: Any) -> Any:
    """Where an index points, at least 0."""
    if isinstance(index, torch.SymInt) and not always_holds(index >= 0):
        from_start = bool(index >= 0)
        recording.add_guards([Guard(recording.symbols.dim(index), ">=" if from_start else "<", 0, user_line())])
    else:
        from_start = bool(index >= 0)
    return index if from_start else _sym_max(size + index, 0)


def _expect_rows(recording: Recording, length: Any) -> None:
    """torch's symbols are positive, so that it takes `max(0, s0 - 1)` for `s0 - 1`: guard it against no row."""
    dim = recording.symbols.dim(length)
    if isinstance(dim, Expr) and dim.evaluate(dict.fromkeys(dim.symbols(), 0)) < 0:
        recording.add_guards([Guard(dim, ">=", 0, user_line())])


def _lower(recording: Recording, left: Any, right: Any) -> Any:
    if always_holds(left <= right) or _never_above(recording.symbols.dim(left), recording.symbols.dim(right)):
        return left
    return right if always_holds(right <= left) else _sym_min(left, right)


def _never_above(left: Dim, right: Dim) -> bool:
    """Whether `left <= right` for every size, which torch does not know of `(s0 + 1) // 2` and s0; else False.

    Both are of one symbol, with small constants and without `min` and `max`, so that what holds for a few hundred sizes
    and for large ones holds for all: their rounding repeats itself.
    """
    if not (isinstance(left, Expr) and isinstance(right, Expr) and _is_plain(left) and _is_plain(right)):
        return False
    symbols = left.symbols() | right.symbols()
    points = (dict.fromkeys(symbols, n) for n in (*range(300), 1 << 20, (1 << 20) + 1))
    return len(symbols) == 1 and all(left.evaluate(p) <= right.evaluate(p) for p in points)


def _is_plain(size: Expr) -> bool:
    def small(part: Expr | int | str) -> bool:
        return _is_plain(part) if isinstance(part, Expr) else isinstance(part, str) or abs(part) <= 16

    return size.op not in ("min", "max") and all(map(small, size.args))


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number
