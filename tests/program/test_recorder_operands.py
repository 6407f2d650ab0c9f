"""Operands from outside the Program, wherever they come in: a parameter among them is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.scope import Scope

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Reads(nn.Module):
    """Reads a parameter that it does not hold."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.read())


USES: list[Callable[[Any, torch.Tensor], Any]] = [
    F.linear,
    lambda x, w: x @ w,
    lambda x, w: torch.matmul(x, other=w),
    lambda x, w: torch.einsum("bi,oi->bo", x, w),
    lambda x, w: torch.cat([x, w]),
    lambda x, w: Reads(lambda: w)(x),
]


@pytest.mark.parametrize("use", USES)
def test_a_parameter_read_by_a_plain_function_trains_like_torch(use: Callable[..., Any]) -> None:
    weight: Any = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        loss = torch.tanh(use(fluid.layers.data("x", [4]), weight)).mean()
        _, ((param, _),) = fluid.optimizer.SGD(0.5).minimize(loss)
    scope = Scope()
    fluid.Executor().run(startup, scope=scope)
    fluid.Executor().run(main, {"x": ROWS}, scope=scope)
    eager: Any = torch.tanh(use(torch.from_numpy(ROWS), weight)).mean()
    eager.backward()
    torch.testing.assert_close(scope.find(param.name), weight.detach() - 0.5 * weight.grad)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0]


def test_a_parameter_that_bypasses_its_stand_in_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4))

    class Outside(nn.Module):
        def forward(self, x: Any) -> Any:
            return Doubles.apply(x, weight)  # type: ignore[no-untyped-call]  # torch has not typed it

    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        loss = fluid.layers.fc(Outside()(fluid.layers.data("x", [4])), 1).mean()
        with pytest.raises(ProgramError, match=r"depends on a tensor of shape \[4\] .* would not be trained"):
            fluid.append_backward(loss)
