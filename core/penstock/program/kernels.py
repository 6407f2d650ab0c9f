"""From an Operator to the torch call that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.compat.torch import FUNCTIONAL_COLLECTIVES, REFUSED_OPERATORS, OpOverload, schema_of
from penstock.errors import FeedError, OperatorError, ProgramError
from penstock.native import ops as _registered  # noqa: F401 - registers the operators, their shapes and derivatives
from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Ref, Structure, SubBlock, TorchConst, structure_of, sub_blocks
from penstock.program.text import block_text

CAPTURED = "penstock.captured"
ARRAY_OPERATORS = frozenset(
    f"penstock.{name}"
    for name in (
        "array_write", "array_read", "array_length", "array_assign", "array_new", "array_of", "array_first",
        "array_joined", "array_of_steps", "rows_of_steps", "rows_lasting", "rows_with_lengths", "rows_between",
        "rows_repeated", "rows_counted",
        "rows_true", "rows_unique", "rows_matched", "rows_kept", "rows_judged", "rows_averaged",
        "beam_search", "beam_search_decode",
    )
)  # fmt: skip
"""What blocks alone do: with tensor arrays, and with sizes that follow from data. No operators of torch: the
interpreter of blocks has arrays as lists (control/array_kernels.py)."""
_NAMESPACES = {"aten", "penstock", "mkldnn", FUNCTIONAL_COLLECTIVES}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
}

# Batch norm writes its statistics only in training; of some overloads the schema says never, of others always.
# Type -> (name of the argument that says whether it trains, names of the statistics).
_RUNNING = ("training", ("running_mean", "running_var"))
_STATISTICS = {
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::_native_batch_norm_legit": _RUNNING,
    "penstock::data_norm_update_": ("training", ("size", "sum", "square")),
}

# Operators of torch that are no functions of tensors: they open files, talk to devices and autograd, print, or put
# other memory under a tensor. A Program may come from elsewhere, so it may not name them.
_REFUSED = {
    "from_file", "set_", "set", "requires_grad_", "retain_grad", "set_data", "record_stream", "rename_", "pin_memory",
    "is_pinned", "resize", "resize_", "resize_as_", "resize_as_sparse_", "item", *REFUSED_OPERATORS,
}  # fmt: skip


@functools.cache
def _is_pure(func: Any, name: str) -> bool:
    """Whether an operator of torch takes or makes tensors, is not refused by name, and asks for no file."""
    schema = schema_of(func)
    values = [str(spec.type) for spec in (*schema.arguments, *schema.returns)]
    asks_for_file = any(spec.name in {"filename", "file", "path"} for spec in schema.arguments)
    return name not in _REFUSED and not asks_for_file and any("Tensor" in value for value in values)


def resolve(op: Operator) -> Any:
    """Return the torch operator overload.

    Raises ProgramError for a type that this installation does not know, or that is no function of tensors.
    """
    parts = op.type.split(".")
    if len(parts) != 3 or parts[0] not in _NAMESPACES:
        raise ProgramError(
            f"operator {op.name!r} has the type {op.type!r}; expected namespace.name.overload", operator=op.name
        )
    try:
        func = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        func = None
    if not isinstance(func, OpOverload):  # a name like __doc__ is found too
        raise ProgramError(
            f"operator {op.name!r}: {op.type!r} is unknown to torch {torch.__version__}", operator=op.name
        )
    if parts[0] != "penstock" and not _is_pure(func, parts[1]):
        raise ProgramError(
            f"operator {op.name!r} ({op.source or 'no line'}): {op.type!r} is no function of tensors (it touches "
            "files, the process or the memory of a tensor), so a program may not call it",
            operator=op.name,
        )
    return func


def written_operands(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what a call writes in place, of its operands; lists are taken apart, None is left out.

    `schema` is torch's; operands are tensors or plain data, in the order or under the names of the schema.
    """
    given = {spec.name: value for spec, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    names: Sequence[str]
    if schema.name in _STATISTICS:
        training, statistics = _STATISTICS[schema.name]
        names = statistics if given.get(training) else ()
    else:
        names = [spec.name for spec in schema.arguments if spec.alias_info is not None and spec.alias_info.is_write]
    return [value for name in names for value in _items(given.get(name))]


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    elif value is not None:
        yield value


def check_writes(program: Structure) -> None:
    """Raise ProgramError naming an operator that writes what it does not declare, or that torch does not know.

    An undeclared write is a race: the graph has no edge for it. Cost: linear in the operators; no kernel runs.
    """
    for op in program.operators:
        for block in sub_blocks(op):
            check_writes(structure_of(block))
        if op.type == CAPTURED or op.type in ARRAY_OPERATORS:
            continue
        written = written_operands(schema_of(resolve(op)), op.args, dict(op.kwargs))
        missing = sorted({value.name for value in written if isinstance(value, Ref)} - set(op.writes))
        if missing:
            raise ProgramError(
                f"operator {op.name!r} ({op.type}, {op.source or 'no line'}) writes {', '.join(missing)} in place, but "
                f"declares {', '.join(op.writes) or 'no write'}. Record the program again, or correct its writes",
                operator=op.name,
            )


def constant(value: TorchConst) -> Any:
    """Return the torch object of a constant."""
    match value.kind:
        case "dtype":
            dtype = getattr(torch, value.value, None)
            if not isinstance(dtype, torch.dtype):
                raise ProgramError(f"{value.value!r} is no dtype of torch {torch.__version__}")
            return dtype
        case "device":
            return torch.device(value.value)
        case "layout":
            return _LAYOUTS[value.value]
        case "memory_format":
            return _FORMATS[value.value]


def bind_symbols(program: Structure, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the value of each size symbol. Raises FeedError if two feeds disagree, and `check_sizes` does."""
    bindings: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors.items():
        for at, (dim, size) in enumerate(zip(program.variables[name].shape, tensor.shape, strict=True)):
            if not isinstance(dim, Expr) or dim.op != "sym":
                continue
            symbol = str(dim.args[0])
            if bindings.setdefault(symbol, size) != size:
                what = f"size in dimension {at}" if at else "number of rows"
                raise FeedError(
                    f"feeds {origin[symbol]!r} and {name!r} must have the same {what}, but have {bindings[symbol]} and "
                    f"{size}",
                    variable=name,
                )
            origin.setdefault(symbol, name)
    check_sizes(program, tensors, bindings)
    return bindings


def check_sizes(program: Structure, tensors: Mapping[str, torch.Tensor], bindings: Mapping[str, int]) -> None:
    """Raise FeedError for a feed whose size is another than that which the program computes of other inputs' sizes."""
    for name, tensor in tensors.items():
        for at, (dim, size) in enumerate(zip(program.variables[name].shape, tensor.shape, strict=True)):
            if isinstance(dim, Expr) and dim.op != "sym" and dim.symbols() <= bindings.keys():
                wanted = dim.evaluate(bindings)
                if wanted != size:
                    what = f"size {size} in dimension {at}" if at else f"{size} rows"
                    raise FeedError(
                        f"feed {name!r} has {what}; expected {wanted}, which is {dim} where the other feeds give "
                        f"{', '.join(f'{symbol} = {bindings[symbol]}' for symbol in sorted(dim.symbols()))}",
                        variable=name,
                    )


def concrete(value: Arg, bindings: Mapping[str, int], lookup: Callable[[str], Any]) -> Any:
    """Return an operand with symbols bound and variables looked up."""
    if isinstance(value, Ref):
        return lookup(value.name)
    if isinstance(value, Expr):
        return value.evaluate(bindings)
    if isinstance(value, tuple):
        return [concrete(v, bindings, lookup) for v in value]
    if isinstance(value, TorchConst):
        return constant(value)
    return block_text(value) if isinstance(value, SubBlock) else value


def operator_error(op: Operator, message: str, shapes: Mapping[str, str], replica: int = 0) -> OperatorError:
    """Return the error for an operator that failed: what, where, on which shapes, and torch's own words."""
    operands = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no operands"
    where = f" on replica {replica}" if replica else ""
    first = message.strip().splitlines()[0] if message.strip() else "no message"
    return OperatorError(
        f"operator {op.name!r} ({op.type}), recorded at {op.source or 'an unknown line'}, failed{where}: {first}\n"
        f"  its operands: {operands}",
        operator=op.name,
        source=op.source,
        shapes=dict(shapes),
        replica=replica,
    )


def shape_text(value: Any) -> str:
    """Return 'float32[3, 4]' for a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
