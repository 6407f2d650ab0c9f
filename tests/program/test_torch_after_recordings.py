"""Torch is as it was once the last recording has ended: every name, every setting, and what its functions give."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.program.torch_state import differences, is_patched, recorded, state
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.program.record.context import _Default

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_recording_of_other_tests() -> None:
    for end in list(_Default.recordings.values()):
        end()


@contextmanager
def torch_stays() -> Iterator[None]:
    """Fail if torch differs after the block; what torch and Penstock load late is loaded before."""
    recorded()
    before = state()
    yield
    assert differences(before, state()) == []


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """How torch differs in a new process, after a recording under a guard, and one of the default Programs."""
    argv = [sys.executable, "-m", "tests.program.torch_state"]
    ended = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_importing_and_recording_leave_torch_as_it_was(fresh: dict[str, Any]) -> None:
    assert fresh["guard"] == []


def test_default_programs_are_recorded_until_main_runs(fresh: dict[str, Any]) -> None:
    assert fresh["patched"] == [True, True, False] * 2
    assert fresh["defaults"] == []


def guarded() -> Any:
    return fluid.program_guard(Program(seed=1), Program(seed=1))


def test_torch_is_patched_within_a_guard_alone() -> None:
    with torch_stays(), guarded():
        assert is_patched()
    assert not is_patched()


class Fails(nn.Module):
    def forward(self, x: Any) -> Any:
        raise KeyError("of the script")


def test_recording_that_an_error_ends_leaves_torch_as_it_was() -> None:
    with torch_stays():
        with pytest.raises(KeyError, match="of the script"), guarded():
            nn.Sequential(nn.Linear(4, 4), Fails())(fluid.layers.data("x", [4]))
        assert not is_patched()


def test_recording_leaves_the_generator_of_torch_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    with guarded():
        x = fluid.layers.data("x", [4])
        fluid.layers.fc(fluid.layers.dropout(module(x) + torch.zeros(x.shape[0], 4), 0.5), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_inner_guard_leaves_the_outer_one_recording() -> None:
    main = Program(seed=1)
    with torch_stays(), fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data("x", [4])
        with guarded():
            recorded()
        nn.Linear(4, 2)(x)
    assert "linear_0.weight" in main.variables


def test_thread_goes_on_recording_when_another_has_ended() -> None:
    begun, ended = threading.Event(), threading.Event()
    found: list[Program] = []

    def record() -> None:
        main = Program(seed=1)
        with fluid.program_guard(main, Program(seed=1)):
            x = fluid.layers.data("x", [4])
            begun.set()
            assert ended.wait(60)
            nn.Linear(4, 2)(x + torch.zeros(x.shape[0], 4))
        found.append(main)

    with torch_stays():
        thread = threading.Thread(target=record)
        with guarded():
            thread.start()
            assert begun.wait(60)
        ended.set()
        thread.join()
    assert "linear_0.weight" in found[0].variables


@pytest.mark.parametrize("call", [nn.Linear(4, 2), nn.Sequential(nn.ReLU())])
def test_module_is_refused_after_the_recording(call: Callable[[Any], Any]) -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data("x", [4])
    with pytest.raises(ProgramError, match=r"module (Linear|Sequential) is called .* fluid\.program_guard\(program\)"):
        call(x)
    with fluid.program_guard(main, Program(seed=1)):
        call(x)


def test_name_that_is_replaced_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    with guarded():
        wrapped = torch.ones

        def theirs(*sizes: int) -> Any:
            made.append(sizes)
            return wrapped(*sizes)

        monkeypatch.setattr(torch, "ones", theirs)
    assert torch.ones is theirs
    assert torch.ones(2).tolist() == [1.0, 1.0]
    assert made == [(2,)]
