"""Programs with several blocks: what a run runs, what a block sees, and their text."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program import legality

TEXT = """program version=1 seed=0 symbols=[]
var x : float32[2] feed
var w : float32[2] persistable
var a : float32[2]
var b : float32[2]
op a_0 aten.mul.Tensor(%x, 2.0) -> %a role=FORWARD
op b_0 aten.mul.Tensor(%w, 3.0) -> %b role=FORWARD block=2
op b_1 aten.mul_.Tensor(%w, 3.0) -> none writes=[w] role=FORWARD block=2
"""


def test_blocks_are_parts_of_one_list_of_operators() -> None:
    program = fluid.Program.parse(TEXT)
    assert program.num_blocks == 3
    assert [[op.name for op in block.ops] for block in program.blocks] == [["a_0"], [], ["b_0", "b_1"]]
    assert [op.name for op in program.global_block().ops] == ["a_0"]
    assert program.block(2).idx == 2
    assert program.clone() == program
    assert str(program) == TEXT


def test_a_program_with_one_block_returns_its_operator_list() -> None:
    program = fluid.Program()
    assert program.num_blocks == 1
    assert program.global_block().operators is program.operators


def test_a_run_runs_block_0_alone() -> None:
    scope = fluid.Scope()
    (result,) = fluid.Executor().run(fluid.Program.parse(TEXT), {"x": np.ones(2, "float32")}, ["a"], scope=scope)
    assert result.tolist() == [2.0, 2.0]
    assert scope.find("w") is None


def test_what_a_block_makes_is_its_own() -> None:
    program = fluid.Program.parse(TEXT + "op b_2 aten.neg.default(%a) -> none role=FORWARD block=2\n")
    with pytest.raises(ProgramError, match=r"rule 1: operator 'b_2' \(\) reads 'a'"):
        legality.check(program)


def test_a_block_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProgramError, match="block 3 is asked for; the program has 3"):
        fluid.Program.parse(TEXT).block(3)


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "two"])
def test_a_block_has_a_number_from_1_on(number: str) -> None:
    with pytest.raises(ProgramError, match="line 8: expected the number of a block from 1 on"):
        fluid.Program.parse(TEXT.replace("writes=[w] role=FORWARD block=2", f"writes=[w] role=FORWARD block={number}"))


def test_a_table_of_servers_is_described_and_used_by_no_operator() -> None:
    text = TEXT.replace("var w : float32[2] persistable", "var w : float32[2] persistable distributed")
    program = fluid.Program.parse(text)
    assert program.variables["w"].distributed
    assert str(program) == text
    with pytest.raises(ProgramError, match=r"rule 8: operator 'b_0' .* uses table 'w', which is distributed"):
        legality.check(program)
