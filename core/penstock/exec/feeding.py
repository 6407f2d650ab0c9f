"""Feeds: check them against the Program, turn them into tensors, bind the size symbols. No I/O."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import FeedError, FetchError
from penstock.program.eager import advice, words
from penstock.program.expr import Expr, evaluate
from penstock.program.ir import Guard, Role, VarDesc, unknown_variable
from penstock.program.program import Program


@dataclass(frozen=True, slots=True)
class SelectedRowsValue:
    """A fetched sparse gradient: `rows` int64[n] (may repeat), `values` [n, d], of a table with `height` rows."""

    rows: Any
    values: Any
    height: int


def as_tensors(program: Program, feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a tensor for each feed. Raises FeedError for unknown names, missing names, dtypes and shapes."""
    if not isinstance(feed, Mapping):
        raise FeedError(
            f"feed is a {type(feed).__name__}; expected a dict from the names of inputs to arrays, e.g. "
            f"{{{', '.join(f'{v.name!r}: …' for v in program.feeds())}}}"
        )
    wanted = {v.name: v for v in program.feeds()}
    for name in feed:
        if name not in wanted:
            known = f" Its inputs are {', '.join(repr(n) for n in wanted)}." if wanted else " It has no inputs."
            raise FeedError(f"feed {name!r}: {_no_input(program, name, wanted)}{known}", variable=name)
    for name, var in wanted.items():
        if name not in feed and any(name in op.input_names() for op in program.operators if not op.block):
            raise FeedError(
                f"input {name!r} (declared at {var.source}) is not fed; feed it as {_expected(var)}", variable=name
            )
    return {name: _tensor(wanted[name], value) for name, value in feed.items()}


def loss_gradients(program: Program) -> dict[str, str]:
    """Return the gradients from which the backward passes start, with the lines that recorded them."""
    ops = [op for op in program.operators if op.role == Role.BACKWARD | Role.LOSS]
    return {name: op.source for op in ops for name in op.output_names()}


def _no_input(program: Program, name: str, wanted: Mapping[str, VarDesc]) -> str:
    """Say why a name cannot be fed."""
    if name not in program.variables:
        return unknown_variable(name, wanted)
    if name in loss_gradients(program):
        return (
            "the gradient of the loss is computed, unless BuildStrategy.gradient_scale_strategy is Customized in a "
            "ParallelExecutor or CompiledProgram."
        )
    if program.variables[name].persistable:
        return (
            f"it is a persistable variable (created at {program.variables[name].source}), which lives in the scope: "
            f"set it with fluid.global_scope().find_var({name!r}).set(value)."
        )
    maker = next((op for op in program.operators if name in op.output_names()), None)
    made = f"operator {maker.name!r} ({maker.source}) makes it" if maker else "it is no input"
    return f"{made}, so it cannot be fed."


def _expected(var: VarDesc) -> str:
    return f"{var.dtype}[{', '.join('-1' if isinstance(d, Expr) else str(d) for d in var.shape)}]"


def _from_numbers(var: VarDesc, value: Any) -> torch.Tensor:
    """Return the tensor of an array (as it is) or of plain numbers (which carry no dtype of their own)."""
    plain = not isinstance(value, np.ndarray)
    try:
        array = np.asarray(value)
        if plain and array.dtype.kind in "biuf" and _same_kind(array, var.dtype):
            array = array.astype(var.dtype)
        if not array.dtype.isnative or not array.flags.c_contiguous or not array.flags.writeable:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise FeedError(
            f"feed {var.name!r} is a {type(value).__name__} that is no array of numbers ({error}); "
            f"the program expects {_expected(var)} (declared at {var.source})",
            variable=var.name,
        ) from error


def _same_kind(array: np.ndarray, dtype: str) -> bool:
    """Whether plain numbers keep their meaning: whole ones may become floating ones, but not the other way round."""
    return "float" in dtype or array.dtype.kind != "f"


