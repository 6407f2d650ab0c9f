"""Placed memory: results are those of ordinary memory, whoever keeps a tensor, and whatever ends first."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.native.engine import AllocationMeter, Arena, Engine, EngineError, TorchPlan

SIDE = 64
NBYTES = SIDE * SIDE * 4
BLOCK = NBYTES + 64  # with its header
KEPT: list[Tensor] = []


@torch.library.custom_op("penstock_test::keep_operand", mutates_args=())
def keep_operand(x: Tensor) -> Tensor:
    """Add one, and remember the operand, as an operator with a cache does."""
    KEPT.append(x)
    return x + 1


@torch.library.custom_op("penstock_test::keep_result", mutates_args=())
def keep_result(x: Tensor) -> Tensor:
    """Add one, and remember the result."""
    KEPT.append(x + 1)
    return KEPT[-1]


ASKED = [True]


@torch.library.custom_op("penstock_test::sometimes_smaller", mutates_args=())
def sometimes_smaller(x: Tensor) -> Tensor:
    """Make a tensor of the size that was observed, or a small one."""
    return x.clone() if ASKED[0] else torch.zeros(3)


@torch.library.custom_op("penstock_test::filled", mutates_args=())
def filled(x: Tensor) -> Tensor:
    """Overwrite all that it gets."""
    return torch.full((SIDE, SIDE), -7.0)


@torch.library.custom_op("penstock_test::refuse_negative", mutates_args=())
def refuse_negative(x: Tensor) -> Tensor:
    """Add one, or fail."""
    if float(x.sum()) < 0:
        raise ValueError("a negative sum")
    return x + 1


@pytest.fixture
def engine() -> Iterator[Engine]:
    KEPT.clear()
    one = Engine(1, max_running=1, intra_op_threads=1)
    yield one
    one.close()
    KEPT.clear()


def chain(*operators: str, kept: int | None = None) -> TorchPlan:
    """Slot 0 is fed, each operator reads the slot before; the last one is kept."""
    plan = TorchPlan(len(operators) + 1)
    for i, name in enumerate(operators):
        plan.add(name, "", [("slot", i)], [i + 1], i)
        if i:
            plan.edge(i - 1, i)
    plan.keep(0)
    plan.keep(len(operators))
    if kept is not None:
        plan.keep(kept)
    plan.seal()
    return plan


def placed(plan: TorchPlan, arena: Arena, num: int, *, lasting: bool = False) -> TorchPlan:
    """Place the results of the first `num` instructions alternately in two blocks, each checking itself only."""
    blocks = [(BLOCK * (i % 2), BLOCK, [i - 2] if i >= 2 else []) for i in range(num)]
    plan.place(arena, blocks, [(i, NBYTES, 0, i, -1) for i in range(num)], lasting=lasting)
    return plan


def fed(plan: TorchPlan, seed: int = 0) -> Tensor:
    x = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    plan.set(0, x)
    return x


def result(plan: TorchPlan, slot: int) -> Tensor:
    found = plan.get(slot)
    assert found is not None
    return found


def test_a_run_is_watched_and_names_what_it_allocates(engine: Engine) -> None:
    plan = chain("aten::relu", "aten::neg")
    fed(plan)
    assert plan.observed() is None
    plan.observe()
    engine.run(plan, 0)
    assert plan.observed() == [(0, NBYTES, 0, [(0, 0)], False, [0]), (1, NBYTES, 0, [(0, 0)], False, [0])]


def test_placed_results_lie_in_the_arena_and_are_equal(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "aten::tanh", "aten::neg", "aten::sigmoid"), Arena()
    x = fed(plan)
    placed(plan, arena, 3)
    for step in range(3):
        engine.run(plan, step)
        assert torch.equal(result(plan, 4), x.relu().tanh().neg().sigmoid())
        memory = plan.memory()
        assert (memory["planned"], memory["handed_out"], memory["unplanned"], memory["abandoned"]) == (3, 3, 1, 0)
    assert arena.nbytes == 2 * BLOCK


@pytest.mark.parametrize("keeper", ["keep_operand", "keep_result"])
def test_memory_that_an_operator_keeps_is_not_used_again(keeper: str, engine: Engine) -> None:
    # What is kept lies in a block that later instructions of the same run are to have, and in later runs.
    plan, arena = chain("aten::relu", f"penstock_test::{keeper}", "aten::neg", "aten::tanh", "aten::neg"), Arena()
    x = fed(plan)
    placed(plan, arena, 4)
    expected = x.relu() if keeper == "keep_operand" else x.relu() + 1
    for step in range(4):
        engine.run(plan, step)
        assert torch.equal(result(plan, 5), (x.relu() + 1).neg().tanh().neg())
    assert len(KEPT) == 4
    for kept in KEPT:
        assert torch.equal(kept, expected)
    assert plan.memory()["abandoned"] == 1
    assert plan.memory()["handed_out"] == 3


def test_memory_freed_between_runs_costs_one_block_only(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "penstock_test::keep_operand", "aten::neg"), Arena()
    fed(plan)
    placed(plan, arena, 2)
    engine.run(plan, 0)
    KEPT.clear()
    engine.run(plan, 1)
    KEPT.clear()
    assert plan.memory()["abandoned"] == 1


def test_tensors_outlive_their_plan_and_arena(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "penstock_test::keep_operand", "aten::neg"), Arena()
    x = fed(plan)
    placed(plan, arena, 2)
    engine.run(plan, 0)
    del plan, arena
    gc.collect()
    others = [torch.full((SIDE, SIDE), 7.0) for _ in range(50)]  # would be given freed memory
    assert torch.equal(KEPT[0], x.relu())
    del others


def test_memory_is_given_back_with_the_last_tensor(engine: Engine) -> None:
    meter = AllocationMeter()
    with meter:
        plan, arena = chain("aten::relu", "penstock_test::keep_operand", "aten::neg"), Arena()
        fed(plan)
    placed(plan, arena, 2)
    engine.run(plan, 0)
    del plan, arena
    KEPT.clear()
    gc.collect()
    assert meter.live == 0


def test_lasting_tensors_are_looked_for_before_a_run(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "aten::tanh", "aten::neg", kept=1), Arena()
    x = fed(plan)
    placed(plan, arena, 1, lasting=True)
    for step in range(3):
        plan.clear(1)
        engine.run(plan, step)
        assert torch.equal(result(plan, 1), x.relu())
        assert (plan.memory()["handed_out"], plan.memory()["abandoned"]) == (1, 0)
    engine.run(plan, 3)  # the tensor of the last run is still there
    assert torch.equal(result(plan, 1), x.relu())
    assert plan.memory()["abandoned"] == 1


def test_a_failed_run_leaves_the_placement_usable(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "aten::neg", "penstock_test::refuse_negative", "aten::tanh"), Arena()
    x = fed(plan)
    placed(plan, arena, 3)
    with pytest.raises(EngineError, match="a negative sum"):
        engine.run(plan, 0)
    plan.set(0, torch.zeros_like(x))
    engine.run(plan, 1)
    assert torch.equal(result(plan, 4), torch.ones_like(x).tanh())
    assert (plan.memory()["handed_out"], plan.memory()["abandoned"]) == (3, 0)


def test_a_failed_run_teaches_nothing(engine: Engine) -> None:
    plan = chain("aten::neg", "penstock_test::refuse_negative")
    x = fed(plan)
    plan.observe()
    with pytest.raises(EngineError):
        engine.run(plan, 0)
    assert plan.observed() is None
    plan.set(0, torch.zeros_like(x))
    engine.run(plan, 1)
    seen = plan.observed()
    assert seen is not None and {s[0] for s in seen} == {0, 1}


def test_another_size_than_planned_is_allocated_as_always(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "aten::neg"), Arena()
    placed(plan, arena, 1)
    x = torch.rand(3, 5) - 0.5
    plan.set(0, x)
    engine.run(plan, 0)
    assert torch.equal(result(plan, 2), x.relu().neg())
    assert plan.memory()["handed_out"] == 0


def observed(plan: TorchPlan, engine: Engine) -> TorchPlan:
    """Run once to see how operands are laid out: memory is taken over only where they are so again."""
    plan.observe()
    engine.run(plan, 0)
    return plan


def test_a_result_takes_over_the_memory_of_its_operand(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "aten::tanh", "aten::neg"), Arena()
    x = fed(plan)
    observed(plan, engine)
    plan.place(arena, [(0, BLOCK, [])], [(0, NBYTES, 0, 0, -1), (1, NBYTES, 0, 0, 0)], lasting=False)
    engine.run(plan, 0)
    assert torch.equal(result(plan, 3), x.relu().tanh().neg())
    assert plan.memory()["handed_out"] == 2


def test_memory_is_reused_only_if_operands_are_laid_out_as_seen(engine: Engine) -> None:
    # The result is laid out as the first operand: over the second one, a transposed first one would read what is
    # written already.
    plan = TorchPlan(4)
    plan.add("aten::neg", "", [("slot", 0)], [2], 0)
    plan.add("aten::add", "Tensor", [("slot", 1), ("slot", 2), ("const", 1)], [3], 1)
    plan.edge(0, 1)
    for slot in (0, 1, 3):
        plan.keep(slot)
    plan.seal()
    straight, other = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    plan.set(0, other)
    plan.set(1, straight)
    observed(plan, engine)
    plan.place(Arena(), [(0, BLOCK, [])], [(0, NBYTES, 0, 0, -1), (1, NBYTES, 0, 0, 1)], lasting=True)
    spaced, shifted = torch.rand(SIDE, 2 * SIDE)[:, ::2], torch.rand(SIDE * SIDE + 1)[1:].view(SIDE, SIDE)
    for x, taken in ((straight, 2), (straight.T, 1), (spaced, 1), (torch.rand(1, SIDE).expand(SIDE, SIDE), 1),
                     (shifted, 1), (straight.double(), 1), (straight.T, 1), (straight, 2)):  # fmt: skip
        plan.clear(3)
        plan.set(1, x)
        engine.run(plan, 0)
        assert torch.equal(result(plan, 3), x + other.neg())
        assert plan.memory()["handed_out"] == taken


def test_what_was_not_observed_is_not_taken_over(engine: Engine) -> None:
    plan = chain("aten::relu", "aten::tanh", "aten::neg")
    x = fed(plan)
    plan.place(Arena(), [(0, BLOCK, [])], [(0, NBYTES, 0, 0, -1), (1, NBYTES, 0, 0, 0)], lasting=False)
    engine.run(plan, 0)
    assert torch.equal(result(plan, 3), x.relu().tanh().neg())
    assert plan.memory()["handed_out"] == 1


@pytest.mark.parametrize("asked", [True, False])
def test_a_block_that_is_not_requested_forwards_its_predecessors(asked: bool, engine: Engine) -> None:
    plan = chain("aten::relu", "penstock_test::keep_operand", "penstock_test::sometimes_smaller",
                 "penstock_test::filled", "aten::neg")  # fmt: skip
    x, blocks = fed(plan), [(0, BLOCK, []), (0, BLOCK, [0]), (0, BLOCK, [1])]
    plan.place(Arena(), blocks, [(0, NBYTES, 0, 0, -1), (2, NBYTES, 0, 1, -1), (3, NBYTES, 0, 2, -1)], lasting=False)
    ASKED[0] = asked
    for step in range(2):
        engine.run(plan, step)
    ASKED[0] = True
    assert len(KEPT) == 2
    for kept in KEPT:
        assert torch.equal(kept, x.relu())


def test_a_plan_without_blocks_runs(engine: Engine) -> None:
    # All that it makes is fetched. The threads' counts are written for each instruction all the same.
    plan = chain("aten::relu")
    x = fed(plan)
    plan.place(Arena(), [], [], lasting=False)
    for step in range(2):
        engine.run(plan, step)
        assert torch.equal(result(plan, 1), x.relu())
        assert plan.memory()["handed_out"] == 0


def test_an_arena_that_grew_is_not_kept_by_plans_that_used_it(engine: Engine) -> None:
    arena, plans = Arena(), []
    for num in (1, 2, 3, 4):
        plan = chain(*["aten::neg"] * 5)
        fed(plan)
        blocks = [(BLOCK * i, BLOCK, ()) for i in range(num)]
        plan.place(arena, blocks, [(i, NBYTES, 0, i, -1) for i in range(num)], lasting=False)
        engine.run(plan, 0)
        plans.append(plan)
        assert arena.living == arena.nbytes == num * BLOCK
    for plan in plans:
        engine.run(plan, 1)
    assert arena.living == 4 * BLOCK
    arena.release()
    assert arena.living == 0


def test_memory_that_only_a_kept_tensor_holds_counts(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "penstock_test::keep_operand", "aten::neg"), Arena()
    fed(plan)
    placed(plan, arena, 2)
    engine.run(plan, 0)
    assert (arena.nbytes, arena.living) == (0, 2 * BLOCK)
    KEPT.clear()
    assert arena.living == 0


def test_arenas_that_are_counted_together_say_the_sum(engine: Engine) -> None:
    first = Arena()
    second = Arena(first)
    for arena, num in ((first, 1), (second, 2)):
        plan = chain("aten::relu", "aten::neg", "aten::tanh")
        fed(plan)
        engine.run(placed(plan, arena, num), 0)
    assert (first.nbytes, second.nbytes, first.living) == (BLOCK, 2 * BLOCK, 3 * BLOCK)


def test_an_operand_that_somebody_else_has_is_not_taken_over(engine: Engine) -> None:
    plan, arena = chain("aten::relu", "penstock_test::keep_result", "aten::tanh", "aten::neg"), Arena()
    x = fed(plan)
    observed(plan, engine)
    KEPT.clear()
    plan.place(arena, [(0, BLOCK, [])], [(1, NBYTES, 0, 0, -1), (2, NBYTES, 0, 0, 0)], lasting=False)
    engine.run(plan, 0)
    assert torch.equal(KEPT[0], x.relu() + 1)
    assert torch.equal(result(plan, 4), (x.relu() + 1).tanh().neg())
    assert plan.memory()["handed_out"] == 1


def test_raw_allocations_of_kernels_are_served_and_freed(engine: Engine) -> None:
    # oneDNN takes its scratch memory raw; every size of the convolution is watched, and then placed.
    plan = TorchPlan(4)
    args: list[tuple[str, object]] = [("slot", 0), ("slot", 1), ("const", None)]
    constants: list[object] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    plan.add("aten::convolution", "", args + [("const", c) for c in constants], [2], 0)
    plan.add("aten::relu", "", [("slot", 2)], [3], 1)
    plan.edge(0, 1)
    for slot in (0, 1, 3):
        plan.keep(slot)
    plan.seal()
    x, weight = torch.rand(8, 3, 16, 16), torch.rand(4, 3, 3, 3)
    plan.set(0, x)
    plan.set(1, weight)
    plan.observe()
    engine.run(plan, 0)
    seen = plan.observed()
    assert seen is not None
    blocks: list[tuple[int, int, tuple[int, ...]]] = []
    entries: list[tuple[int, int, int, int, int]] = []
    offset = 0
    for instruction, nbytes, occurrence, *_ in seen:
        size = 64 + -(-nbytes // 64) * 64
        entries.append((instruction, nbytes, occurrence, len(blocks), -1))
        blocks.append((offset, size, ()))
        offset += size
    expected = result(plan, 3).clone()
    plan.clear(3)
    plan.place(Arena(), blocks, entries, lasting=True)
    for step in range(3):
        plan.clear(3)
        engine.run(plan, step)
        assert torch.equal(result(plan, 3), expected)
        assert plan.memory()["abandoned"] == 0


def test_wrong_placements_are_refused() -> None:
    plan = chain("aten::relu", "aten::neg")
    with pytest.raises(ValueError, match="does not fit block 0"):
        plan.place(Arena(), [(0, NBYTES, [])], [(0, NBYTES, 0, 0, -1)], lasting=False)  # no room for the header
    with pytest.raises(ValueError, match="checks block 5"):
        plan.place(Arena(), [(0, BLOCK, [5])], [], lasting=False)
