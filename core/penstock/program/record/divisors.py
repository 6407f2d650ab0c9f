"""Numbers that sizes have to be multiples of, or are divided by, in one ATen call: at which rows it is worth trying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.compat.torch import schema_of, tree_flatten, tree_unflatten
from penstock.program.record.arithmetic import Size
from penstock.program.record.fakes import Fake
from penstock.program.record.sizes import size_of

_STEPS = {"step", "stride", "kernel_size", "downscale_factor"}
"""Arguments by which kernels divide sizes."""


def largest_divisor(func: Any, leaves: Sequence[Any], structure: Any, sizes: Sequence[Size]) -> int:
    """Return the largest number by which a call, or what made the sizes of its operands, divides one; 1: none does."""
    made = [atom.args[1].number or 1 for size in sizes for atom in size.atoms() if atom.op in ("//", "%")]
    args, kwargs = tree_unflatten(leaves, structure)
    schema = schema_of(func)
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    steps = [value for name, value in named.items() if name in _STEPS] if "strided" not in schema.name else []
    return max((1, *made, *(n for n in tree_flatten(steps)[0] if type(n) is int)))


def divisor_of_rows(leaves: Sequence[Any], sizes: Sequence[Size]) -> int:
    """Return what rows have to be a multiple of, so that a call that changes a shape succeeds; 1 if it is not known.

    39 for [T, 96] that becomes [-1, 39, 96], and for [T // 39, 39, 96] that becomes [T, 96] again. `leaves`: the
    operands; `sizes`: those that are no numbers.
    """
    made = [atom.args[1].number or 1 for size in sizes for atom in size.atoms() if atom.op == "//"]
    return math.lcm(_divisor_of_shape(leaves), *made)


def _divisor_of_shape(leaves: Sequence[Any]) -> int:
    tensor, *named = leaves or [None]
    if not isinstance(tensor, Fake) or any(type(size) is not int for size in named) or -1 not in named:
        return 1
    wanted = math.prod(int(size) for size in named if size > 0)
    known = math.prod(size_of(n).number or 1 for n in tensor.shape)
    return wanted // math.gcd(wanted, known)
