"""What cannot be recorded raises at the user's line, and says what to write instead (DESIGN 2, rules 3, 4 and 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as fluid
from penstock.errors import FeedError, ProgramError
from penstock.program.program import Program
from penstock.scope import Scope


def record(write: Callable[[Any], Any], dtype: str = "float32") -> tuple[Program, Any]:
    """Record `write` on an input x [batch, 4]; return the program and the result."""
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        return main, write(fluid.layers.data(name="x", shape=[4], dtype=dtype))


def line_of(write: Callable[[Any], Any]) -> str:
    return f"test_recorder_refusals.py:{write.__code__.co_firstlineno}"


class Draws(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.rand(4)


PINNED = [
    lambda x: x.reshape(int(x.shape[0]) * 4),
    lambda x: [x[i] for i in range(x.shape[0])],
    lambda x: x * float(x.shape[0]),
    lambda x: x.reshape(int(x.shape[0] * 4)),
]
NO_NUMBER = [
    lambda x: x * len(x),
    lambda x: float(x.sum()),
    lambda x: int(x.sum()),
    lambda x: [row * 2 for row in x],
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: np.asarray(x) + 1,
    lambda x: x if x.sum() > 0 else -x,
]
DATA_DEPENDENT = [
    lambda x: x.nonzero(),
    lambda x: torch.unique(x) + 1,
    lambda x: x[x > 0],
    lambda x: torch.masked_select(x, x > 0),
    lambda x: x.sum().item(),
]
COUNTED = [lambda x: x.split(2), lambda x: x.chunk(2), lambda x: x.unbind(0)]
GLOBAL_GENERATOR = [
    lambda x: x + torch.randn_like(x),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: x.uniform_(0, 1),
    lambda x: torch.multinomial(x.abs(), 1),
    lambda x: Draws()(x) + 1,
]
NOT_YET = [
    lambda x: F.rrelu(x, training=True),
    lambda x: F.alpha_dropout(x, training=True),
]


def refused(write: Callable[[Any], Any]) -> str:
    with pytest.raises(ProgramError) as caught:
        record(write)
    return str(caught.value)


@pytest.mark.parametrize("write", PINNED)
def test_a_line_that_pins_the_batch_is_refused(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert text.startswith(line_of(write))
    assert "turns the batch size into the number" in text
    assert "use x.shape[0] itself" in text


@pytest.mark.parametrize("write", NO_NUMBER)
def test_a_variable_is_no_number(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert text.startswith(line_of(write))
    assert "Fetch its value from run()" in text or "Use torch.where" in text


@pytest.mark.parametrize("write", DATA_DEPENDENT)
def test_sizes_and_values_that_depend_on_data_are_refused(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert text.startswith(line_of(write))
    assert "torch.where" in text


@pytest.mark.parametrize("write", COUNTED)
def test_a_split_of_the_batch_is_refused(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert text.startswith(line_of(write))
    assert "as many tensors as the batch has rows or parts" in text


@pytest.mark.parametrize("write", GLOBAL_GENERATOR)
def test_the_global_generator_is_refused(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert "test_recorder_refusals.py:" in text
    assert "draws from torch's global generator" in text
    assert "torch.nn.functional.dropout" in text


@pytest.mark.parametrize("write", NOT_YET)
def test_what_is_not_supported_yet_names_an_alternative(write: Callable[[Any], Any]) -> None:
    text = refused(write)
    assert text.startswith(line_of(write))
    assert "cannot be recorded yet; " in text


def test_a_refusal_leaves_the_program_usable() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x: Any = fluid.layers.data(name="x", shape=[4])
        refusals: list[Callable[[Any], Any]] = [*PINNED, *DATA_DEPENDENT]
        for write in refusals:
            with pytest.raises(ProgramError):
                write(x)
        out = torch.tanh(x.reshape(x.shape[0] * 2, 2))
    (got,) = fluid.Executor().run(main, {"x": np.zeros((3, 4), "float32")}, [out], scope=Scope())
    assert got.shape == (6, 2)


def test_variables_of_two_programs_do_not_mix() -> None:
    _, left = record(lambda x: x)
    _, right = record(torch.tanh)
    with pytest.raises(
        ProgramError, match=r"test_recorder_refusals\.py:\d+: 'aten_tanh_0.tmp_0' belongs to another program"
    ):
        torch.add(left, right)


def branched(x: Any) -> Any:
    if x.shape[0] > 4:
        return x * 2.0
    return x * 3.0


def test_a_branch_on_the_batch_is_a_guard_checked_when_fed() -> None:
    main, out = record(branched)
    line = branched.__code__.co_firstlineno + 1
    assert [(str(g), g.source) for g in main.guards] == [("s0 > 4", f"test_recorder_refusals.py:{line}")]
    exe = fluid.Executor()
    (got,) = exe.run(main, {"x": np.ones((5, 4), "float32")}, [out], scope=Scope())
    assert (got == 2).all()
    with pytest.raises(
        FeedError, match=rf"test_recorder_refusals\.py:{line}: .* with s0 > 4, but this feed has 4 and 4"
    ):
        exe.run(main, {"x": np.ones((4, 4), "float32")}, [out], scope=Scope())


def one_row(x: Any) -> Any:
    scaled = F.mse_loss(x, x * 2.0) + (x + x[:1])  # torch asks itself whether there is one row; that is no guard
    if x.shape[0] == 1:
        return scaled * 0.0
    return scaled * 2.0


def test_a_branch_on_one_row_is_a_guard_but_torchs_own_are_not() -> None:
    main, out = record(one_row)
    line = f"test_recorder_refusals.py:{one_row.__code__.co_firstlineno + 2}"
    assert [(str(g), g.source) for g in main.guards] == [("s0 != 1", line)]
    with pytest.raises(FeedError, match=line):
        fluid.Executor().run(main, {"x": np.ones((1, 4), "float32")}, [out], scope=Scope())


def test_the_same_pin_is_refused_again_after_a_refusal() -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x: Any = fluid.layers.data(name="x", shape=[4])
        for _ in range(3):
            with pytest.raises(ProgramError, match="turns the batch size into the number"):
                x.reshape(int(x.shape[0]) * 4)


def test_a_table_that_is_no_leaf_cannot_be_looked_up_sparsely() -> None:
    table = nn.Parameter(torch.ones(10, 3))
    text = refused(lambda x: F.embedding(x.long(), table * 2, sparse=True))
    assert "eager operations" in text

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(10, 3))

        def forward(self, x: Any) -> Any:
            return F.embedding(x.long(), self.table * 2, sparse=True)

    text = refused(Scaled())
    assert "test_recorder_refusals.py:" in text
    assert "use sparse=False for a computed table" in text


def test_a_distributed_table_that_is_used_densely_too_is_refused() -> None:
    def tied(x: Any) -> Any:
        rows = fluid.layers.embedding(x.long(), [10, 4], is_sparse=True, is_distributed=True, param_attr="shared")
        scores = rows.sum(1) @ rows.program.handle("shared").T
        return fluid.append_backward(fluid.layers.mean(scores))

    text = refused(tied)
    assert "table 'shared'" in text
    assert "is_distributed=False" in text


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    text = refused(lambda x: fluid.append_backward(fluid.layers.fc(x, 2)))
    assert "needs a scalar loss" in text
    assert "Take its mean or sum first" in text


def test_a_loss_without_a_parameter_is_run_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [2])
        fluid.layers.fc(x, 3)  # its parameters are not the loss's
        loss = fluid.layers.mean(x)
        assert fluid.optimizer.Adam(0.1).minimize(loss) == ([], [])
    assert "depends on no trainable parameter, so nothing is learned" in caplog.text
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    whole = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name, places=[fluid.CPUPlace()] * 2)
    for program in (main, whole):
        assert np.mean(exe.run(program, {"x": np.full((4, 2), 3.0, "float32")}, [loss], scope=scope)) == 3.0
