"""`py_func`: functions of Python within a Program, with gradients, replicas and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ArgumentError, OperatorError, ProgramError, UserError
from penstock.program.layers import python_functions

L = fluid.layers
X = np.random.default_rng(4).normal(size=(5, 3))


def tmp(name: str, shape: Sequence[int], dtype: str = "float64") -> Any:
    return fluid.default_main_program().current_block().create_var(name=name, dtype=dtype, shape=list(shape))


class Built:
    """A Program of one input x [-1, 3], on one replica or several."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.main, startup, self.scope, self.exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
        with fluid.program_guard(self.main, startup):
            self.x = fluid.data("x", [None, 3], "float64")
            self.made = build(self.x)
        self.exe.run(startup, scope=self.scope)

    def run(self, fetches: list[Any], replicas: int = 1, x: np.ndarray = X) -> list[np.ndarray]:
        program: Any = self.main
        if replicas > 1:
            program = fluid.CompiledProgram(program).with_data_parallel(places=fluid.cpu_places(replicas))
        return [np.asarray(v) for v in self.exe.run(program, {"x": x}, fetches, scope=self.scope)]


def tanh_net(skips: bool) -> Callable[[Any], list[Any]]:
    def backward(*given: Any) -> Any:
        y, dy = (np.array(value) for value in given[-2:])
        assert len(given) == (2 if skips else 3)
        return dy * (1 - y * y)

    def build(x: Any) -> list[Any]:
        hidden = L.fc(x, 4, param_attr="w", bias_attr=False)
        out = tmp("out", hidden.shape)
        made = L.py_func(np.tanh, hidden, out, backward, hidden if skips else None)
        assert made is out
        loss = L.reduce_sum(made * made)
        fluid.append_backward(loss)
        return [out, loss, "w@GRAD"]

    return build


