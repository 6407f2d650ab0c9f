"""Types of variables that scripts declare by hand."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as fluid
from penstock.errors import ProgramError


def test_a_variable_is_of_the_type_that_is_declared() -> None:
    kinds: Any = fluid.core.VarDesc.VarType
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        block = main.global_block()
        array = block.create_var(name="rows", dtype="float64", type=kinds.LOD_TENSOR_ARRAY)
        raw = block.create_var(name="state", shape=[1], dtype="float64", persistable=True, type=kinds.RAW)
        plain = block.create_var(name="plain", shape=[2], dtype="float64", type=kinds.LOD_TENSOR)
        for number in range(2):
            at = fluid.layers.fill_constant([1], "int64", number)
            fluid.layers.array_write(fluid.layers.fill_constant([2], "float64", number), at, array)
        length = fluid.layers.array_length(array)
        with pytest.raises(ProgramError, match=r"'state'.*has the type 'raw', which no operator makes or reads"):
            fluid.layers.mean(raw)
    assert [array.type, raw.type, plain.type] == [kinds.LOD_TENSOR_ARRAY, kinds.RAW, kinds.LOD_TENSOR]
    assert fluid.Program.parse(str(main)) == main
    assert fluid.Executor().run(main, {}, [length])[0].tolist() == [2]
