"""ErrorClipByValue, Dpsgd and products of sizes that are known when fed, against torch float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, ProgramError

L: Any = fluid.layers


def network() -> tuple[fluid.Program, fluid.Program, Any, Any, Any]:
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 1
    with fluid.program_guard(main, startup):
        x = L.data("x", [3], dtype="float64", stop_gradient=False)
        hidden = L.fc(x, 4, act="tanh", name="hidden")
        loss = L.mean(L.square(L.fc(hidden, 2, name="out") + L.reduce_sum(hidden)))
    return main, startup, x, hidden, loss


def eager(scope: Any, x: np.ndarray, low: float, high: float) -> list[torch.Tensor]:
    names = ("hidden.w_0", "hidden.b_0", "out.w_0", "out.b_0")
    params = [torch.tensor(np.array(scope.find_var(name)), requires_grad=True) for name in names]
    leaf = torch.tensor(x, requires_grad=True)
    hidden = torch.tanh(leaf @ params[0] + params[1])
    hidden.register_hook(lambda g: g.clamp(low, high))  # type: ignore[no-untyped-call]  # torch
    loss = (hidden @ params[2] + params[3] + hidden.sum()).square().mean()
    return list(torch.autograd.grad(loss, [leaf, *params]))


X = np.random.default_rng(0).normal(size=(5, 3))
GRADS = ["x@GRAD", "hidden.w_0@GRAD", "hidden.b_0@GRAD", "out.w_0@GRAD", "out.b_0@GRAD"]


def test_an_error_clip_bounds_a_gradient_on_its_way() -> None:
    main, startup, _, hidden, loss = network()
    clip = fluid.clip.ErrorClipByValue(max=0.3, min=-0.01)
    assert str(clip) == "ByValue, min=-0.010000, max=0.300000"
    hidden.error_clip = fluid.clip.ErrorClipByValue(5.0)
    assert hidden.error_clip.min == -5.0
    hidden._set_error_clip(clip)
    with fluid.program_guard(main, startup):
        fluid.append_backward(loss)
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    for got, wanted in zip(exe.run(main, {"x": X}, GRADS, scope=scope), eager(scope, X, -0.01, 0.3), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_an_error_clip_of_a_clone_is_the_clones() -> None:
    main, startup, _, hidden, loss = network()
    clone = main.clone()
    clone.block(0).var(hidden.name)._set_error_clip(fluid.clip.ErrorClipByValue(0.001))
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    for program, bound in ((main, 1e9), (clone, 0.001)):
        with fluid.program_guard(program, startup):
            fluid.append_backward(program.block(0).var(loss.name))
        found = exe.run(program, {"x": X}, GRADS, scope=scope)
        for got, wanted in zip(found, eager(scope, X, -bound, bound), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_what_clips_nothing_is_refused() -> None:
    _, _, _, hidden, _ = network()
    with pytest.raises(ProgramError, match=r"error_clip is 0\.5; expected ErrorClipByValue"):
        hidden.error_clip = 0.5


# ---------------------------------------------------------------- Dpsgd


def steps(sigma: float, clip: float = 0.3, num: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each step the gradient of a parameter, and what it was changed by over the learning rate."""
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    main.random_seed = startup.random_seed = 4
    with fluid.program_guard(main, startup):
        loss = L.mean(L.square(L.fc(L.data("x", [3], dtype="float64"), 2, param_attr="w")))
        fluid.optimizer.Dpsgd(0.1, clip=clip, batch_size=16.0, sigma=sigma).minimize(loss)
    exe.run(startup, scope=scope)
    found = []
    for _ in range(num):
        before = np.array(scope.find_var("w"))
        (grad,) = exe.run(main, {"x": X}, ["w@GRAD"], scope=scope)
        found.append((grad, (before - np.array(scope.find_var("w"))) / 0.1))
    return found


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_dpsgd_without_noise_clips_the_norm(clip: float) -> None:
    for grad, change in steps(0.0, clip):
        np.testing.assert_allclose(change, grad / max(np.linalg.norm(grad) / clip, 1.0), rtol=1e-9, atol=1e-12)


def test_dpsgd_adds_one_number_to_a_parameter_in_each_step() -> None:
    noises = []
    for grad, change in steps(2.0, 1e6, num=40):
        noise = (change - grad) * 16.0
        assert np.ptp(noise) < 1e-9
        noises.append(noise[0, 0])
    assert len(set(np.round(noises, 9))) == 40
    assert 1.0 < np.std(noises) < 3.0  # of 2 and 40 numbers


def test_dpsgd_refuses_what_it_cannot() -> None:
    with pytest.raises(ProgramError, match=r"sigma -1\.0; expected positive ones"):
        fluid.optimizer.DpsgdOptimizer(sigma=-1.0)
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        loss = L.mean(L.embedding(L.data("ids", [1], dtype="int64"), [5, 2], is_sparse=True))
        with pytest.raises(ProgramError, match="has a sparse gradient"):
            fluid.optimizer.Dpsgd().minimize(loss)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_that_are_multiplied_are_taken_for_equal(transposed: bool) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        near = fluid.data("near", [3, -1, -1], "float64")
        rows = fluid.data("rows", [3, -1, 2], "float64")
        product = L.matmul(near, rows, transpose_x=transposed)
    draw = np.random.default_rng(1)
    feed = {"near": draw.normal(size=(3, 4, 4)), "rows": draw.normal(size=(3, 4, 2))}
    left = feed["near"].transpose(0, 2, 1) if transposed else feed["near"]
    (got,) = fluid.Executor().run(main, feed, [product])
    np.testing.assert_allclose(got, left @ feed["rows"], rtol=1e-12)
    with pytest.raises(FeedError, match="must have the same size in dimension"):
        fluid.Executor().run(main, {**feed, "rows": feed["rows"][:, :3]}, [product])


def test_multiples_of_sizes_are_taken_for_equal() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        near = fluid.data("near", [3, -1, -1], "float64")
        rows = fluid.data("rows", [3, -1, 2], "float64")
        total = L.reshape(L.matmul(near, rows), [-1, 2]) + L.reshape(rows, [-1, 2])
    draw = np.random.default_rng(1)
    feed = {"near": draw.normal(size=(3, 4, 4)), "rows": draw.normal(size=(3, 4, 2))}
    (got,) = fluid.Executor().run(main, feed, [total])
    np.testing.assert_allclose(got, (feed["near"] @ feed["rows"] + feed["rows"]).reshape(-1, 2), rtol=1e-12)
