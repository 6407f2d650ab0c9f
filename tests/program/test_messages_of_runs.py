"""Print and Assert: what they write, in which runs, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ArgumentError, OperatorError, ProgramError

L: Any = fluid.layers
X = np.array([[1.5, -2.0], [0.25, 1e-7]], np.float32)


def ran(build: Callable[[Any], Any], times: int = 1) -> list[np.ndarray]:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [2], stop_gradient=False)
        made = build(x)
        fluid.append_backward(L.reduce_sum(L.square(made)))
    exe, scope = fluid.Executor(), fluid.Scope()
    for _ in range(times):
        found: list[np.ndarray] = exe.run(main, {"x": X}, [made, "x@GRAD"], scope=scope)
    return found


def test_print_writes_values_and_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    value, grad = ran(lambda x: L.Print(x, message="look"))
    np.testing.assert_array_equal(value, X)
    np.testing.assert_array_equal(grad, 2 * X)
    lines = (
        "  - message: look\n  - lod: {}\n  - place: CPUPlace\n  - shape: [2, 2]\n  - layout: NCHW\n  - dtype: float\n"
    )
    first = f"Variable: x\n{lines}  - data: [1.5 -2 0.25 1e-07]\n"
    assert capsys.readouterr().out == f"{first}Variable: x@GRAD\n{lines}  - data: [3 -4 0.5 2e-07]\n"


@pytest.mark.parametrize(("phase", "names"), [("FORWARD", ["x"]), ("backward", ["x@GRAD"]), ("Both", ["x", "x@GRAD"])])
def test_print_writes_in_its_phase(capsys: pytest.CaptureFixture[str], phase: str, names: list[str]) -> None:
    ran(lambda x: L.Print(x, print_phase=phase))
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Variable: ")]
    assert found == [f"Variable: {name}" for name in names]


def test_print_leaves_parts_out(capsys: pytest.CaptureFixture[str]) -> None:
    none = {f"print_tensor_{part}": False for part in ("name", "type", "shape", "layout", "lod")}
    ran(lambda x: L.Print(x, summarize=2, print_phase="forward", **none))
    assert capsys.readouterr().out == "  - place: CPUPlace\n  - data: [1.5 -2]\n"


def test_print_writes_in_the_first_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ran(lambda x: L.Print(x, first_n=2, print_phase="forward"), times=4)
    assert capsys.readouterr().out.count("Variable: x\n") == 2


def test_print_writes_the_ends_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        L.Print(L.data("ids", [1], dtype="int64", lod_level=1), summarize=-1)
    fluid.Executor().run(main, {"ids": fluid.create_lod_tensor(np.arange(5)[:, None], [[2, 0, 3]])})
    out = capsys.readouterr().out
    assert "  - lod: {{0, 2, 2, 5}}\n" in out
    assert "  - dtype: long\n  - data: [0 1 2 3 4]\n" in out


def test_print_writes_on_a_graph_and_in_a_loop(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.Print(L.data("x", [2]))
        i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
        going = L.less_than(i, n)
        with L.While(going).block():
            L.increment(i)
            L.Print(i, message="turn")
            L.less_than(i, n, cond=going)
    compiled = fluid.CompiledProgram(main).with_data_parallel()
    fluid.Executor().run(compiled, {"x": X}, [x], scope=fluid.Scope())
    out = capsys.readouterr().out
    assert sorted(line for line in out.splitlines() if "data: [1.5" in line or "data: [0.25" in line) == [
        "  - data: [0.25 1e-07]",
        "  - data: [1.5 -2]",
    ]
    assert out.count("turn") == 6


@pytest.mark.parametrize("replicas", [0, 1])
def test_assert_ends_a_run_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, replicas: int
) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [2])
        small = L.reduce_all(L.less_than(x, L.fill_constant([1], "float32", 1.0)))
        L.Assert(L.reshape(small, [1]), [x], summarize=1)
        total = L.reduce_sum(x)
    program: Any = fluid.CompiledProgram(main).with_data_parallel() if replicas else main
    exe, scope = fluid.Executor(), fluid.Scope()
    assert float(exe.run(program, {"x": X - 1.0}, [total], scope=scope)[0]) == pytest.approx(-4.25)
    assert capsys.readouterr().out == ""
    with pytest.raises(OperatorError, match=r"the condition '.*' is \[False\]; expected one true value"):
        exe.run(program, {"x": X}, [total], scope=scope)
    assert "Variable: x\n" in (out := capsys.readouterr().out)
    assert "  - data: [1.5]\n" in out


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: L.Print(x, print_phase="late"), "print_phase is 'late'; expected one of forward, backward, both"),
        (lambda x: L.Print(3), "Print needs a variable; got 3"),
        (L.Assert, "needs a condition of one bool"),
        (lambda x: L.Assert(L.reduce_all(x > 0), [3]), r"Assert writes variables; data is \[3\]"),
    ],
)
def test_what_cannot_be_said_is_refused(build: Callable[[Any], Any], words: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = L.data("x", [2])
        with pytest.raises((ProgramError, ArgumentError), match=words):
            build(x)
