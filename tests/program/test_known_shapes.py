"""Shapes that one recording has found serve the next, and no call whose shapes follow from anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.program.record import known_shapes
from penstock.program.record.fakes import empty_fake
from penstock.program.record.shapes import call_on_fakes
from penstock.program.record.sizes import Sizes

aten = torch.ops.aten
F32 = torch.float32


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What the test's own calls keep."""
    empty: dict[Any, Any] = {}
    monkeypatch.setattr(known_shapes, "_MADE", empty)
    return empty


def shape(func: Any, *operands: Any, hint: int = 7920, symbol: str = "s0") -> list[str]:
    """The shape of a call's result in a Program of its own; in `operands`, a callable gets its size."""
    sizes = Sizes()
    n = sizes.new(symbol, hint)
    found, _ = call_on_fakes(func, tuple(one(n) if callable(one) else one for one in operands), {})
    return [str(size) for size in found.shape]


def rows(width: int = 4, dtype: torch.dtype = F32) -> Any:
    return lambda n: empty_fake([n, width], None, dtype)


def test_the_second_program_asks_no_kernel(made: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = shape(aten.view.default, rows(), [-1, 2])
    assert len(made) == 1
    monkeypatch.setattr("penstock.program.record.shapes.Call.layouts", None)
    assert shape(aten.view.default, rows(), [-1, 2]) == first == ["s0 * 2", "2"]


@pytest.mark.parametrize(
    "other",
    [
        lambda: shape(aten.view.default, rows(8), [-1, 2]),
        lambda: shape(aten.view.default, rows(), [-1, 4]),
        lambda: shape(aten.view.default, rows(), [-1, 2], symbol="s1"),
        lambda: shape(aten.view.default, rows(), [-1, 2], hint=7921),
        lambda: shape(aten.view.default, rows(dtype=torch.float64), [-1, 2]),
        lambda: shape(aten.reshape.default, rows(), [-1, 2]),
    ],
    ids=["width", "size", "symbol", "rows at hand", "dtype", "operator"],
)
def test_a_call_that_differs_is_not_taken_for_it(made: dict[Any, Any], other: Any) -> None:
    shape(aten.view.default, rows(), [-1, 2])
    other()
    assert len(made) == 2


def test_the_default_type_is_part_of_a_call() -> None:
    made: list[torch.dtype] = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            found, _ = call_on_fakes(aten.full.default, ([Sizes().new("s0", 7920), 3], 1.0), {})
        finally:
            torch.set_default_dtype(torch.float32)
        made.append(found.dtype)
    assert made == [torch.float32, torch.float64]


def test_an_error_is_found_anew(made: dict[Any, Any]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            shape(aten.mm.default, rows(), empty_fake([12, 3], None, F32))
    assert not made


def test_operands_that_are_no_values_are_not_kept(made: dict[Any, Any]) -> None:
    n = Sizes().new("s0", 7920)
    found, _ = call_on_fakes(aten.rand.generator, ([n, 2],), {"generator": torch.Generator()})
    assert [str(size) for size in found.shape] == ["s0", "2"] and not made


def test_what_is_kept_has_a_bound(made: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_shapes, "_LIMIT", 3)
    for width in range(2, 12):
        shape(aten.view.default, rows(width), [-1])
        assert len(made) <= 3
