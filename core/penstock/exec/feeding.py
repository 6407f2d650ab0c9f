"""Feeds of a step: checked against the Program, split over replicas, measured; no I/O.

`Inputs` holds what the Program asks of its inputs, looked up once for each revision: arrays and tensors that fit are
taken as they are, in a few microseconds an input; anything else goes the way of `as_tensors`, which converts it or
raises. A batch of b rows on n replicas makes min(b, n) shares, as even as possible, the larger ones last (3 rows on 2
replicas: [0] and [1, 2], as ParallelExecutor.run documents). With gradient_scale_strategy Customized the gradient of
the loss is fed: in one feed dict `<loss>@GRAD` is an array with one entry for each replica; in a feed list, each dict
has its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from penstock.errors import FeedError
from penstock.exec.sequences import RaggedInputs
from penstock.program.expr import Expr, evaluate
from penstock.program.ir import Guard, Role, VarDesc, unknown_variable
from penstock.program.kernels import bind_symbols
from penstock.program.program import Program
from penstock.program.pruning import counted_as
from penstock.program.sequences import STEPS, batch_symbol, is_declared_size, is_ragged, is_rows_of_positions

Feed = Mapping[str, Any] | Sequence[Any] | None
Share = dict[str, torch.Tensor]


def as_tensors(program: Program, feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a tensor for each feed. Raises FeedError for unknown names, missing names, dtypes and shapes."""
    if not isinstance(feed, Mapping):
        raise FeedError(
            f"feed is a {type(feed).__name__}; expected a dict from the names of inputs to arrays, e.g. "
            f"{{{', '.join(f'{v.name!r}: …' for v in program.feeds())}}}"
        )
    feed = RaggedInputs(program).with_lengths(feed)
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
    return {name: fitting(wanted[name], value) for name, value in feed.items()}


def loss_gradients(program: Program) -> dict[str, str]:
    """Return the gradients from which the backward passes start, with the lines that recorded them."""
    ops = [op for op in program.operators if op.role == Role.BACKWARD | Role.LOSS]
    return {name: op.source for op in ops for name in op.output_names()}


def _no_input(program: Program, name: str, wanted: Mapping[str, VarDesc]) -> str:
    """Explain why a name cannot be fed."""
    if name not in program.variables:
        return unknown_variable(name, wanted)
    if name in loss_gradients(program):
        return (
            "the gradient of the loss is computed, unless BuildStrategy.gradient_scale_strategy is Customized in a "
            "ParallelExecutor or CompiledProgram."
        )
    if program.variables[name].persistable:
        return f"it is a table (created at {program.variables[name].source}) that parameter servers alone have."
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
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        kind = "a tensor on the meta device, without values" if tensor.device.type == "meta" else "a sparse tensor"
        raise FeedError(
            f"feed {var.name!r} is {kind}; the program expects {_expected(var)} (declared at {var.source}), a dense "
            "array or tensor (value.to_dense())",
            variable=var.name, expected=_expected(var),
        )  # fmt: skip
    if var.loose and dtype is torch.bool and tensor.dtype != dtype and bool(((tensor == 0) | (tensor == 1)).all()):
        tensor = tensor.to(torch.bool)  # Fluid's kernels take the type of what is fed
    if tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        raise FeedError(
            f"feed {var.name!r} is {got}, but the program expects {_expected(var)} (declared at {var.source}). "
            f"Convert it, e.g. value.astype('{var.dtype}')",
            variable=var.name, got=got, expected=_expected(var),
        )  # fmt: skip
    return tensor.contiguous()  # as it was recorded: views of it were taken for views of contiguous memory