@pytest.mark.parametrize("skips", [True, False])
def test_values_and_gradients_equal_torch(skips: bool) -> None:
    built = Built(tanh_net(skips))
    weight = torch.tensor(np.array(built.scope.find_var("w")), requires_grad=True)
    wanted = torch.tanh(torch.tensor(X) @ weight)
    loss = (wanted * wanted).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    out, total, grad = built.run(built.made)
    np.testing.assert_allclose(out, wanted.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(total.item(), loss.item(), rtol=1e-12)
    assert weight.grad is not None
    np.testing.assert_allclose(grad, weight.grad.numpy(), rtol=1e-12)


def test_each_replica_calls_with_its_own_rows() -> None:
    rows: list[int] = []

    def doubled(value: Any) -> np.ndarray:
        rows.append(len(np.array(value)))
        return np.array(value) * 2

    built = Built(lambda x: L.py_func(doubled, x, tmp("twice", [-1, 3])))
    np.testing.assert_array_equal(built.run([built.made], replicas=2)[0], X * 2)
    assert sorted(rows) == [2, 3]


def test_several_variables_and_gradients_of_some() -> None:
    seen: list[Any] = []

    def forward(a: Any, b: Any) -> Any:
        return np.array(a) + np.array(b), (np.array(a) > 0).sum(1).astype("int64")

    def backward(*given: Any) -> Any:
        seen.append(given[-1])
        return np.array(given[-2]), None

    def build(x: Any) -> list[Any]:
        x.stop_gradient = False
        other = x * 3.0
        total, count = L.py_func(forward, [x, other], (tmp("s", [-1, 3]), tmp("n", [-1], "int64")), backward)
        fluid.append_backward(L.reduce_sum(total * total))
        return [total, count, "x@GRAD"]

    built = Built(build)
    total, count, grad = built.run(built.made)
    np.testing.assert_allclose(total, X * 4)
    assert count.tolist() == (X > 0).sum(1).tolist()
    np.testing.assert_allclose(grad, 8 * X), "that of x alone: the second is None"
    assert seen == [None], "counts have no gradient"


def test_a_function_without_results_is_called_in_each_run() -> None:
    seen: list[list[int]] = []
    built = Built(lambda x: (L.py_func(lambda value: seen.append(value.shape()), x, None), x * 2.0)[1])
    for _ in range(2):
        built.run([built.made])
    assert seen == [[5, 3], [5, 3]]


def test_without_a_backward_function_gradients_end() -> None:
    def build(x: Any) -> Any:
        hidden = L.fc(x, 3, param_attr="w", bias_attr=False)
        made = L.py_func(np.abs, hidden, tmp("a", hidden.shape))
        fluid.append_backward(L.reduce_sum(hidden) + L.reduce_sum(made))

    built = Built(build)
    np.testing.assert_allclose(built.run(["w@GRAD"])[0], np.repeat(X.sum(0)[:, None], 3, 1))


def _fails(_value: Any) -> Any:
    raise KeyError("key")


def test_what_a_function_returns_is_checked() -> None:
    wrong: list[tuple[Callable[[Any], Any], str]] = [
        (lambda value: np.zeros((2, 3)), r"returns float64\[2, 3\]; value 0 is expected to be float64\[5, 3\]"),
        (lambda value: np.zeros((5, 3), "f"), r"returns float32\[5, 3\]"),
        (lambda value: None, "returns 0 values for 1 variables"),
        (_fails, r"'_fails' of py_func has raised KeyError: 'key' \(.*test_python_functions\.py:\d+\)"),
    ]
    for function, problem in wrong:
        built = Built(partial(_checked, function))
        expected = r"py_func_0.*test_python_functions\.py:\d+.*" + problem.replace("5", r"\d")
        for replicas in (1, 2):
            with pytest.raises(OperatorError, match=expected):
                built.run([built.made], replicas)


def _checked(function: Callable[[Any], Any], x: Any) -> Any:
    return L.py_func(function, x, tmp("y", [-1, 3]))


def test_what_cannot_be_recorded_is_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, ragged = fluid.data("x", [None, 3]), fluid.data("r", [None, 3], lod_level=1)
        with pytest.raises(ArgumentError, match="'r' is ragged"):
            L.py_func(np.abs, ragged, tmp("a", [-1, 3]))
        with pytest.raises(ArgumentError, match="expected variables"):
            L.py_func(np.abs, "x", None)
        with pytest.raises(ArgumentError, match="3 is no function"):
            L.py_func(3, x, None)
        with pytest.raises(ProgramError, match=r"has \['aten_mul_0\.tmp_0'\]; expected some of \['x', 'b'\]"):
            L.py_func(np.abs, x, tmp("b", [-1, 3]), np.abs, x * 2)
        with pytest.raises(ProgramError, match="give them by create_var"):
            L.py_func(np.abs, x, tmp("c", [-1, 3, -1]))


def test_a_function_in_a_block_is_called_and_not_saved(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        def doubled() -> Any:
            return L.py_func(lambda value: np.array(value) * 2, x, tmp("o", [-1, 3]))

        return L.cond(L.reduce_sum(x) > 0, doubled, lambda: x * 1.0)

    built = Built(build)
    np.testing.assert_array_equal(built.run([built.made], x=np.abs(X))[0], np.abs(X) * 2)
    np.testing.assert_array_equal(built.run([built.made], x=-np.abs(X))[0], -np.abs(X))
    with pytest.raises(UserError, match="calls a function of this process"):
        fluid.io.save_inference_model(str(tmp_path / "m"), ["x"], [built.made], built.exe, built.main)


def test_a_program_of_another_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(lambda x: L.py_func(np.tanh, x, tmp("t", [-1, 3])))
    with pytest.raises(UserError, match="calls a function of this process"):
        fluid.io.save_inference_model(str(tmp_path / "m"), ["x"], [built.made], built.exe, built.main)
    parsed = fluid.Program.parse(str(built.main))
    np.testing.assert_allclose(built.exe.run(parsed, {"x": X}, ["t"])[0], np.tanh(X))
    monkeypatch.setattr(python_functions, "_functions", {})
    with pytest.raises(OperatorError, match="'tanh' of py_func is in the process that recorded it alone"):
        built.exe.run(parsed, {"x": X}, ["t"])
