"""What a refusal says to write instead works; and sizes of Variables make tensors outside of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.scope import Scope

L: Any = fluid.layers
X = np.random.default_rng(1).normal(size=(5, 4)).astype("float32")


def run(write: Callable[[Any], Any], dtype: str = "float32") -> Any:
    """Record `write` on x [batch, 4] and run it on five rows and on one; return the first result."""
    main, startup, scope = Program(seed=1), Program(seed=1), Scope()
    with fluid.program_guard(main, startup):
        out = write(L.data("x", [4], dtype=dtype))
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    first, _ = (exe.run(main, {"x": X[:rows].astype(dtype)}, [out], scope=scope)[0] for rows in (5, 1))
    return first


MADE: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "zeros": (lambda x: torch.zeros(x.shape[0], 2) + x[:, :2], lambda x: x[:, :2]),
    "a list of sizes": (lambda x: torch.ones([x.shape[0], 4]) * x, lambda x: x),
    "a named size": (
        lambda x: torch.full(size=(x.shape[0] * 2, 1), fill_value=3.0) * 2,
        lambda x: torch.full((10, 1), 6.0),
    ),
    "arange": (lambda x: torch.arange(x.shape[0]) * 2, lambda x: torch.arange(5) * 2),
    "arange with ends": (lambda x: torch.arange(1, x.shape[0] + 1).float(), lambda x: torch.arange(1, 6).float()),
    "a fixed size": (lambda x: torch.arange(x.shape[1]) + x, lambda x: torch.arange(4) + x),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_made_by_a_variables_size_outside_of_modules(name: str) -> None:
    write, expected = MADE[name]
    np.testing.assert_array_equal(run(write), expected(torch.from_numpy(X)).numpy())


def test_factories_without_a_variables_size_are_torchs_own() -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        L.data("x", [4])
        made = [torch.zeros(2), torch.arange(3), torch.ones((2, 2)), torch.randn(2)]
    assert all(type(tensor) is torch.Tensor for tensor in made)


def test_random_numbers_by_a_variables_size_are_refused() -> None:
    with pytest.raises(ProgramError, match="draws from torch's global generator"):
        run(lambda x: torch.randn(x.shape[0], 4) + x)


ALTERNATIVES: dict[str, tuple[Callable[[Any], Any], str, Callable[[Any], Any]]] = {
    "selecting by a mask": (
        lambda x: x[x > 0].sum(),
        "Use torch.where, masks",
        lambda x: torch.where(x > 0, x, 0.0).sum(),
    ),
    "rows by a mask": (lambda x: x[x[:, 0] > 0].sum(), "masks or topk", lambda x: (x * (x[:, :1] > 0)).sum()),
    "a branch on values": (
        lambda x: x if x.sum() > 0 else -x,
        "Use torch.where",
        lambda x: torch.where(x.sum() > 0, x, -x),
    ),
    "max_norm": (
        lambda x: nn.Embedding(9, 3, max_norm=1.0)(x.long().abs()),
        r"rows \* \(max_norm / rows.norm",
        lambda x: (rows := nn.Embedding(9, 3)(x.long().abs())) * (1.0 / rows.norm(dim=-1, keepdim=True)).clamp(max=1),
    ),
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_a_refusal_at_the_users_line_names_what_works(name: str) -> None:
    write, message, instead = ALTERNATIVES[name]
    with pytest.raises(ProgramError, match=message) as caught:
        run(write)
    assert str(caught.value).startswith("test_recorder_alternatives.py:")
    torch.manual_seed(1)
    got = run(instead)
    torch.manual_seed(1)
    np.testing.assert_allclose(got, instead(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


def test_a_variable_that_can_be_no_condition_is_there() -> None:
    """Fluid's scripts ask `if x:` for `if x is not None:`; torch gives no answer that could be meant instead."""
    np.testing.assert_array_equal(run(lambda x: x * 2 if x else x), X * 2)
    with pytest.raises(ProgramError, match=r"the truth of variable .* depends on data"):
        run(lambda x: x * 2 if x > 0 else x)


def test_dropout_of_channels_drops_whole_channels() -> None:
    out = run(lambda x: nn.functional.dropout2d(torch.ones(x.shape[0], 50, 3, 2) + x[:, :1, None, None] * 0, 0.5))
    channels = out.reshape(5, 50, 6)
    assert (channels == channels[:, :, :1]).all()
    assert set(np.unique(channels)) == {0.0, 2.0}
    assert 0.3 < (channels > 0).mean() < 0.7


def test_interpolation_of_a_fed_size_needs_a_whole_factor() -> None:
    with fluid.program_guard(main := Program(seed=1), Program(seed=1)):
        x = fluid.data("x", [None, 2, None], "float32")
        twice = nn.functional.interpolate(x, scale_factor=2)
        with pytest.raises(ProgramError, match="use a whole number"):
            nn.functional.interpolate(x, scale_factor=1.5)
    [got] = fluid.Executor().run(main, {"x": np.ones((3, 2, 5), "float32")}, [twice], scope=Scope())
    assert got.shape == (3, 2, 10)