def converted(var: VarDesc, value: Any) -> torch.Tensor:
    """Return a fed value as a contiguous tensor of the variable's dtype, of any shape. Raises FeedError."""
    dtype = getattr(torch, var.dtype)
    tensor = value.detach() if isinstance(value, torch.Tensor) else _from_numbers(var, value)
    if tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        raise FeedError(
            f"feed {var.name!r} is {got}, but the program expects {_expected(var)} (declared at {var.source}). "
            f"Convert it, e.g. value.astype('{var.dtype}')",
            variable=var.name, got=got, expected=_expected(var),
        )  # fmt: skip
    return tensor.contiguous()  # as it was recorded: views of it were taken for views of contiguous memory


def _tensor(var: VarDesc, value: Any) -> torch.Tensor:
    tensor = converted(var, value)
    if tensor.dim() != len(var.shape) or any(
        isinstance(d, int) and d != s for d, s in zip(var.shape, tensor.shape, strict=True)
    ):
        got = f"{var.dtype}{list(tensor.shape)}"
        raise FeedError(
            f"feed {var.name!r} has shape {list(tensor.shape)}, but the program expects {_expected(var)} "
            f"(declared at {var.source}); -1 is the batch",
            variable=var.name, got=got, expected=_expected(var),
        )  # fmt: skip
    return tensor.clone() if var.buffer else tensor


def bind_symbols(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the value of each size symbol. Raises FeedError if two feeds disagree."""
    bindings: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors.items():
        for dim, size in zip(program.variables[name].shape, tensor.shape, strict=True):
            if not isinstance(dim, Expr) or dim.op != "sym":
                continue
            symbol = str(dim.args[0])
            if bindings.setdefault(symbol, size) != size:
                raise FeedError(
                    f"feeds {origin[symbol]!r} and {name!r} must have the same number of rows, but have "
                    f"{bindings[symbol]} and {size}",
                    variable=name,
                )
            origin.setdefault(symbol, name)
    return bindings


def check_guards(guards: Sequence[Guard], bindings: Mapping[str, int]) -> None:
    """Raise FeedError if a size relation that the program was recorded under does not hold for these sizes."""
    for guard in guards:
        try:
            holds = guard.holds(bindings)
        except KeyError:
            continue  # a symbol of an input that is not fed in this run
        if not holds:
            left, right = evaluate(guard.left, bindings), evaluate(guard.right, bindings)
            raise FeedError(
                f"{guard.source}: the program was recorded for sizes with {guard}, "
                f"but this feed has {left} and {right}. "
                "Record another program for such sizes, or remove the branch on the size",
                source=guard.source,
            )


def fetch_names(program: Program, fetch_list: Sequence[Any] | None) -> list[str]:
    """Return the names to fetch. Raises FetchError for what is not in the program."""
    names: list[str] = []
    if isinstance(fetch_list, str) or hasattr(fetch_list, "name"):
        raise FetchError(f"fetch_list is {fetch_list!r}; expected a list: fetch_list=[{fetch_list!r}]")
    for item in () if fetch_list is None else fetch_list:
        name = item if isinstance(item, str) else getattr(item, "name", None)
        if not isinstance(name, str):
            raise FetchError(f"fetch_list holds {words(item)}; expected a variable or its name{advice(item)}")
        if name not in program.variables:
            raise FetchError(
                f"fetch {name!r}: {unknown_variable(name, program.variables)} "
                "Fetch what an operator of this program makes, or a parameter",
                variable=name,
            )
        names.append(name)
    return names


def takes_from_reader(program: Program, feed: Any) -> bool:
    """Whether a run takes its batch from the program's reader: one that was started, or if nothing is fed."""
    return program.reader is not None and (program.reader.is_started or not feed)


def resolved_seed(program: Program) -> int:
    """Return the Program's seed; 0 becomes a fresh one that stays with the Program."""
    if program.seed == 0:
        if not program.fresh_seed:
            program.fresh_seed = int.from_bytes(os.urandom(4), "little") | 1
        return program.fresh_seed
    return program.seed
