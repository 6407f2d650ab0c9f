"""`penstock::control`: an operator that runs blocks, one handle of a graph whatever its blocks do.

    control(str kind, Tensor[] inputs, SymInt[] sizes, str[] blocks, int[] counts) -> Tensor[]

Every block has all `inputs` as its inputs, in order, and `sizes` as its symbols. `kind` is Fluid's type:

conditional_block   blocks[0] if inputs[0] is true, else blocks[1]
while               blocks[0] while inputs[0] is true; its results are the first counts[0] inputs of the next iteration
block               blocks[0], once
recurrent           blocks[0] for each step; see `loops.py`
dynamic_recurrent   blocks[0] for each step of ragged sequences; see `rows.py`
if_else             blocks[0] on the rows of which a mask is true, blocks[1] on the others; see `rows.py`

The kernel is a function: it writes no operand, and results share no memory with operands or one another. Its gradient,
`penstock::control_backward`, runs the blocks once more with autograd on and asks torch for the gradients of the inputs
`wanted`: values of iterations are kept within that one handle, and nothing between the two. Random operators draw the
same numbers both times, and others in each iteration.

`add_arrays(Tensor x, Tensor y) -> Tensor` adds arrays, element by element: the gradients of a value whose sizes follow
from data, of which each reader makes one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import autograd_in_kernels, storage_id
from penstock.program.control import arrays, loops, rows
from penstock.program.control.interpreter import CompiledBlock, Value
from penstock.program.expr import evaluate
from penstock.program.ir import VarDesc
from penstock.program.text import parse_block

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_OPERANDS = "str kind, Tensor[] inputs, SymInt[] sizes, str[] blocks, int[] counts"
_LIBRARY.define(f"control({_OPERANDS}) -> Tensor[]")
_LIBRARY.define("add_arrays(Tensor x, Tensor y) -> Tensor")
_LIBRARY.define(f"control_backward(Tensor?[] grads, {_OPERANDS}, int[] wanted) -> Tensor[]")

Sizes = Mapping[str, int]
Run = Callable[[Sequence[CompiledBlock], list[Value], Sizes, Sequence[int]], list[Value]]


def _conditional(
    blocks: Sequence[CompiledBlock], given: list[Value], sizes: Sizes, counts: Sequence[int]
) -> list[Value]:
    return blocks[0 if bool(given[0]) else 1].run(given, sizes)


def _once(blocks: Sequence[CompiledBlock], given: list[Value], sizes: Sizes, counts: Sequence[int]) -> list[Value]:
    return blocks[0].run(given, sizes)


_KINDS: dict[str, Run] = {
    "conditional_block": _conditional,
    "block": _once,
    "while": loops.repeated,
    "recurrent": loops.recurrent,
    "dynamic_recurrent": rows.dynamic_recurrent,
    "if_else": rows.if_else,
}


def _run(
    kind: str, given: list[Value], sizes: Sequence[int], blocks: Sequence[CompiledBlock], counts: Sequence[int]
) -> list[Value]:
    if kind not in _KINDS:
        raise ValueError(f"penstock.control: kind is {kind!r}; expected one of {', '.join(_KINDS)}")
    return _KINDS[kind](blocks, given, dict(zip(blocks[0].block.symbols, sizes, strict=True)), counts)


@functools.lru_cache(maxsize=1024)
def compiled(text: str) -> CompiledBlock:
    """Return the block of a text that an operator was given."""
    return CompiledBlock(parse_block(text), _run)


def _control(
    kind: str, inputs: Sequence[Tensor], sizes: Sequence[int], texts: Sequence[str], counts: Sequence[int]
) -> list[Tensor]:
    blocks = [compiled(text) for text in texts]
    given: list[Value] = [
        arrays.unpacked(x) if v.kind == "array" else x for x, v in zip(inputs, blocks[0].inputs, strict=True)
    ]
    with torch.no_grad():
        made = _run(kind, given, sizes, blocks, counts)
    results = loops.results_of(kind, blocks[0], inputs, counts)
    return _fresh(made, [var for var, _ in results], inputs)


def _fresh(made: Sequence[Value], described: Sequence[VarDesc], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results as tensors with memory of their own."""
    taken = {storage_id(x) for x in inputs}
    results: list[Tensor] = []
    for value, var in zip(made, described, strict=True):
        if var.kind == "array":
            results.append(arrays.packed(value, getattr(torch, var.dtype)))
            continue
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()
        own = value if whole and storage_id(value) not in taken else value.clone(memory_format=torch.contiguous_format)
        taken.add(storage_id(own))
        results.append(own)
    return results


