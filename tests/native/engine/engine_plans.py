"""Random plans and their oracle: the same operators called one after another from Python.

A `Recipe` is data: which operator reads which earlier results. `expected` runs it in order through `torch.ops`,
`lower` makes a plan of it. Results are compared to the bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.native.engine import TorchPlan

SIDE = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One operator: its name, the indices of the values it reads, its constants."""

    name: str
    overload: str
    reads: tuple[int, ...]
    constants: tuple[object, ...] = ()
    as_list: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """Values 0 to `num_inputs` - 1 are fed; call i makes value `num_inputs` + i."""

    num_inputs: int
    calls: tuple[Call, ...]


UNARY = ("aten::relu", "aten::tanh", "aten::neg", "aten::sigmoid")
BINARY = ("aten::add", "aten::mul", "aten::sub")


def random_recipe(seed: int, *, size: int, reach: int = 12) -> Recipe:
    """Make a random graph of `size` calls; each reads values at most `reach` back, some of them twice."""
    rng = random.Random(seed)
    num_inputs = rng.randint(1, 4)
    calls: list[Call] = []
    matrices = list(range(num_inputs))  # not the stacked intermediate of a mean
    while len(calls) < size:
        newest = num_inputs + len(calls)
        pick = [rng.choice(matrices[-reach:]) for _ in range(3)]
        kind = rng.randrange(6)
        if kind == 0:
            calls.append(Call(rng.choice(UNARY), "", (pick[0],)))
        elif kind == 1:
            calls.append(Call("aten::mm", "", (pick[0], pick[1])))
        elif kind == 2:
            calls.append(Call("aten::addmm", "", (pick[0], pick[1], pick[2])))
        elif kind == 3:
            calls.append(Call("aten::stack", "", tuple(pick), (), as_list=True))
            calls.append(Call("aten::mean", "dim", (newest,), ([0], False)))
        elif kind == 4:
            calls.append(Call("aten::mul", "Scalar", (pick[0],), (0.5,)))
        else:
            calls.append(Call(rng.choice(BINARY), "Tensor", (pick[0], pick[1])))
        matrices.append(num_inputs + len(calls) - 1)
    return Recipe(num_inputs, tuple(calls))


def inputs_of(recipe: Recipe, seed: int = 0) -> list[Tensor]:
    """Make the fed values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(SIDE, SIDE, generator=generator) - 0.5 for _ in range(recipe.num_inputs)]


def expected(recipe: Recipe, inputs: list[Tensor]) -> list[Tensor]:
    """Call the operators in order and return every value."""
    values = list(inputs)
    for call in recipe.calls:
        namespace, name = call.name.split("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), call.overload or "default")
        read = [values[i] for i in call.reads]
        values.append(operator(read, *call.constants) if call.as_list else operator(*read, *call.constants))
    return values


def lower(recipe: Recipe, *, kept: set[int], affinities: int = 0) -> TorchPlan:
    """Make a sealed plan: value i in slot i, an edge for each read, `kept` values and the inputs kept."""
    plan = TorchPlan(recipe.num_inputs + len(recipe.calls))
    for i, call in enumerate(recipe.calls):
        reads: list[tuple[str, object]] = (
            [("slots", list(call.reads))] if call.as_list else [("slot", value) for value in call.reads]
        )
        constants: list[tuple[str, object]] = [("const", value) for value in call.constants]
        affinity = i % affinities if affinities else -1
        plan.add(call.name, call.overload, reads + constants, [recipe.num_inputs + i], 1000 + i, affinity=affinity)
        for value in call.reads:
            if value >= recipe.num_inputs:
                plan.edge(value - recipe.num_inputs, i)
    for slot in (*range(recipe.num_inputs), *kept):
        plan.keep(slot)
    plan.seal()
    return plan


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare to the bit, so that a NaN equals itself and 0 differs from -0."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def leaves_of(recipe: Recipe) -> set[int]:
    """List the values that no call reads."""
    read = {value for call in recipe.calls for value in call.reads}
    return {recipe.num_inputs + i for i in range(len(recipe.calls))} - read
