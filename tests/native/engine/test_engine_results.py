"""The engine computes what the same operators compute in order, to the bit, on every schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.engine.engine_plans import (
    Call,
    Recipe,
    expected,
    inputs_of,
    leaves_of,
    lower,
    random_recipe,
    same_bits,
)

from penstock.native.engine import Engine, TorchPlan


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-threads")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param, max_running=request.param, intra_op_threads=1)
    yield made
    made.close()


def check(engine: Engine, recipe: Recipe, *, seeds: range = range(1), affinities: int = 0) -> None:
    inputs = inputs_of(recipe)
    values = expected(recipe, inputs)
    kept = leaves_of(recipe)
    plan = lower(recipe, kept=kept, affinities=affinities)
    for seed in seeds:
        for slot, tensor in enumerate(inputs):
            plan.set(slot, tensor)
        engine.run(plan, seed, schedule_seed=seed)
        for slot in range(recipe.num_inputs, len(values)):
            got = plan.get(slot)
            if slot in kept:
                assert got is not None
                assert same_bits(got, values[slot]), f"value {slot} with schedule seed {seed}"
            else:
                assert got is None, f"slot {slot} was not released"
            plan.clear(slot)


def chain(length: int) -> Recipe:
    return Recipe(1, tuple(Call("aten::tanh", "", (i,)) for i in range(length)))


def wide(count: int) -> Recipe:
    return Recipe(2, tuple(Call("aten::mm", "", (0, 1)) for _ in range(count)))


def diamonds(count: int) -> Recipe:
    calls: list[Call] = []
    for i in range(count):
        top = 0 if i == 0 else 3 * i
        calls += [Call("aten::relu", "", (top,)), Call("aten::neg", "", (top,))]
        calls += [Call("aten::mm", "", (3 * i + 1, 3 * i + 2))]
    return Recipe(1, tuple(calls))


@pytest.mark.parametrize(
    "recipe", [chain(1), chain(300), wide(100), diamonds(60)], ids=["one", "chain", "wide", "diamonds"]
)
def test_regular_graphs_equal_execution_in_order(engine: Engine, recipe: Recipe) -> None:
    check(engine, recipe, seeds=range(6))


@pytest.mark.parametrize("graph_seed", range(8))
def test_random_graphs_equal_in_order_execution_on_all_schedules(engine: Engine, graph_seed: int) -> None:
    # 8 graphs x 3 pool sizes x 10 seeds: 240 schedules
    check(engine, random_recipe(graph_seed, size=80), seeds=range(1, 11), affinities=graph_seed % 4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph_seed=st.integers(0, 2**32), size=st.integers(1, 40), reach=st.integers(1, 30), seed=st.integers(0, 2**63))
def test_any_graph_equals_execution_in_order(engine: Engine, graph_seed: int, size: int, reach: int, seed: int) -> None:
    check(engine, random_recipe(graph_seed, size=size, reach=reach), seeds=range(seed, seed + 2), affinities=2)


def test_different_seeds_give_different_orders() -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1)
    plan = lower(wide(30), kept=set())
    orders = set()
    for seed in range(1, 6):
        for slot in (0, 1):
            plan.set(slot, torch.ones(2, 2))
        engine.run(plan, seed, schedule_seed=seed)
        orders.add(tuple(engine.drain()["op"].tolist()))
    engine.close()
    assert len(orders) == 5


def test_a_seed_repeats_its_order_on_one_thread() -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1)
    plan = lower(wide(30), kept=set())
    orders = []
    for _ in range(2):
        for slot in (0, 1):
            plan.set(slot, torch.ones(2, 2))
        engine.run(plan, 1, schedule_seed=7)
        orders.append(engine.drain()["op"].tolist())
    engine.close()
    assert orders[0] == orders[1]


def run_once(plan: TorchPlan) -> None:
    plan.seal()
    engine = Engine(2, max_running=2, intra_op_threads=1)
    engine.run(plan, 1)
    engine.close()


def got(plan: TorchPlan, slot: int) -> torch.Tensor:
    tensor = plan.get(slot)
    assert tensor is not None
    return tensor


def test_tensor_lists_optional_lists_and_list_results() -> None:
    plan = TorchPlan(6)
    for slot in range(6):
        plan.keep(slot)
    x = torch.arange(12.0).reshape(3, 4)
    plan.set(0, x)
    plan.set(1, torch.tensor([2, 0]))
    index = plan.add("aten::index", "Tensor", [("slot", 0), ("slots", [-1, 1])], [2], 0)
    split = plan.add("aten::split", "Tensor", [("slot", 2), ("const", 1)], [[3, -1, 4]], 1)
    cat = plan.add("aten::cat", "", [("slots", [4, 3]), ("const", -1)], [5], 2)
    plan.edge(index, split)
    plan.edge(split, cat)
    run_once(plan)
    assert torch.equal(got(plan, 5), torch.cat([x[2:3, [2, 0]], x[0:1, [2, 0]]], dim=-1))


def test_several_results_some_of_them_dropped() -> None:
    plan = TorchPlan(2)
    plan.keep(1)
    plan.set(0, torch.tensor([3.0, 1.0, 2.0]))
    plan.add("aten::max", "dim", [("slot", 0), ("const", 0)], [None, 1], 0)
    run_once(plan)
    assert got(plan, 1).item() == 0


def test_missing_arguments_take_the_defaults_of_the_schema() -> None:
    plan = TorchPlan(3)
    plan.keep(2)
    plan.set(0, torch.ones(2))
    plan.set(1, torch.ones(2))
    plan.add("aten::add", "Tensor", [("slot", 0), ("slot", 1)], [2], 0)
    run_once(plan)
    assert got(plan, 2).tolist() == [2.0, 2.0]


def test_constants_are_converted_by_the_type_in_the_schema() -> None:
    plan = TorchPlan(2)
    plan.keep(0)
    plan.keep(1)
    constants: list[tuple[str, object]] = [
        ("const", [2, 3]),
        ("const", 7),
        ("const", torch.float64),
        ("const", torch.strided),
        ("const", torch.device("cpu")),
        ("const", False),
    ]
    plan.add("aten::full", "", constants, [0], 0)
    plan.add("aten::scalar_tensor", "", [("const", 1.5), ("const", torch.float16)], [1], 1)
    run_once(plan)
    assert torch.equal(got(plan, 0), torch.full((2, 3), 7, dtype=torch.float64))
    assert got(plan, 1).dtype == torch.float16


def test_in_place_operators_change_the_tensor_that_was_set() -> None:
    parameter = torch.ones(3)
    plan = TorchPlan(3)
    plan.keep(0)
    plan.set(0, parameter)
    plan.set(1, torch.full((3,), 2.0))
    read = plan.add("aten::neg", "", [("slot", 0)], [2], 0)
    write = plan.add("aten::sub_", "Tensor", [("slot", 0), ("slot", 1)], [0], 1)
    again = plan.add("aten::add_", "Tensor", [("slot", 0), ("slot", 2)], [None], 2)
    plan.edge(read, write)
    plan.edge(write, again)
    run_once(plan)
    assert parameter.tolist() == [-2.0, -2.0, -2.0]
    assert plan.get(1) is None
    assert plan.get(2) is None


def test_a_tensor_requiring_grad_is_used_without_autograd() -> None:
    parameter = torch.ones(2, requires_grad=True)
    plan = TorchPlan(2)
    plan.keep(1)
    plan.set(0, parameter)
    plan.add("aten::mul", "Scalar", [("slot", 0), ("const", 3)], [1], 0)
    run_once(plan)
    assert not got(plan, 1).requires_grad


def test_the_callers_autocast_does_not_reach_operators() -> None:
    plan = TorchPlan(2)
    plan.keep(0)
    plan.keep(1)
    plan.set(0, torch.ones(4, 4))
    plan.add("aten::mm", "", [("slot", 0), ("slot", 0)], [1], 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_once(plan)
    assert got(plan, 1).dtype == torch.float32


def test_a_plan_runs_many_times_and_kept_slots_persist() -> None:
    plan = TorchPlan(1)
    plan.keep(0)
    plan.set(0, torch.zeros(1))
    plan.add("aten::add_", "Scalar", [("slot", 0), ("const", 1)], [None], 0)
    plan.seal()
    engine = Engine(2, max_running=2, intra_op_threads=1)
    for step in range(50):
        engine.run(plan, step)
    engine.close()
    assert got(plan, 0).item() == 50


def test_an_empty_plan_runs() -> None:
    plan = TorchPlan(0)
    run_once(plan)
    assert plan.num_instructions == 0