def _in_dimensions(var: VarDesc, tensor: torch.Tensor) -> torch.Tensor:
    """Return rows that have more or fewer dimensions of size 1 than a loose input's with those that it has: labels [n]
    for [n, 1], and what layers of Fluid flatten, [n, 4, 1] for [n, 4]; a number for [1]."""
    if tensor.dim() == 0 and var.shape == (1,):
        return tensor.reshape([1])
    is_batch = var.loose and bool(var.shape) and isinstance(var.shape[0], Expr) and tensor.dim() > 0
    wanted, found = list(var.shape[1:]), list(tensor.shape[1:])
    if not is_batch or len(wanted) == len(found) or any(isinstance(size, Expr) for size in wanted):
        return tensor
    is_same = [size for size in wanted if size != 1] == [size for size in found if size != 1]
    return tensor.reshape([tensor.shape[0], *(size for size in wanted if isinstance(size, int))]) if is_same else tensor


def fitting(var: VarDesc, value: Any) -> torch.Tensor:
    """Return a fed value as a tensor of the variable's dtype and sizes. Raises FeedError."""
    tensor = _in_dimensions(var, converted(var, value))
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


def takes_from_reader(program: Program, feed: Any) -> bool:
    """Whether a run takes its batch from the program's reader: one that was started, or if nothing is fed."""
    return program.reader is not None and (program.reader.is_started or not feed)


def resolved_seed(program: Program) -> int:
    """Return the Program's seed; 0 becomes a fresh one that stays with the Program as which runs are counted."""
    if program.seed == 0:
        counted = counted_as(program)
        if not counted.fresh_seed:
            counted.fresh_seed = int.from_bytes(os.urandom(4), "little") | 1
        return counted.fresh_seed
    return program.seed


def share_sizes(rows: int, num_replicas: int) -> list[int]:
    """Return the rows of each active replica; rows >= 1."""
    pieces = min(rows, num_replicas)
    base, extra = divmod(rows, pieces)
    return [base + (i >= pieces - extra) for i in range(pieces)]


def has_batch(program: Program, name: str) -> bool:
    """Whether dimension 0 of a feed is the batch."""
    shape = program.variables[name].shape
    first = shape[0] if shape else None
    if not isinstance(first, Expr) or first.op != "sym" or has_rows_of_its_own(program.variables[name]):
        return False
    return not is_ragged(program, name) and not name.endswith(STEPS)


def _rows_of_shares(program: Program, tensors: Mapping[str, torch.Tensor], sizes: list[int]) -> dict[str, list[int]]:
    """The rows in each share of the feeds that have several a sample (record/multiples.py). Raises FeedError."""
    batch = batch_symbol(program)
    shapes = {n: shape for n in tensors if (shape := program.variables[n].shape)}
    multiples = {n: d for n, (d, *_) in shapes.items() if is_computed(d) and batch in d.symbols()}
    if not multiples:
        return {}
    bindings = bind_symbols(program, tensors)
    return {name: [evaluate(dim, {**bindings, batch: n}) for n in sizes] for name, dim in multiples.items()}


def is_computed(dim: object) -> TypeGuard[Expr]:
    """Whether a size of an input is an expression of others."""
    return isinstance(dim, Expr) and dim.op != "sym"


