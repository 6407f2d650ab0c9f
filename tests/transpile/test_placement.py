"""Placement: every row on one server, the same on every node. Rows 48, 65, 66, 68 and 70 of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.program.ir import Operator, Ref, Role, VarDesc
from penstock.program.program import Program
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.dispatch import HashName, PSDispatcher, RoundRobin
from penstock.transpile.partition import Partition
from penstock.transpile.placement import Placement, place

SHAPES = st.lists(st.lists(st.integers(1, 400), min_size=0, max_size=3), min_size=1, max_size=8)


class Backwards(PSDispatcher):
    """A user's class."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        chosen = []
        for _ in varlist:
            self._step += 1
            chosen.append(self.eps[-self._step % len(self.eps)])
        return chosen


class Forgetful(RoundRobin):
    """Does not begin again."""

    def reset(self) -> None:
        pass


def program_of(shapes: Sequence[Sequence[int]], seed: int = 0) -> Program:
    """A program with one update a shape, written by hand."""
    program = Program(seed=seed)
    program.add_variable(VarDesc("rate", (), "float32", persistable=True))
    program.add_variable(VarDesc("x", (), "float32", feed=True))
    for i, shape in enumerate(shapes):
        name, gradient = f"w_{i}", f"w_{i}@GRAD"
        program.add_variable(VarDesc(name, tuple(shape), "float32", persistable=True, parameter=True))
        program.add_variable(VarDesc(gradient, tuple(shape), "float32"))
        pair = ((name, gradient),)
        program.append(
            Operator(
                f"expand_{i}", "aten.expand.default", (Ref("x"), tuple(shape)), (gradient,), role=Role.BACKWARD,
                role_vars=pair,
            )
        )  # fmt: skip
        program.append(
            Operator(
                f"sgd_{i}", "penstock.sgd_.default", (Ref(name), Ref(gradient), Ref("rate")), (), writes=(name,),
                role=Role.OPTIMIZE, role_vars=pair,
            )
        )  # fmt: skip
    return program


def placed(
    shapes: Sequence[Sequence[int]], num_servers: int, *, seed: int = 0, **fields: Any
) -> tuple[Placement, tuple[str, ...]]:
    config = DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    endpoints = tuple(f"10.0.0.{i}:6170" for i in range(num_servers))
    return place(Partition(program_of(shapes, seed)), endpoints, config), endpoints


@given(
    shapes=SHAPES,
    num_servers=st.integers(1, 5),
    method=st.sampled_from([RoundRobin, HashName, Backwards]),
    slices=st.booleans(),
)
def test_row_48_every_row_of_every_parameter_is_on_one_server(
    shapes: list[list[int]], num_servers: int, method: type[PSDispatcher], slices: bool
) -> None:
    placement, endpoints = placed(shapes, num_servers, split_method=method, slice_var_up=slices)
    on_servers = [p for e in endpoints for p in placement.on(e)]
    assert sorted(on_servers, key=placement.blocks.index) == list(placement.blocks)
    for i, shape in enumerate(shapes):
        rows = [
            row
            for p in placement.of_parameter(f"w_{i}")
            for row in range(p.block.first_row, p.block.first_row + p.block.num_rows)
        ]
        assert rows == list(range(shape[0] if shape else 1))
    assert len({p.name for p in placement.blocks}) == len(placement.blocks)


@given(shapes=SHAPES, num_servers=st.integers(1, 5))
def test_row_65_servers_get_as_many_blocks_up_to_one(shapes: list[list[int]], num_servers: int) -> None:
    placement, endpoints = placed(shapes, num_servers)
    counts = [len(placement.on(e)) for e in endpoints]
    assert max(counts) - min(counts) <= 1


def test_row_66_a_blocks_server_depends_on_its_name_alone() -> None:
    few, _ = placed([[300, 300], [7]], 4, split_method=HashName)
    many, _ = placed([[300, 300], [7], [900, 90], [5, 5]], 4, split_method=HashName)
    where = {p.name: p.endpoint for p in many.blocks}
    assert all(where[p.name] == p.endpoint for p in few.blocks)


def test_row_68_a_variable_is_cut_on_row_boundaries() -> None:
    placement, endpoints = placed([[1000001, 10], [400]], 2)
    assert [(p.name, p.block.num_rows, p.endpoint) for p in placement.blocks] == [
        ("w_0.block0", 500001, endpoints[0]),
        ("w_0.block1", 500000, endpoints[1]),
        ("w_1", 400, endpoints[0]),
    ]


def test_row_70_a_larger_min_block_size_makes_fewer_blocks() -> None:
    assert len(placed([[400, 400]], 8)[0].blocks) == 8
    assert len(placed([[400, 400]], 8, min_block_size=81920)[0].blocks) == 1


def test_whole_variables_are_shuffled_by_the_seed_of_the_program() -> None:
    shapes = [[n] for n in range(1, 9)]
    orders = [[p.parameter for p in placed(shapes, 3, slice_var_up=False, seed=seed)[0].blocks] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    # numpy.random.seed(1); numpy.random.shuffle(list(range(8))), as Fluid shuffles
    assert orders[0] == [f"w_{i}" for i in (7, 2, 1, 6, 0, 4, 3, 5)]


def test_a_dispatcher_that_is_not_deterministic_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Forgetful sends the gradient of 'w_0' to '10\.0\.0\.0:6170'"):
        placed([[3]], 2, split_method=Forgetful)


def test_a_parameter_without_elements_is_refused() -> None:
    with pytest.raises(SpecError, match="no elements to place"):
        placed([[0, 4]], 2)
