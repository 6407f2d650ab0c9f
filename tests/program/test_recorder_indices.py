"""Indexing by integer tensors is recorded; only masks have a size that depends on data, and torch owns its limits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.program.record.opening import recording_of
from penstock.program.record.shapes import Pinned, call_on_fakes
from penstock.scope import Scope


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


def test_calls_whose_shape_functions_pin_the_batch_are_probed() -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.data("x", [-1, 2, 4])
        found = [torch.nn.functional.interpolate(x, size=8, mode="linear"), torch.nn.functional.fold(x, (2, 2), 1)]
    shapes = [[str(d) for d in cast(Any, one).desc.shape] for one in found]
    assert shapes == [["s0", "2", "8"], ["s0", "2", "2", "2"]]


PROBED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "even": lambda x: x[: 2 * (x.shape[0] // 2)] * 2,
    "at_most": lambda x: x[:4] * 2,
    "at_most_many": lambda x: x[:200] * 2,
    "at_least": lambda x: torch.nn.functional.pad(x, (0, 0, 0, max(0, 4 - x.shape[0]))) * 2,
    "squeezed": lambda x: x.squeeze(0) * 2,
}
LINEAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "twice": lambda x: torch.cat([x, x]),
    "one_more": lambda x: torch.cat([x, x[:1]]),
    "no_single_row": lambda x: x.diff(dim=0) if len(x) > 1 else x.reshape(7, 7),
}


def _as_probed(name: str, kernel: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    library: Any = torch.library.Library("penstock_probed", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
    with contextlib.suppress(RuntimeError):  # defined by an earlier test
        library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CPU")
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data("x", [5])
    recording = recording_of(main)
    func = getattr(torch.ops.penstock_probed, name).default
    try:
        found, cuts = call_on_fakes(func, (recording.tensor_of(x.name),), {})
    finally:
        library._destroy()
    assert not cuts
    return [str(d) for d in recording.shape_of(found)]


@pytest.mark.parametrize("name", PROBED)
def test_a_size_linear_only_in_large_even_batches_is_not_probed(name: str) -> None:
    with pytest.raises(Pinned):
        _as_probed(name, PROBED[name])


@pytest.mark.parametrize(
    ("name", "size"), [("twice", "s0 * 2"), ("one_more", "s0 + 1"), ("no_single_row", "s0 + (-1)")]
)
def test_a_size_linear_in_odd_and_small_batches_is_probed(name: str, size: str) -> None:
    assert _as_probed(name, LINEAR[name]) == [size, "5"]
