"""Slicing and dispatch: Fluid's published example, invariants over random shapes, the same answer on every node."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.transpile.dispatch import (
    HashName,
    PSDispatcher,
    RoundRobin,
    check_min_block_size,
    dispatched,
    slice_variable,
)

SERVERS = ["10.0.0.1:6170", "10.0.0.2:6170", "10.0.0.3:6170"]


@dataclass(frozen=True)
class Named:
    name: str


VARIABLES = [Named(f"fc_{i}.w_0") for i in range(7)]


def test_the_published_example_is_cut_on_row_boundaries() -> None:
    blocks = slice_variable("emb", [1000001, 10], 2, 8192)
    assert [str(b) for b in blocks] == ["emb:0:5000010", "emb:1:5000000"]
    assert [(b.name, b.first_row, b.num_rows) for b in blocks] == [
        ("emb.block0", 0, 500001),
        ("emb.block1", 500001, 500000),
    ]


def test_a_vector_is_cut_by_element() -> None:
    assert [b.numel for b in slice_variable("b", [20000], 2, 8192)] == [10000, 10000]


def test_a_small_variable_stays_whole_under_its_own_name() -> None:
    (block,) = slice_variable("fc.b_0", [400], 4, 8192)
    assert (block.name, block.num_rows) == ("fc.b_0", 400)


def test_a_larger_min_block_size_makes_fewer_blocks() -> None:
    assert len(slice_variable("w", [400, 400], 8, 8192)) == 8
    assert len(slice_variable("w", [400, 400], 8, 81920)) == 1


@given(
    shape=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    num_slices=st.integers(1, 9),
    min_block_size=st.integers(1, 10000),
)
def test_blocks_cover_every_row_once(shape: list[int], num_slices: int, min_block_size: int) -> None:
    blocks = slice_variable("w", shape, num_slices, min_block_size)
    assert 1 <= len(blocks) <= num_slices
    row = 0
    for index, block in enumerate(blocks):
        assert (block.index, block.first_row) == (index, row)
        assert block.num_rows > 0
        assert block.numel == block.num_rows * math.prod(shape[1:])
        row += block.num_rows
    assert row == shape[0]


def test_no_elements_and_tiny_blocks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"'w' has shape \[0, 3\]"):
        slice_variable("w", [0, 3], 2, 8192)
    with pytest.raises(SpecError, match="min_block_size is 8191"):
        check_min_block_size(8191)
    check_min_block_size(8192)


def test_round_robin_goes_on_and_starts_again_after_reset() -> None:
    robin = RoundRobin(SERVERS)
    first = dispatched(robin, VARIABLES[:2]) + dispatched(robin, VARIABLES[2:])
    assert first == [SERVERS[i % 3] for i in range(7)]
    robin.reset()
    assert dispatched(robin, VARIABLES) == first
    counts = [first.count(s) for s in SERVERS]
    assert max(counts) - min(counts) <= 1


def test_two_processes_agree_on_the_hash_of_a_name() -> None:
    here = dispatched(HashName(SERVERS), VARIABLES)
    script = (
        "from penstock.transpile.dispatch import HashName\n"
        "class V:\n    def __init__(self, name): self.name = name\n"
        f"print(*HashName({SERVERS!r}).dispatch([V(n) for n in {[v.name for v in VARIABLES]!r}]))"
    )
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert there.stdout.split() == here
    assert len(set(here)) > 1


def test_a_users_dispatcher_is_asked_and_its_mistakes_are_named() -> None:
    class Last(PSDispatcher):
        def dispatch(self, varlist: Sequence[Named]) -> list[str]:
            return [self.eps[-1]] * len(varlist)

    class Elsewhere(PSDispatcher):
        def dispatch(self, varlist: Sequence[Named]) -> list[str]:
            return ["10.9.9.9:1"] * len(varlist)

    class Short(PSDispatcher):
        def dispatch(self, varlist: Sequence[Named]) -> list[str]:
            return self.eps[:1]

    class Forgotten(PSDispatcher):
        def dispatch(self, varlist: Sequence[Named]) -> Any:
            self.answer = self.eps  # and no return

    assert dispatched(Last(SERVERS), VARIABLES[:2]) == [SERVERS[-1]] * 2
    with pytest.raises(SpecError, match=r"Elsewhere\.dispatch sends 'fc_0.w_0' to '10.9.9.9:1'"):
        dispatched(Elsewhere(SERVERS), VARIABLES)
    with pytest.raises(SpecError, match=r"Short\.dispatch gave 1 endpoints for 7 variables"):
        dispatched(Short(SERVERS), VARIABLES)
    with pytest.raises(SpecError, match=r"Forgotten\.dispatch gave None; expected a list of endpoints"):
        dispatched(Forgotten(SERVERS), VARIABLES)
    with pytest.raises(NotImplementedError, match=r"PSDispatcher has to define dispatch"):
        PSDispatcher(SERVERS).dispatch(VARIABLES)
