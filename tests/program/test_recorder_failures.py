"""A call that fails leaves no trace, and losses that share a forward pass are trained, or refused before a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.scope import Scope

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Branches(nn.Module):
    """Records a product, then asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        found = self.inner(x) + self.table((x[:, 0] > 0).long())
        return found if found.sum().item() > 0 else x


def recorded(program: Program) -> tuple[Any, ...]:
    return list(program.operators), dict(program.variables), dict(program.captured)


def test_a_module_that_fails_leaves_no_trace() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    module = Branches()
    with fluid.program_guard(main, startup):
        x: Any = fluid.layers.data("x", [4])
        before = recorded(main), recorded(startup)
        with pytest.raises(ProgramError, match="reads a value back into Python"):
            module(x)
        assert (recorded(main), recorded(startup)) == before
        loss = module.inner(x).mean()
        fluid.optimizer.SGD(0.1).minimize(loss)
    scope = Scope()
    fluid.Executor().run(startup, scope=scope)
    fluid.Executor().run(main, {"x": ROWS}, [loss], scope=scope)


def test_a_call_that_fails_half_way_leaves_no_trace() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x: Any = fluid.layers.data("x", [4])
        other = x + torch.ones(4)
        before = recorded(main), recorded(startup)
        with pytest.raises(RuntimeError):
            torch.nn.functional.cosine_embedding_loss(x, other, torch.ones(3))
        assert (recorded(main), recorded(startup)) == before


def test_a_backward_pass_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        loss = fluid.layers.fc(fluid.layers.data("x", [4]), 1).mean()
        before = recorded(main), recorded(startup)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.program.training.backward._pair", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                fluid.append_backward(loss)
        assert (recorded(main), recorded(startup)) == before
        fluid.append_backward(loss)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_two_losses_sharing_a_forward_pass_train_like_torch() -> None:
    torch.manual_seed(0)
    body, left, right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def losses(x: Any) -> tuple[Any, Any]:
        shared = torch.tanh(body(x))
        return left(shared).mean(), (right(shared) ** 2).mean()

    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        first, second = losses(fluid.layers.data("x", [4]))
        rule = fluid.optimizer.SGD(0.5)
        pairs = rule.backward(first, parameter_list=["linear_1.weight", "linear_0.bias"])
        pairs += rule.backward(second, parameter_list=["linear_0.weight", "linear_2.weight"])
        rule.apply_gradients(pairs)
    scope = Scope()
    fluid.Executor().run(startup, scope=scope)
    fluid.Executor().run(main, {"x": ROWS}, scope=scope)
    eager = losses(torch.from_numpy(ROWS))
    for value, module, name in (
        (eager[0], left, "linear_1.weight"),
        (eager[1], body, "linear_0.weight"),
        (eager[1], right, "linear_2.weight"),
    ):
        (grad,) = torch.autograd.grad(value, [module.weight], retain_graph=True)
        torch.testing.assert_close(scope.find(name), module.weight.detach() - 0.5 * grad)


def test_a_backward_pass_over_updated_parameters_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        shared = fluid.layers.fc(fluid.layers.data("x", [4]), 4, param_attr="body")
        out = fluid.layers.fc(shared, 1, param_attr="head")
        fluid.optimizer.SGD(0.1).minimize(out.mean(), parameter_list=["head"])
        fluid.optimizer.SGD(0.1).minimize((out * out).mean(), parameter_list=["body"])
    assert caplog.text.count("reads 'head' as the update of another loss has left it") == 1
    assert "test_recorder_failures.py:" in caplog.text


def test_a_checkpointed_block_raises_its_own_error() -> None:
    def block(x: Any) -> Any:
        raise LookupError("the block's own")

    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.layers.data("x", [4])
        with pytest.raises(LookupError, match="the block's own"):
            checkpoint(block, x, use_reentrant=False)
