"""Every pointwise operator of torch that may take over an operand's memory gives the same bits when it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.compat.torch import OpOverload, schema_of
from penstock.graph.analysis.buffers import is_single_pass_overload
from penstock.native.engine import Arena, Engine, TorchPlan

NBYTES = 33 * 70 * 4  # vectors and a rest


def overloads() -> Iterator[OpOverload]:
    """All overloads of aten that rule 1 and 2 let through."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if hasattr(packet, "overloads"):
            for overload in packet.overloads():
                found = getattr(packet, overload)
                if is_single_pass_overload(found) and not schema_of(found).is_mutable:
                    yield found


def constant(kind: str) -> object:
    """A value for an argument that is no tensor."""
    return {"number": 2, "Scalar": 2, "float": 0.5, "int": 1, "bool": False, "str": "none"}.get(kind.rstrip("?"))


def arguments(overload: OpOverload, values: list[Tensor]) -> list[object] | None:
    """Tensors where tensors go; None if an argument is of a kind that is not known here."""
    found: list[object] = []
    tensors = iter(values)
    for argument in schema_of(overload).arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(next(tensors))
        elif argument.default_value is not None or kind.startswith("Optional"):
            found.append(argument.default_value)
        else:
            value = constant(kind)
            if value is None:
                return None
            found.append(value)
    return found


Ran = tuple[list[object], Tensor, bool]


def eager(overload: OpOverload, given: list[object]) -> Any:
    """Call it outside of a plan."""
    named = {a.name: v for a, v in zip(schema_of(overload).arguments, given, strict=True) if a.kwarg_only}
    return overload(*given[: len(given) - len(named)], **named)


def bits(result: Tensor) -> Tensor:
    """NaN equals itself so."""
    return result.contiguous().view(torch.int32)


def across(value: object) -> object:
    """The same elements in memory column by column."""
    return value.t().contiguous().t() if isinstance(value, Tensor) else value


def run_over(overload: OpOverload, given: list[object], position: int, engine: Engine) -> tuple[Ran, Ran, Ran]:
    """Run `overload` in a plan, its result over operand `position`; return operands, it, and whether that was done.

    Then with all operands laid out another way, and with the others only.
    """
    schema = schema_of(overload)
    plan = TorchPlan(2 + len(given))
    args: list[tuple[str, object]] = []
    for i, value in enumerate(given):
        args.append(("slot", i) if isinstance(value, Tensor) else ("const", value))
    # The operand is made by an instruction, so that it lies in the arena and dies at the operator.
    made = len(given)
    plan.add("aten::alias_copy", "", [("slot", position)], [made], 0)
    args[position] = ("slot", made)
    plan.add(schema.name, schema.overload_name, args, [made + 1], 1)
    plan.edge(0, 1)
    for i in range(len(given)):
        plan.keep(i)
    plan.keep(made + 1)
    plan.seal()
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            plan.set(i, value)
    entries = [(0, NBYTES, 0, 0, -1), (1, NBYTES, 0, 0, position)]
    plan.observe()
    engine.run(plan, 0)
    plan.place(Arena(), [(0, NBYTES + 128, [])], entries, lasting=True)

    def ran(values: list[object]) -> Ran:
        plan.clear(made + 1)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                plan.set(i, value)
        engine.run(plan, 0)
        result = plan.get(made + 1)
        assert result is not None
        operand = torch.ops.aten.alias_copy(values[position])  # vectors or not, a kernel decides by layouts
        ran_with = [operand if i == position else v for i, v in enumerate(values)]
        return ran_with, result.clone(), plan.memory()["handed_out"] == 2

    others = [v if i == position else across(v) for i, v in enumerate(given)]
    return ran(given), ran([across(v) for v in given]), ran(others)


def test_all_of_them_in_place() -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1)
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(33, 70, generator=generator) * 0.8 + 0.1 for _ in range(5)]
    in_place, wrong = set(), []
    for overload in overloads():
        given = arguments(overload, values)
        if given is None:
            continue
        try:
            expected = eager(overload, given)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # not for float32, or for such arguments
        if not isinstance(expected, Tensor) or expected.shape != (33, 70) or expected.dtype != torch.float32:
            continue
        for position in [i for i, value in enumerate(given) if isinstance(value, Tensor)]:
            runs = run_over(overload, given, position, engine)
            if runs[0][2]:
                in_place.add(str(overload))
            for way, (operands, result, _) in zip(("as observed", "all across", "others across"), runs, strict=True):
                if not torch.equal(bits(result), bits(eager(overload, operands))):
                    wrong.append(f"{overload} over operand {position}, {way}")
    engine.close()
    assert not wrong
    assert len(in_place) > 60, sorted(in_place)
    assert {"aten.relu.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.threshold_backward.default"} <= in_place


@pytest.mark.parametrize("name", ["aten.mm.default", "aten.sum.default", "aten.cat.default", "aten._softmax.default"])
def test_operators_that_see_other_elements_are_not_pointwise(name: str) -> None:
    _, packet, overload = name.split(".")
    assert not is_single_pass_overload(getattr(getattr(torch.ops.aten, packet), overload))
