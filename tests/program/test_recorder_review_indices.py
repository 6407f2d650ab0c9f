"""Indexing by integer tensors is recorded; only masks have a size that depends on data, and torch owns its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.exec.scope import Scope
from penstock.program.program import Program


class Picks(nn.Module):
    def forward(self, x: Any, i: Any) -> Any:
        return x[torch.arange(x.shape[0]), i]


INDEXED: list[Callable[[Any, Any], Any]] = [
    lambda x, i: x[:, torch.tensor([0, 2])],
    lambda x, i: x[i],
    Picks(),
    lambda x, i: x[:, [3, 0]],
]


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("index", INDEXED)
def test_an_index_of_integers_gives_what_torch_gives(index: Callable[[Any, Any], Any], rows: int) -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x, i = fluid.layers.data("x", [4]), fluid.layers.data("i", [-1], dtype="int64")
        out = index(x, i)
    values, places = torch.randn(rows, 4), torch.arange(rows).flip(0)
    got = fluid.Executor().run(main, {"x": values, "i": places}, [out], scope=Scope())[0]
    np.testing.assert_array_equal(got, index(values, places).numpy())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_is_refused(dtype: torch.dtype) -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.layers.data("x", [4])
        with pytest.raises(ProgramError, match="a size that depends on data"):
            x[:, torch.tensor([1, 0, 1, 0], dtype=dtype)]


def test_a_kernel_of_torch_that_pins_the_batch_is_named_instead_of_the_user() -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.layers.data("x", [2, 4])
        with pytest.raises(ProgramError, match="torch's upsample_linear1d cannot run with a symbolic batch"):
            torch.nn.functional.interpolate(x, size=8, mode="linear")