def split(
    program: Program, tensors: Mapping[str, torch.Tensor], num_replicas: int, ragged: RaggedInputs | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return one dict of views for each active replica: its rows, of ragged inputs those of its sequences.

    Raises FeedError for an empty batch.
    """
    rows = {name: t.shape[0] for name, t in tensors.items() if has_batch(program, name)}
    if not rows:
        return _split_declared(program, tensors, num_replicas)
    total = next(iter(rows.values()))
    for name, size in rows.items():
        if size == 0:
            raise FeedError(f"feed {name!r} has no rows; feed at least one", variable=name)
        if size != total:
            first = next(iter(rows))
            raise FeedError(
                f"feeds {first!r} and {name!r} must have the same number of rows, but have {total} and {size}"
            )
    sizes = share_sizes(total, num_replicas)
    _refuse_positions(program, tensors, len(sizes))
    shares: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
    ragged = ragged or RaggedInputs(program)
    own, several = ragged.names, _rows_of_shares(program, tensors, sizes)
    for name, tensor in tensors.items():
        if name in own:
            continue
        counts = several.get(name) or (sizes if name in rows else None)
        parts = [tensor] * len(sizes) if counts is None else tensor.split_with_sizes(counts)
        for share, part in zip(shares, parts, strict=True):
            share[name] = part
    ragged.split(tensors, shares)
    return shares


def _split_declared(program: Program, tensors: Mapping[str, torch.Tensor], num_replicas: int) -> list[Share]:
    """Shares of a feed without a batch: of inputs whose declared rows are not fixed a part, as in Fluid, else all."""
    _refuse_positions(program, tensors, num_replicas)
    several = {n for n in tensors if has_declared_rows(program.variables[n])}
    if min((tensors[name].shape[0] for name in several), default=0) < num_replicas:
        return [dict(tensors) for _ in range(num_replicas)]
    parts = {n: tensors[n].split_with_sizes(share_sizes(tensors[n].shape[0], num_replicas)) for n in several}
    return [{**tensors, **{name: own[at] for name, own in parts.items()}} for at in range(num_replicas)]


def has_declared_rows(var: VarDesc) -> bool:
    """Whether the first size of an input is a declared one that another number may be fed for."""
    first = var.shape[0] if var.shape else 0
    return isinstance(first, Expr) and first.op == "sym" and is_declared_size(str(first.args[0]))


def has_rows_of_its_own(var: VarDesc) -> bool:
    """Whether an input has rows apart from the batch: declared ones, or those of positions among words."""
    return has_declared_rows(var) or _has_positions(var)


def _has_positions(var: VarDesc) -> bool:
    first = var.shape[0] if var.shape else 0
    return isinstance(first, Expr) and first.op == "sym" and is_rows_of_positions(str(first.args[0]))


def _refuse_positions(program: Program, tensors: Mapping[str, torch.Tensor], num_shares: int) -> None:
    """Raise FeedError for positions in a feed that would be split: they count the rows of all of it."""
    found = next((n for n in tensors if _has_positions(program.variables[n])), None)
    if found is not None and num_shares > 1:
        raise FeedError(
            f"feed {found!r} belongs to positions among all rows of the feed (layers.gather), so {num_shares} replicas "
            "cannot share it. Feed a list of dicts, one for each replica, with positions of its own, or use one "
            "replica (CPU_NUM=1)",
            variable=found,
        )


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the replicas' values along dimension 0; scalars become one row each. Always a copy."""
    rows = [p.reshape(1) if p.dim() == 0 else p for p in parts]
    return rows[0].clone() if len(rows) == 1 else torch.cat(rows)


def split_with_loss_gradients(
    program: Program, feed: Feed, num_replicas: int, split: Callable[[Feed], list[Share]]
) -> list[Share]:
    """Return the feed of each active replica, the gradient of the loss among it. `split` does it for all other feeds.

    Of an array's entries the first go to the replicas that have rows. Raises FeedError if one is missing or has
    another number of entries, and what `split` raises.
    """
    made_by = loss_gradients(program)
    given = feed or {}
    if isinstance(given, Mapping):
        shares = split({n: v for n, v in given.items() if n not in made_by})
        for name, source in made_by.items():
            entries = _entries(program.variables[name], given, num_replicas, source)
            for share, entry in zip(shares, entries, strict=False):  # a small batch has fewer shares
                share[name] = entry
        return shares
    rest = [{n: v for n, v in d.items() if n not in made_by} if isinstance(d, Mapping) else d for d in given]
    shares = split(rest)
    for share, own in zip(shares, given, strict=True):
        for name, source in made_by.items():
            (share[name],) = _entries(program.variables[name], own, 1, source)
    return shares


def _entries(var: VarDesc, feed: Mapping[str, Any], number: int, source: str) -> list[torch.Tensor]:
    sizes = [int(str(d)) for d in var.shape]  # a loss has one element, so no batch
    wanted = f"{var.dtype}[{number}]"
    which = "one entry for each replica" if number > 1 else "the replica's one entry"
    if var.name not in feed:
        raise FeedError(
            f"{var.name!r} (the gradient of the loss, recorded at {source}) is not fed. With gradient_scale_strategy "
            f"Customized nothing computes it: feed it as {wanted}, {which}, e.g. "
            f"numpy.full({number}, 1 / {number}, {var.dtype!r})",
            variable=var.name, expected=wanted,
        )  # fmt: skip
    tensor = converted(var, feed[var.name])
    if tensor.numel() != number * math.prod(sizes) or (number > 1 and tensor.shape[0] != number):
        raise FeedError(
            f"feed {var.name!r} has shape {list(tensor.shape)}, but the gradient of the loss (recorded at {source}) is "
            f"fed as {wanted}: {which} (CPU_NUM)",
            variable=var.name, got=list(tensor.shape), expected=wanted,
        )  # fmt: skip
    return [t.clone() for t in tensor.reshape(number, *sizes).unbind(0)]


class _Input:
    """What a tensor of one input has to be."""

    __slots__ = ("buffer", "dtype", "first_size", "fixed", "has_batch", "name", "numpy_dtype", "rank", "symbols")

    def __init__(self, program: Program, var: VarDesc) -> None:
        self.name, self.rank, self.buffer = var.name, len(var.shape), var.buffer
        self.dtype: torch.dtype = getattr(torch, var.dtype)
        self.numpy_dtype = np.dtype(var.dtype) if var.dtype != "bfloat16" else None
        self.fixed = [(axis, d) for axis, d in enumerate(var.shape) if isinstance(d, int)]
        self.symbols = [
            (axis, str(d.args[0])) for axis, d in enumerate(var.shape) if isinstance(d, Expr) and d.op == "sym"
        ]
        self.has_batch = has_batch(program, var.name)
        self.first_size = var.shape[0] if var.shape and isinstance(var.shape[0], int) else 0  # 0: it varies

    def tensor(self, value: Any) -> torch.Tensor | None:
        """Return the value as it is, or None if it needs converting or an error message."""
        if isinstance(value, np.ndarray):
            if value.dtype != self.numpy_dtype or not value.flags.writeable or not value.flags.c_contiguous:
                return None
            tensor = torch.from_numpy(value)
        elif (
            type(value) is torch.Tensor
            and value.dtype is self.dtype
            and not value.requires_grad
            and not value.is_meta
            and value.is_contiguous()
        ):
            tensor = value
        else:
            return None
        shape = tensor.shape
        if len(shape) != self.rank or self.buffer:
            return None
        for axis, size in self.fixed:
            if shape[axis] != size:
                return None
        return tensor


class Inputs:
    """The inputs of `program` on `num_replicas` replicas. `fed_loss_gradient`: the user feeds the loss's gradient."""

    def __init__(self, program: Program, num_replicas: int, *, fed_loss_gradient: bool) -> None:
        self._program, self._num_replicas, self._fed_loss_gradient = program, num_replicas, fed_loss_gradient
        self._inputs = {var.name: _Input(program, var) for var in program.feeds()}
        self._computes = any(is_computed(d) for var in program.feeds() for d in var.shape)
        self._written = [var.name for var in program.feeds() if var.buffer]
        self._ragged = RaggedInputs(program)

    def shares(self, feed: Feed) -> list[Share]:
        """Return the feed of each active replica. Raises FeedError, TypeError."""
        if self._fed_loss_gradient:
            return split_with_loss_gradients(self._program, feed, self._num_replicas, self._split)
        return self._split(feed)

    def rows(self, share: Share) -> int:
        """Return the rows of a share; 1 if no input has a batch."""
        for name, tensor in share.items():
            known = self._inputs.get(name)
            if known is not None and known.has_batch:
                return tensor.shape[0]
        return 1

    def bindings(self, share: Share) -> dict[str, int]:
        """Return the value of each size symbol. Raises FeedError if two inputs disagree."""
        if self._computes:
            return bind_symbols(self._program, {n: t for n, t in share.items() if n in self._inputs})
        found: dict[str, int] = {}
        for name, tensor in share.items():
            known = self._inputs.get(name)
            if known is None:
                continue  # the gradient of the loss
            for axis, symbol in known.symbols:
                size = tensor.shape[axis]
                if found.setdefault(symbol, size) != size:
                    return bind_symbols(self._program, share)  # raises, naming the two
        return found

    def _split(self, feed: Feed) -> list[Share]:
        if isinstance(feed, (list, tuple)):
            return self._listed(feed)
        joined = self._joined(feed)
        if joined and isinstance(feed, Mapping):
            feed = {**feed, **{name: parts[0] for name, parts in joined.items()}}
        shares = split(self._program, self._tensors(feed), self._num_replicas, self._ragged)
        if joined:
            shares = self._dealt(shares, joined)
        for name in self._written:  # in place, so neither by another replica nor in the user's array
            for share in shares:
                if name in share and (len(shares) > 1 or name in joined):
                    share[name] = share[name].clone()
        return shares

    def _joined(self, feed: Any) -> dict[str, list[torch.Tensor]]:
        """Return, for inputs whose first size is a number, the entries of several replicas that were fed as one."""
        found: dict[str, list[torch.Tensor]] = {}
        if self._num_replicas == 1 or not isinstance(feed, Mapping):
            return found
        for name, value in feed.items():
            size = self._inputs[name].first_size if name in self._inputs else 0
            given = getattr(value, "shape", ()) if size else ()
            if isinstance(given, tuple) and given and size < given[0] <= size * self._num_replicas:
                if given[0] % size == 0:
                    tensor = converted(self._program.variables[name], value)
                    found[name] = list(tensor.split_with_sizes([size] * (given[0] // size)))
        return found

    def _dealt(self, shares: list[Share], joined: Mapping[str, list[torch.Tensor]]) -> list[Share]:
        """Give each replica its own entry. Raises FeedError if the feed is for another number of replicas elsewhere."""
        number = max(len(parts) for parts in joined.values())
        if not any(known.has_batch for known in self._inputs.values()):
            shares = shares[:number]  # what fits as it is goes to each
        for name, parts in joined.items():
            if len(parts) != len(shares):
                raise FeedError(
                    f"feed {name!r} has the rows of {len(parts)} replicas, {parts[0].shape[0]} for each, but what else "
                    f"is fed is for {len(shares)}",
                    variable=name, got=len(parts), expected=len(shares),
                )  # fmt: skip
            for share, part in zip(shares, parts, strict=True):
                share[name] = part
        return shares

    def _tensors(self, feed: Any) -> Share:
        if isinstance(feed, Mapping):
            feed = self._ragged.with_lengths(feed)
        if isinstance(feed, dict) and len(feed) == len(self._inputs):
            tensors: Share = {}
            for name, value in feed.items():
                known = self._inputs.get(name)
                tensor = None if known is None else known.tensor(value)
                if tensor is None:
                    break
                tensors[name] = tensor
            else:
                return tensors
        return as_tensors(self._program, feed or {})

    def _listed(self, feeds: Sequence[Any]) -> list[Share]:
        for item in feeds:
            if not isinstance(item, Mapping):
                raise TypeError(f"a feed list holds {type(item).__name__}; expected one dict for each replica")
        if not 1 <= len(feeds) <= self._num_replicas:
            raise FeedError(
                f"a feed list has {len(feeds)} dicts, but there are {self._num_replicas} replicas (CPU_NUM); "
                "give one dict for each (fewer at the end of the data), or a single dict to be split"
            )
        shares = [self._tensors(f) for f in feeds]
        for position, share in enumerate(shares):
            if self.rows(share) == 0:
                raise FeedError(f"dict {position} of the feed list has no rows; feed at least one to each replica")
        return shares
