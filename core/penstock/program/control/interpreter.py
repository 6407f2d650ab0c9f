"""Runs one block: its operators in order, with torch's kernels, on values by name.

A symbol whose size is `UNKNOWN` follows from data: it is found in the first result of the block that has it.
Invariant: what a block is given is never changed; an input that it writes is a copy. With gradients on, a write in
place is made on a copy too, where no view shares the memory, so that autograd finds the values that it has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import storage_id
from penstock.program.control import array_kernels
from penstock.program.expr import Expr
from penstock.program.ir import Operator, SubBlock, VarDesc, sub_blocks
from penstock.program.kernels import ARRAY_OPERATORS, concrete, resolve

Value = Any
"""A tensor, or the list of an array's elements."""

Run = Callable[[str, list[Value], Sequence[int], "Sequence[CompiledBlock]", Sequence[int]], list[Value]]
"""Runs blocks within a block: kind, inputs, sizes, blocks, counts."""

_CONTROL = "penstock.control.default"
UNKNOWN = -1
"""The size of a symbol that follows from data, before the block has found it."""


class CompiledBlock:
    """A block with its kernels. `inputs`: descriptions of its inputs; `outputs`: of its results, in order."""

    def __init__(self, block: SubBlock, run_inner: Run) -> None:
        described = {v.name: v for v in block.variables}
        self.block = block
        self.inputs: list[VarDesc] = [described[name] for name in block.inputs]
        self.outputs: list[VarDesc] = [described[name] for name in block.outputs]
        self._run_inner = run_inner
        self._inner = [[CompiledBlock(b, run_inner) for b in sub_blocks(op)] for op in block.operators]
        self._kernels = [None if op.type in ARRAY_OPERATORS else resolve(op) for op in block.operators]
        self._viewed = {v.storage for v in block.variables if v.storage != v.name}
        self._storage = {v.name: v.storage for v in block.variables}
        self._written = {self._storage[name] for op in block.operators for name in op.writes} & set(block.inputs)
        self._over = _last_uses(block)
        self._sized = [_symbols_of_results(op, described) for op in block.operators]

    def run(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> list[Value]:
        """Return the block's results. `sizes`: of its symbols. Raises RuntimeError naming the operator that fails."""
        values = dict(zip(self.block.inputs, operands, strict=True))
        for name in self._written:
            values[name] = _copy(values[name])
        own, late = dict(sizes), UNKNOWN in sizes.values()
        for number, op in enumerate(self.block.operators):
            try:
                self._run(number, op, values, own)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                raise RuntimeError(
                    f"{op.name!r} ({op.type}, recorded at {op.source or 'an unknown line'}) in its block: {error}"
                ) from error
            if late:
                self._find_sizes(number, values, own)
            for name in self._over[number]:
                del values[name]
        return [values[name] for name in self.block.outputs]

    def _find_sizes(self, number: int, values: dict[str, Value], sizes: dict[str, int]) -> None:
        for name, dim, symbol in self._sized[number]:
            if sizes[symbol] == UNKNOWN:
                sizes[symbol] = values[name].shape[dim]

    def _run(self, number: int, op: Operator, values: dict[str, Value], sizes: Mapping[str, int]) -> None:
        kernel = self._kernels[number]
        if torch.is_grad_enabled():
            for written in op.writes:
                if self._storage[written] == written and written not in self._viewed:
                    values[written] = _copy(values[written])
        args = [concrete(a, sizes, values.__getitem__) for a in op.args]
        if kernel is None:
            values.update(zip(op.output_names(), array_kernels.run(op.type, args), strict=True))
            return
        if op.type == _CONTROL:
            given = [values[name] for name in op.input_names()]
            made = self._run_inner(args[0], given, args[2], self._inner[number], args[4])
            values.update(zip(op.output_names(), _separate(made, given), strict=True))
            return
        result = kernel(*args, **{k: concrete(v, sizes, values.__getitem__) for k, v in op.kwargs})
        for name, value in zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=False):
            if isinstance(name, tuple):
                values.update(zip(name, value, strict=True))
            elif name is not None:
                values[name] = value


def _symbols_of_results(op: Operator, described: Mapping[str, VarDesc]) -> list[tuple[str, int, str]]:
    """(result, dimension, symbol) for each size of an operator's results that is a symbol alone."""
    found: list[tuple[str, int, str]] = []
    for var in (described[name] for name in op.output_names()):
        sizes = enumerate(var.shape) if var.kind == "dense" else ()
        found += [(var.name, i, str(d.args[0])) for i, d in sizes if isinstance(d, Expr) and d.op == "sym"]
    return found


def _copy(value: Value) -> Value:
    return value.clone() if isinstance(value, Tensor) else list(value)


def _separate(made: Sequence[Value], given: Sequence[Value]) -> list[Value]:
    """Results that share no memory with what a block was given, as they may be written."""
    taken = {storage_id(value) for value in given if isinstance(value, Tensor)}
    return [_copy(v) if not isinstance(v, Tensor) or storage_id(v) in taken else v for v in made]


def _last_uses(block: SubBlock) -> list[list[str]]:
    """Names that nothing after an operator uses, for each operator; results stay."""
    seen = set(block.outputs)
    over: list[list[str]] = []
    for op in reversed(block.operators):
        names = dict.fromkeys((*op.input_names(), *op.output_names()))
        over.append([name for name in names if name not in seen])
        seen.update(names)
    return over[::-1]
