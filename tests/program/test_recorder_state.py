"""State that a forward pass writes: buffers are kept, also when assigned; what is trained is left to the optimizer."""

from __future__ import annotations

import gc
import weakref
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

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Averages(nn.Module):
    ema: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.ema = 0.5 * self.ema + 0.5 * x.mean(0)
        return x - self.ema


def test_a_buffer_assigned_in_forward_is_updated_like_torch() -> None:
    module, eager = Averages(), Averages()
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        out = module(fluid.layers.data("x", [4]))
    assert main.variables["averages_0.ema"].buffer
    assert torch.equal(module.ema, torch.zeros(4))
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    for _ in range(3):
        (got,) = exe.run(main, {"x": ROWS}, [out], scope=scope)
        np.testing.assert_allclose(got, eager(torch.from_numpy(ROWS)).numpy(), rtol=1e-6)
    torch.testing.assert_close(scope.find("averages_0.ema"), eager.ema)


class Grows(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.seen = torch.cat([self.seen, self.seen])
        return x


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        self.weight = nn.Parameter(self.weight * 2.0)
        return x * self.weight


@pytest.mark.parametrize(
    ("module", "text"),
    [(Grows(), "float32.8. to buffer 'grows_0.seen'"), (Replaces(), "parameter 'replaces_0.weight'")],
)
def test_a_refused_assignment_leaves_the_module_unchanged(module: nn.Module, text: str) -> None:
    before = dict(module.state_dict(keep_vars=True))
    with (
        fluid.program_guard(Program(seed=1), Program(seed=1)),
        pytest.raises(ProgramError, match=text),
    ):
        module(fluid.layers.data("x", [4]))
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())


WRITES: list[Callable[[Any, Any], Any]] = [
    lambda p, g: p.sub_(g * 0.5),
    lambda p, g: p[:1].zero_(),
    lambda p, g: torch.sub(p, g, out=p),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_manual_update_of_a_trained_parameter_is_refused(write: Callable[[Any, Any], Any]) -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        loss = nn.Linear(4, 1, bias=False)(fluid.layers.data("x", [4])).mean()
        ((param, grad),) = fluid.append_backward(loss)
        line = f"test_recorder_state.py:{write.__code__.co_firstlineno}"
        with torch.no_grad(), pytest.raises(ProgramError, match=f"{line}: .*apply_gradients"):
            write(param, grad)
    assert not any(op.writes for op in main.operators)


def test_an_untrained_parameter_written_in_forward_is_by_replica() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x: Any) -> Any:
            self.count.add_(1.0)
            return x + self.count

    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        Counts()(fluid.layers.data("x", [4]))
    assert main.variables["counts_0.count"].buffer


class Scaled(nn.Linear):
    """A module whose call itself computes."""

    def __call__(self, x: Any, scale: float) -> Any:
        return super().__call__(x * 2.0) * scale


def test_a_call_that_a_class_overrides_is_recorded_once() -> None:
    module, main, startup = Scaled(4, 2), Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        out = module(fluid.layers.data("x", [4]), 3.0)
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    (got,) = exe.run(main, {"x": ROWS}, [out], scope=scope)
    np.testing.assert_allclose(got, module(torch.from_numpy(ROWS), 3.0).detach().numpy(), rtol=1e-5)


def test_a_program_that_nothing_refers_to_is_collected() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        nn.Linear(4, 2)(fluid.layers.data("x", [4]))
    alive = weakref.ref(main)
    del main
    gc.collect()
    assert alive() is None


def test_a_view_that_shall_live_on_becomes_a_copy() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [2, 3], "float64")
        x.stop_gradient = False
        doubled = x * 2.0
        turned = fluid.layers.transpose(doubled, [1, 0])
        before = turned + 1.0
        turned.persistable = True
        fluid.layers.assign(doubled * 100.0, doubled)
        loss = fluid.layers.reduce_sum(turned * turned) + fluid.layers.reduce_sum(before)
        fluid.append_backward(loss)
    assert fluid.Program.parse(str(main)) == main
    value = np.arange(6.0).reshape(2, 3)
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    found = exe.run(main, {"x": value}, [turned, before, "x@GRAD"], scope=scope)
    for got, wanted in zip(found, (2.0 * value.T, 2.0 * value.T + 1.0, 8.0 * value + 2.0), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.array(scope.find_var(turned.name)), 2.0 * value.T)
