"""A Variable that is used after its recording has ended opens it again, until its Program runs or is guarded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.program.torch_state import is_patched
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.program.record import context
from penstock.program.record.variable import Variable

FEED = {"x": np.ones((3, 4), "float32")}


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Program]:
    """New default Programs, and no recording."""
    for end in list(context._Default.recordings.values()):
        end()
    main, startup = Program(seed=1), Program(seed=1)
    monkeypatch.setattr(context._Default, "main", main)
    monkeypatch.setattr(context._Default, "startup", startup)
    return main, startup


def run(program: Program, *fetches: Any) -> list[Any]:
    found: list[Any] = fluid.Executor(fluid.CPUPlace()).run(
        program, feed=FEED if program.feeds() else {}, fetch_list=list(fetches), scope=fluid.Scope()
    )
    return found


def guarded_input() -> tuple[Program, Any]:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data("x", [4])
    assert not is_patched()
    return main, x


def test_startup_program_runs_within_the_recording(defaults: tuple[Program, Program]) -> None:
    main, startup = defaults
    x = fluid.layers.data("x", [4])
    run(startup)
    assert isinstance(nn.Linear(4, 2)(x), Variable)
    made = [torch.zeros(x.shape[0], 3), torch.arange(x.shape[0]), torch.eye(x.shape[0])]
    assert [value.shape for value in run(main, *made)] == [(3, 3), (3,), (3, 3)]
    assert not is_patched()


def test_compiled_program_ends_the_recording(defaults: tuple[Program, Program]) -> None:
    y = fluid.layers.data("x", [4]) * 2.0
    compiled = fluid.CompiledProgram(defaults[0])
    fluid.Executor(fluid.CPUPlace()).run(compiled, feed=FEED, fetch_list=[y], scope=fluid.Scope())
    assert not is_patched()


FACTORIES: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: torch.zeros(x.shape[0], 3),
    "arange": lambda x: torch.arange(x.size(0)),
    "eye": lambda x: torch.eye(x.size()[0]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_size_opens_the_recording_of_its_program(name: str) -> None:
    main, x = guarded_input()
    made = FACTORIES[name](x)
    assert isinstance(made, Variable)
    assert run(main, made)[0].shape[0] == 3
    assert not is_patched()


def test_size_opens_the_default_recording_again(defaults: tuple[Program, Program]) -> None:
    x = fluid.layers.data("x", [4])
    for _ in range(2):
        made = torch.arange(x.shape[0])
        assert run(defaults[0], made)[0].tolist() == [0, 1, 2]
        assert not is_patched()


USES: dict[str, Callable[[Any], Any]] = {
    "torch function": torch.relu,
    "method": lambda x: x.sum(),
    "operator": lambda x: x + 1.0,
    "layer": fluid.layers.reduce_mean,
}


@pytest.mark.parametrize("name", USES)
def test_use_opens_the_recording_until_a_guard_ends(name: str) -> None:
    main, x = guarded_input()
    USES[name](x)
    assert is_patched()
    assert isinstance(nn.Linear(4, 2)(x), Variable)
    with fluid.program_guard(main):
        assert is_patched()
    assert not is_patched()


def test_layer_without_operands_opens_the_recording(defaults: tuple[Program, Program]) -> None:
    y = fluid.layers.fill_constant([1, 4], "float32", 2.0)
    assert is_patched()
    assert isinstance(nn.Linear(4, 2)(y), Variable)
    run(defaults[0])
    assert not is_patched()


def test_each_program_ends_its_own_recording() -> None:
    (one, x), (other, y) = guarded_input(), guarded_input()
    sizes = x.shape[0], y.shape[0]
    run(one)
    made = torch.zeros(sizes[1], 2)
    assert run(other, made)[0].shape == (3, 2)
    assert not is_patched()


def test_clone_under_guard_leaves_nothing_open() -> None:
    main, x = guarded_input()
    with fluid.program_guard(main.clone(for_test=True)):
        assert isinstance(torch.zeros(x.shape[0], 2), Variable)
    assert not is_patched()


def test_optimizer_leaves_the_default_recording_open(defaults: tuple[Program, Program]) -> None:
    x = fluid.layers.data("x", [4])
    fluid.optimizer.SGD(0.1).minimize(fluid.layers.fc(x, 1).mean())
    with fluid.program_guard(*defaults):
        pass
    assert isinstance(nn.Linear(4, 2)(x), Variable)


def test_size_that_is_read_changes_no_mode_of_the_user() -> None:
    main, x = guarded_input()
    with torch.device("meta"):
        made = torch.zeros(x.shape[0], 2)
    assert isinstance(made, Variable)
    assert torch.zeros(2).device.type == "cpu"
    run(main)
    assert context._state.catcher is None


class Sized(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.zeros(x.shape[0], 2)


def test_module_that_reads_a_size_alone_is_refused() -> None:
    _, x = guarded_input()
    with pytest.raises(ProgramError, match=r"module Sized is called .* fluid\.program_guard\(program\)"):
        Sized()(x)
    assert not is_patched()


def test_recording_ends_with_its_program() -> None:
    main, x = guarded_input()
    assert x.shape[1] == 4
    assert is_patched()
    del main, x
    gc.collect()
    assert not is_patched()