# ---------------------------------------------------------------- gradients


def _control_backward(grads: Sequence[Tensor | None], kind: str, inputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    sizes, texts, counts, wanted = rest
    blocks = [compiled(text) for text in texts]
    given: list[Value] = []
    leaves: list[Tensor] = []
    with autograd_in_kernels():
        for number, (x, var) in enumerate(zip(inputs, blocks[0].inputs, strict=True)):
            is_wanted = number in wanted
            value = [_leaf(e, leaves, is_wanted) for e in arrays.unpacked(x)] if var.kind == "array" else None
            given.append(_leaf(x, leaves, is_wanted) if value is None else value)
        made = _run(kind, given, sizes, blocks, counts)
        pairs = [pair for value, grad in zip(made, grads, strict=True) for pair in _pairs(value, grad)]
        found = _gradients(pairs, leaves)
    queue = iter(found)
    return [_gradient_of(given[i], blocks[0].inputs[i], queue) for i in wanted]


def _leaf(x: Tensor | None, leaves: list[Tensor], is_wanted: bool) -> Any:
    if x is None or not is_wanted:
        return x
    leaf = x.detach().requires_grad_(x.is_floating_point())
    leaves.append(leaf)
    return leaf


def _pairs(value: Value, grad: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Results that have a gradient, with it; of an array its elements."""
    if grad is None:
        return []
    if isinstance(value, Tensor):
        return [(value, grad)] if value.requires_grad else []
    each = zip(value, arrays.unpacked(grad), strict=False)
    return [(v, g) for v, g in each if v is not None and g is not None and v.requires_grad]


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each leaf, zeros where nothing depends on it."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs and leaves:
        results, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _gradient_of(value: Value, var: VarDesc, found: Any) -> Tensor:
    if var.kind == "array":
        return arrays.packed([None if e is None else next(found) for e in value], getattr(torch, var.dtype))
    grad: Tensor = next(found)
    return grad.clone(memory_format=torch.contiguous_format)  # torch may give two leaves one memory


def _add_arrays(x: Tensor, y: Tensor) -> Tensor:
    def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return one if other is None else other if one is None else one + other

    elements = itertools.starmap(added, itertools.zip_longest(arrays.unpacked(x), arrays.unpacked(y)))
    return arrays.packed(list(elements), x.dtype)


# ---------------------------------------------------------------- shapes and derivative


def _control_shape(
    kind: str, inputs: Sequence[Tensor], sizes: Sequence[int], texts: Sequence[str], counts: Sequence[int]
) -> list[Tensor]:
    block = compiled(texts[0])
    bindings = dict(zip(block.block.symbols, sizes, strict=True))
    place = inputs[0].device if inputs else torch.device("meta")
    return [
        torch.empty(_sizes(var, first, bindings), dtype=getattr(torch, var.dtype), device=place)
        for var, first in loops.results_of(kind, block, inputs, counts)
    ]


def _sizes(var: VarDesc, first: loops.Leading, bindings: Sizes) -> list[int]:
    if var.kind == "array":
        return [0]
    own = [evaluate(dim, bindings) for dim in var.shape]
    return [*first.added, *own[first.dropped :]]


def _backward_shape(grads: Any, kind: str, inputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty(inputs[i].shape, dtype=inputs[i].dtype, device=inputs[i].device) for i in rest[-1]]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.kind, tensors, ctx.sizes, ctx.texts, ctx.counts = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1]) if needed]
    found: list[Tensor | None] = [None] * len(ctx.saved_tensors)
    if wanted and any(g is not None for g in grads):
        operands = (list(grads), ctx.kind, list(ctx.saved_tensors), ctx.sizes, ctx.texts, ctx.counts, wanted)
        for i, grad in zip(wanted, torch.ops.penstock.control_backward(*operands), strict=True):
            found[i] = grad
    # An empty list is a nest of no leaves to torch, which asks for the same one back.
    return None, found, *([] if list(rest) == [] else None for rest in (ctx.sizes, ctx.texts, ctx.counts))


_LIBRARY.impl("control", _control, "CompositeExplicitAutograd")
_LIBRARY.impl("control_backward", _control_backward, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::control", _control_shape, lib=_LIBRARY)
torch.library.register_fake("penstock::control_backward", _backward_shape, lib=_LIBRARY)
torch.library.register_autograd("penstock::control", _derivative, setup_context=_context, lib=_LIBRARY)
_LIBRARY.impl("add_arrays", _add_arrays, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::add_arrays", lambda x, y: torch.empty_like(x), lib=_LIBRARY)
