"""data_norm, continuous_value_model: values, gradients and statistics against torch float64 (1e-12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

L: Any = fluid.layers
WIDTH, EPSILON, DECAY = 6, 1e-3, 0.9
START = {"batch_size": 10.0, "batch_sum": 5.0, "batch_square": 40.0}


def rows(seed: int, n: int = 5) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=(n, WIDTH))
    found[0, 0] = found[2, 3] = 0.0  # first values of slots of three that were not shown
    return found


class Normed:
    """A Program of one data_norm, which SGD trains."""

    def __init__(self, **more: Any) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            x = L.data("x", [WIDTH], dtype="float64", stop_gradient=False)
            start = {**START, **({"scale_w": 2.0, "bias": 0.5} if more.get("enable_scale_and_shift") else {})}
            self.out = L.data_norm(x, None, EPSILON, start, summary_decay_rate=DECAY, **more)
            self.test = self.main.clone(for_test=True)
            self.loss = loss = L.reduce_sum(L.square(self.out))
            if more.get("enable_scale_and_shift"):
                fluid.optimizer.SGD(0.1).minimize(loss)
            else:
                fluid.append_backward(loss)
        self.exe = fluid.Executor()
        self.exe.run(startup, scope=self.scope)

    def step(self, x: np.ndarray) -> Any:
        return self.exe.run(self.main, {"x": x}, [self.out, "x@GRAD"], scope=self.scope)

    def value(self, name: str) -> np.ndarray:
        return np.array(self.scope.find_var(f"dn.{name}"))

    def statistics(self) -> list[np.ndarray]:
        return [self.value(name) for name in ("batch_size", "batch_sum", "batch_square_sum")]


def counted(x: np.ndarray, slot_dim: int) -> np.ndarray:
    if slot_dim <= 0:
        return np.ones_like(x)
    return np.repeat((x[:, ::slot_dim] != 0).astype(float), slot_dim, 1)


@pytest.mark.parametrize("slot_dim", [-1, 3])
@pytest.mark.parametrize("trained", [False, True])
def test_data_norm_normalises_by_what_it_has_seen(slot_dim: int, trained: bool) -> None:
    net = Normed(slot_dim=slot_dim, enable_scale_and_shift=trained)
    size, total, square = (np.full(WIDTH, value) for value in START.values())
    weight, bias = np.full(WIDTH, 2.0), np.full(WIDTH, 0.5)
    for seed in (1, 2, 3):
        x = rows(seed)
        counts = counted(x, slot_dim)
        leaf = torch.tensor(x, requires_grad=True)
        params = [torch.tensor(v, requires_grad=True) for v in (weight, bias)]
        normal = (leaf - torch.tensor(total / size)) * torch.tensor(np.sqrt(size / square))
        if trained:
            wanted = (normal * params[0] + params[1]) * torch.tensor(counts)
        else:
            wanted = normal + (normal * torch.tensor(counts) - normal).detach()
        of_x, *of_params = torch.autograd.grad(wanted.square().sum(), [leaf, *params] if trained else [leaf])
        mean = total / size
        number = counts.sum(0)
        floor = EPSILON * (number if slot_dim > 0 else 1.0)
        size = size * DECAY + (number > 0)
        total = total * DECAY + (x * counts).sum(0) / np.maximum(number, 1)
        square = square * DECAY + ((x - mean) ** 2 * counts).sum(0) / np.maximum(number, 1) + floor
        got = net.step(x)
        np.testing.assert_allclose(got[0], wanted.detach(), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(got[1], of_x, rtol=1e-12, atol=1e-13)
        for one, other in zip(net.statistics(), (size, total, square), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
        if trained:
            weight, bias = (p.detach().numpy() - 0.1 * g.numpy() for p, g in zip(params, of_params, strict=True))
            np.testing.assert_allclose(net.value("scale_w"), weight, rtol=1e-12)
            np.testing.assert_allclose(net.value("bias"), bias, rtol=1e-12)


def test_data_norm_at_rest_changes_no_statistics() -> None:
    net = Normed()
    before = net.statistics()
    x = rows(1)
    (got,) = net.exe.run(net.test, {"x": x}, [net.out], scope=net.scope)
    np.testing.assert_allclose(got, (x - 0.5) * 0.5, rtol=1e-12)
    for one, other in zip(before, net.statistics(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_norm_on_a_graph_is_that_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    alone, compiled = Normed(), Normed()
    program = fluid.CompiledProgram(compiled.main).with_data_parallel(loss_name=compiled.loss.name)
    for seed in (1, 2):
        (wanted, _) = alone.step(rows(seed))
        (got,) = compiled.exe.run(program, {"x": rows(seed)}, [compiled.out], scope=compiled.scope)
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    for one, other in zip(alone.statistics(), compiled.statistics(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_data_norm_that_cannot_be_is_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, images = L.data("x", [WIDTH]), L.data("images", [3, 4, 4])
        with pytest.raises(ProgramError, match=r"needs an input \[n, c\]"):
            L.data_norm(images)
        with pytest.raises(ProgramError, match="over the rows of a replica"):
            L.data_norm(x, sync_stats=True)
        with pytest.raises(ProgramError, match="6 columns do not divide into slots of 4"):
            L.data_norm(x, slot_dim=4)


# ---------------------------------------------------------------- continuous_value_model


@pytest.mark.parametrize("keeps", [True, False])
def test_cvm_takes_logarithms_and_gives_counts_back(keeps: bool) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [4], dtype="float64", stop_gradient=False)
        out = L.continuous_value_model(x, L.data("cvm", [2], dtype="float64"), keeps)
        fluid.append_backward(L.reduce_sum(L.square(out)))
    given, counts = np.random.default_rng(0).random((3, 4)) * 5, np.arange(6.0).reshape(3, 2)
    value, grad = fluid.Executor().run(main, {"x": given, "cvm": counts}, [out, "x@GRAD"])
    first = np.log(given[:, :1] + 1)
    heads = [first, np.log(given[:, 1:2] + 1) - first] if keeps else []
    np.testing.assert_allclose(value, np.hstack([*heads, given[:, 2:]]), rtol=1e-12)
    np.testing.assert_allclose(grad, np.hstack([counts, 2 * given[:, 2:]]), rtol=1e-12)


def test_cvm_of_ragged_rows_gives_each_row_its_samples_counts() -> None:
    main, lengths = fluid.Program(), [2, 0, 1]
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [3], dtype="float64", lod_level=1, stop_gradient=False)
        out = L.continuous_value_model(x, L.data("cvm", [2], dtype="float64"))
        fluid.append_backward(L.reduce_sum(out))
    given, counts = np.random.default_rng(0).random((3, 3)), np.arange(6.0).reshape(3, 2)
    feed = {"x": fluid.create_lod_tensor(given, [lengths]), "cvm": counts}
    (grad,) = fluid.Executor().run(main, feed, ["x@GRAD"])
    np.testing.assert_allclose(grad, np.hstack([counts[[0, 0, 2]], np.ones((3, 1))]), rtol=1e-12)


def test_cvm_needs_two_counts_a_sample() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, counts = L.data("x", [3]), L.data("cvm", [1])
        with pytest.raises(ProgramError, match=r"expected \[n, c\] and \[n, 2\]"):
            L.continuous_value_model(x, counts)
