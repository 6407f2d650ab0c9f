"""What goes wrong in a step or a plan ends in one error that names it, and the engine goes on."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.native.engine import Engine, EngineError, EngineStateError, TorchPlan


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(2, max_running=2, intra_op_threads=1)
    yield made
    made.close()


def plan_that_may_fail() -> TorchPlan:
    """relu(x) -> mm(., y) -> tanh, beside an independent chain that succeeds."""
    plan = TorchPlan(7)
    for slot in (0, 1, 4):
        plan.keep(slot)
    relu = plan.add("aten::relu", "", [("slot", 0)], [2], 70)
    product = plan.add("aten::mm", "", [("slot", 2), ("slot", 1)], [3], 71)
    last = plan.add("aten::tanh", "", [("slot", 3)], [4], 72)
    beside = plan.add("aten::neg", "", [("slot", 0)], [5], 73)
    beside_too = plan.add("aten::add", "Tensor", [("slot", 5), ("slot", 5)], [6], 74)
    plan.edge(relu, product)
    plan.edge(product, last)
    plan.edge(beside, beside_too)
    plan.seal()
    return plan


def test_a_failed_operator_is_named_with_inputs_and_runs_go_on(engine: Engine) -> None:
    plan = plan_that_may_fail()
    plan.set(0, torch.ones(2, 3))
    plan.set(1, torch.ones(4, 5))
    with pytest.raises(EngineError) as caught:
        engine.run(plan, 1)
    error = caught.value
    assert (error.op_index, error.instruction) == (71, 1)
    assert "cannot be multiplied" in error.message
    assert "Exception raised from" not in error.message  # torch's C++ backtrace
    assert error.inputs == "Float[2, 3], Float[4, 5]"
    assert [plan.get(slot) for slot in (2, 3, 4, 5, 6)] == [None] * 5

    plan.set(1, torch.ones(3, 5))
    engine.run(plan, 2)
    result = plan.get(4)
    assert result is not None
    assert torch.equal(result, torch.tanh(torch.full((2, 5), 3.0)))
    assert engine.statistics()["failed_runs"] == 1


def test_the_error_survives_pickling(engine: Engine) -> None:
    plan = plan_that_may_fail()
    plan.set(0, torch.ones(2, 3))
    plan.set(1, torch.ones(4, 5))
    with pytest.raises(EngineError) as caught:
        engine.run(plan, 1)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - what was pickled on the same line
    assert (copy.message, copy.op_index, copy.inputs) == (
        caught.value.message,
        caught.value.op_index,
        caught.value.inputs,
    )


@pytest.mark.parametrize("seed", range(1, 21))
def test_the_engine_survives_failures_on_any_schedule(engine: Engine, seed: int) -> None:
    width = 20
    plan = TorchPlan(2 + 2 * width)
    plan.keep(0)
    plan.keep(1)
    for i in range(width):
        first = plan.add("aten::mm", "", [("slot", 0), ("slot", 1)], [2 + 2 * i], i)
        second = plan.add("aten::relu", "", [("slot", 2 + 2 * i)], [3 + 2 * i], width + i)
        plan.edge(first, second)
    plan.seal()
    plan.set(0, torch.ones(2, 2))
    plan.set(1, torch.ones(3, 3))
    with pytest.raises(EngineError) as caught:
        engine.run(plan, 1, schedule_seed=seed)
    assert caught.value.op_index < width
    plan.set(1, torch.ones(2, 2))
    engine.run(plan, 2, schedule_seed=seed)
    assert engine.drain()["step"].tolist().count(2) == 2 * width


def test_a_reader_of_an_empty_slot_fails_by_name(engine: Engine) -> None:
    plan = plan_that_may_fail()
    plan.set(1, torch.ones(2, 2))
    with pytest.raises(EngineError) as caught:
        engine.run(plan, 1)
    assert caught.value.op_index in (70, 73)
    assert caught.value.inputs == "None"


def test_a_host_function_that_raises_is_named_with_its_exception(engine: Engine) -> None:
    def broken(tensors: list[Tensor]) -> Sequence[Tensor]:
        raise KeyError("no such block")

    plan = TorchPlan(1)
    plan.keep(0)
    plan.set(0, torch.ones(2))
    plan.add_python(broken, [0], [], 5)
    plan.seal()
    for _ in range(2):
        with pytest.raises(EngineError, match="KeyError: 'no such block'") as caught:
            engine.run(plan, 1)
        assert caught.value.op_index == 5
        assert caught.value.inputs == "Float[2]"


def test_a_host_function_that_returns_too_little_is_named(engine: Engine) -> None:
    plan = TorchPlan(1)
    plan.add_python(lambda tensors: [], [], [0], 3)
    plan.seal()
    with pytest.raises(EngineError, match="returned 0 tensors, but 1 were expected"):
        engine.run(plan, 1)


def test_a_cycle_is_refused_and_shown() -> None:
    plan = TorchPlan(3)
    one = plan.add("aten::relu", "", [("slot", 2)], [0], 0)
    two = plan.add("aten::neg", "", [("slot", 0)], [1], 1)
    three = plan.add("aten::tanh", "", [("slot", 1)], [2], 2)
    plan.edge(one, two)
    plan.edge(two, three)
    plan.edge(three, one)
    with pytest.raises(ValueError, match=r"cycle: .*aten::\w+.* -> .*aten::"):
        plan.seal()


def test_instructions_that_race_for_a_slot_are_refused(engine: Engine) -> None:
    plan = TorchPlan(2)
    one = plan.add("aten::relu", "", [("slot", 0)], [1], 0)
    two = plan.add("aten::neg", "", [("slot", 0)], [1], 1)
    last = plan.add("aten::tanh", "", [("slot", 1)], [None], 2)
    plan.edge(one, last)
    plan.edge(two, last)
    with pytest.raises(
        ValueError, match=r"slot 1 is written by instruction 0 \(aten::relu\) and used by .* 1 \(aten::neg"
    ):
        plan.seal()
    with pytest.raises(ValueError, match="not sealed"):
        engine.run(plan, 1)


def test_a_reader_not_ordered_after_its_writer_is_refused() -> None:
    plan = TorchPlan(3)
    plan.add("aten::relu", "", [("slot", 0)], [1], 0)
    plan.add("aten::neg", "", [("slot", 1)], [2], 1)
    with pytest.raises(ValueError, match="no path of edges orders the two"):
        plan.seal()


def add(name: str, overload: str, args: list[tuple[str, Any]], outputs: list[int | list[int] | None]) -> None:
    TorchPlan(2).add(name, overload, args, outputs, 0)


@pytest.mark.parametrize(
    ("name", "overload", "args", "outputs", "says"),
    [
        ("aten::nothing", "", [], [], "no operator 'aten::nothing'"),
        ("aten::relu", "", [("slot", 2)], [0], "slot 2 does not exist"),
        ("aten::relu", "", [("slot", 0)], [0, 1], "returns 1 values, but 2 outputs"),
        ("aten::relu", "", [], [0], "'self' is missing"),
        ("aten::relu", "", [("slot", 0), ("slot", 1)], [0], "takes 1 arguments, but 2"),
        ("aten::relu", "", [("slot", 0)], [[0, 1]], "returns no list"),
        ("aten::mul", "Scalar", [("slot", 0), ("const", "two")], [1], "'other' is 'two'"),
        ("aten::relu", "", [("place", 0)], [1], r"'self' is \('place', 0\)"),
    ],
)
def test_a_wrong_instruction_is_refused(
    name: str, overload: str, args: list[tuple[str, Any]], outputs: list[int | list[int] | None], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        add(name, overload, args, outputs)


def test_slots_outside_the_plan_are_refused() -> None:
    plan = TorchPlan(2)
    with pytest.raises(ValueError, match="slot 2 does not exist; the plan has slots 0 to 1"):
        plan.set(2, torch.ones(1))
    with pytest.raises(ValueError, match="slot -1 does not exist"):
        plan.keep(-1)


def test_edges_outside_the_plan_are_refused() -> None:
    with pytest.raises(IndexError, match=re.escape("edge 0 -> 1, but the plan has 0 instructions")):
        TorchPlan(1).edge(0, 1)


def test_a_plan_runs_only_once_sealed_and_then_cannot_grow(engine: Engine) -> None:
    plan = TorchPlan(1)
    with pytest.raises(ValueError, match="not sealed"):
        engine.run(plan, 1)
    plan.seal()
    with pytest.raises(ValueError, match="sealed"):
        plan.add("aten::relu", "", [("slot", 0)], [0], 0)


@pytest.mark.parametrize("setting", ["num_threads", "max_running", "intra_op_threads"])
def test_a_setting_below_one_is_refused(setting: str) -> None:
    given = {"num_threads": 1, "max_running": 1, "intra_op_threads": 1, setting: 0}
    with pytest.raises(SpecError, match=f"{setting} is 0"):
        Engine(given["num_threads"], max_running=given["max_running"], intra_op_threads=given["intra_op_threads"])


def test_a_closed_engine_refuses_to_run() -> None:
    engine = Engine(2, max_running=2, intra_op_threads=1)
    engine.close()
    engine.close()
    plan = TorchPlan(0)
    plan.seal()
    with pytest.raises(EngineStateError, match="closed"):
        engine.run(plan, 1)
