"""Mixed precision: numbers against torch eager with the same casts, the factor of the loss against its rule in Python.

bfloat16 products of the same operands by the same kernel, added up in float32: 1e-6 relative, as of float32 sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock as fluid
from penstock.errors import SpecError
from penstock.program.operator_types import fluid_type
from penstock.program.precision.decorator import decorate
from penstock.program.precision.lists import AutoMixedPrecisionLists

L: Any = fluid.layers
LR = 0.1


class Net:
    """A convolution and two fc with SGD."""

    def __init__(self, optimizer: Any = None, **more: Any) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = self.startup.random_seed = 3
        with fluid.program_guard(self.main, self.startup):
            x, y = L.data("x", [1, 6, 6]), L.data("y", [1], dtype="int64")
            hidden = L.fc(L.conv2d(x, 3, 3, act="relu", name="conv"), 5, act="tanh", name="fc")
            self.loss = L.mean(L.softmax_with_cross_entropy(L.fc(hidden, 4, name="out"), y))
            self.test = self.main.clone(for_test=True)
            self.optimizer = decorate(optimizer or fluid.optimizer.SGD(LR), **more)
            self.optimizer.minimize(self.loss)
        self.exe = fluid.Executor()
        self.exe.run(self.startup, scope=self.scope)

    def step(self, feed: dict[str, np.ndarray], program: Any = None) -> float:
        (loss,) = self.exe.run(program or self.main, feed, [self.loss], scope=self.scope)
        return float(np.mean(loss))

    def values(self) -> dict[str, torch.Tensor]:
        return {p.name: torch.tensor(np.array(self.scope.find_var(p.name))) for p in self.main.all_parameters()}

    def factor(self) -> float:
        return float(np.array(self.scope.find_var(self.optimizer.get_loss_scaling().name))[0])

    def halves(self) -> list[str]:
        """Fluid's types of the operators that make half variables, casts left out."""
        made = self.main.variables
        return [
            fluid_type(op)
            for op in self.main.operators
            if any(made[n].dtype in ("bfloat16", "float16") for n in op.output_names()) and "_to_copy" not in op.type
        ]


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(6, 1, 6, 6)).astype(np.float32), "y": draw.integers(0, 4, (6, 1))}


def eager(values: dict[str, torch.Tensor], feed: dict[str, np.ndarray], half: torch.dtype) -> torch.Tensor:
    """The loss by torch, whose products and convolution compute in half precision."""

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = values[f"{name}.b_0"]  # its gradient, a sum, is one of float32
        low = torch.addmm(bias.detach().to(half), x.to(half), values[f"{name}.w_0"].to(half))
        return low.float() + (bias - bias.detach())

    image, weight, bias = torch.tensor(feed["x"]), values["conv.w_0"], values["conv.b_0"]
    hidden = F.conv2d(image.to(half), weight.to(half), bias.to(half)).float().relu().flatten(1)
    return F.cross_entropy(product(product(hidden, "fc").tanh(), "out"), torch.tensor(feed["y"][:, 0]))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_and_convolutions_compute_in_half_precision(half: str) -> None:
    net = Net(dtype=half, init_loss_scaling=8.0)
    for seed in range(3):
        values = {name: value.requires_grad_(True) for name, value in net.values().items()}
        wanted = eager(values, batch(seed), getattr(torch, half))
        grads = torch.autograd.grad(wanted * 8.0, list(values.values()))
        np.testing.assert_allclose(net.step(batch(seed)), wanted.item(), rtol=1e-6)
        new = net.values()
        for (name, old), grad in zip(values.items(), grads, strict=True):
            np.testing.assert_allclose(new[name], old.detach() - LR * grad / 8.0, rtol=1e-5, atol=1e-6, err_msg=name)


def test_only_white_operators_and_their_gradients_are_rewritten() -> None:
    net = Net()
    assert set(net.halves()) == {"conv2d", "mul", "conv2d_grad", "mul_grad"}
    parameters = {p.name for p in net.main.all_parameters()}
    assert {net.main.variables[name].dtype for name in parameters} == {"float32"}
    assert {net.main.variables[f"{name}@GRAD"].dtype for name in parameters} == {"float32"}


def test_an_operand_is_cast_once() -> None:
    net = Net()
    casts = [op.input_names()[0] for op in net.main.operators if op.type == "aten._to_copy.default"]
    to_half = [n for n in casts if net.main.variables[n].dtype == "float32"]
    assert len(to_half) == len(set(to_half))


def test_lists_move_operators() -> None:
    def halves(**more: Any) -> set[str]:
        return set(Net(amp_lists=AutoMixedPrecisionLists(**more)).halves())

    assert halves(custom_black_list={"mul"}) == {"conv2d", "conv2d_grad"}
    assert halves(custom_white_list={"tanh"}) >= {"mul", "tanh", "tanh_grad"}
    without = Net(amp_lists=AutoMixedPrecisionLists(custom_black_varnames={"fc.w_0"}))
    assert len([kind for kind in without.halves() if kind == "mul"]) == 1
    with pytest.raises(SpecError, match="mul in custom_white_list and in custom_black_list"):
        AutoMixedPrecisionLists({"mul"}, {"mul"})


def test_lists_hold_what_fluids_do() -> None:
    lists = AutoMixedPrecisionLists({"tanh", "softmax"}, {"conv2d"})
    assert lists.white_list == {"matmul", "mul", "tanh", "softmax"}
    assert "conv2d" in lists.black_list
    assert not {"tanh", "softmax"} & (lists.gray_list | lists.black_list)


def test_a_clone_from_before_computes_in_float32() -> None:
    net = Net()
    assert {v.dtype for v in net.test.variables.values()} == {"float32", "int64"}
    after = net.main.clone(for_test=True)
    assert "bfloat16" in {v.dtype for v in after.variables.values()}
    np.testing.assert_allclose(net.step(batch(), net.test), net.step(batch(), after), rtol=2e-2)


def test_a_program_in_half_precision_is_read_from_its_text() -> None:
    net = Net()
    values = net.values()
    before = net.step(batch())
    for name, value in values.items():
        net.scope.find_var(name).get_tensor().set(value)
    assert net.step(batch(), fluid.Program.parse(str(net.main))) == before


# ---------------------------------------------------------------- the factor of the loss

FINITE, INFINITE = batch(), {**batch(), "x": np.full((6, 1, 6, 6), np.inf, np.float32)}


def follow(runs: list[bool], first: float, incr: int, decr: int) -> list[float]:
    """What fp16_utils.update_loss_scaling does to the factor."""
    factor, good, bad, found = first, 0, 0, []
    for finite in runs:
        if finite:
            grows = incr < good + 1
            factor, good, bad = (factor * 2.0, 0, 0) if grows else (factor, good + 1, 0)
        else:
            shrinks = decr < bad + 1
            factor, good, bad = (max(factor * 0.8, 1.0), 0, 0) if shrinks else (factor, 0, bad + 1)
        found.append(factor)
    return found


@pytest.mark.parametrize("first", [1024.0, 1.5])
def test_the_factor_follows_the_gradients(first: float) -> None:
    runs = [
        True,
        True,
        True,
        False,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    net = Net(init_loss_scaling=first, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
    got = []
    for finite in runs:
        net.step(FINITE if finite else INFINITE)
        got.append(net.factor())
    np.testing.assert_allclose(got, follow(runs, first, 2, 1), rtol=1e-6)


def test_runs_with_infinite_gradients_change_no_parameter() -> None:
    net = Net()
    before = net.values()
    net.step(INFINITE)
    for name, value in net.values().items():
        assert torch.equal(value, before[name]), name


def test_the_factor_does_not_grow_beyond_float32() -> None:
    net = Net(init_loss_scaling=2.0**127, incr_every_n_steps=1, incr_ratio=4.0)
    for _ in range(3):
        net.step({**FINITE, "x": np.zeros((6, 1, 6, 6), np.float32)})
    assert np.isfinite(net.factor())


def test_a_fixed_factor_stays() -> None:
    net = Net(init_loss_scaling=64.0, use_dynamic_loss_scaling=False)
    net.step(FINITE)
    assert net.factor() == 64.0
    assert not [name for name in net.main.variables if "num_good_steps" in name]


def test_small_gradients_of_float16_survive_by_the_factor() -> None:
    def moved(factor: float) -> float:
        main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
        with fluid.program_guard(main, startup):
            weight = fluid.ParamAttr("w", fluid.initializer.Constant(1.0))
            loss = L.mean(L.fc(L.data("x", [1]), 1, param_attr=weight, bias_attr=False)) * 1e-7
            sgd = fluid.optimizer.SGD(1.0)
            decorate(sgd, init_loss_scaling=factor, use_dynamic_loss_scaling=False, dtype="float16").minimize(loss)
        exe.run(startup, scope=scope)
        grad = exe.run(main, {"x": np.full((4, 1), 0.25, np.float32)}, ["w@GRAD"], scope=scope)[0]
        return float(grad.item()) / factor

    assert moved(1.0) == 0.0
    assert abs(moved(2.0**15) / 2.5e-8 - 1) < 1e-2


# ---------------------------------------------------------------- replicas, sparse gradients, fleet


@pytest.mark.parametrize("reduce", [False, True])
def test_replicas_train_as_one_does(monkeypatch: pytest.MonkeyPatch, reduce: bool) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    alone, shared = Net(), Net()
    build = fluid.BuildStrategy()
    if reduce:
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    program = fluid.CompiledProgram(shared.main).with_data_parallel(shared.loss.name, build)
    for feed in (batch(1), INFINITE, batch(2)):
        one, other = alone.step(feed), shared.step(feed, program)
        assert (np.isnan(one) and np.isnan(other)) or abs(one - other) < 1e-2
    assert alone.factor() == shared.factor()
    for name, value in shared.values().items():
        np.testing.assert_allclose(value, alone.values()[name], rtol=2e-2, atol=2e-3)


def test_sparse_gradients_are_divided_before_they_are_clipped() -> None:
    def trained(factor: float) -> list[np.ndarray]:
        main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
        startup.random_seed = 1
        with fluid.program_guard(main, startup):
            rows = L.embedding(L.data("ids", [1], dtype="int64"), [8, 4], is_sparse=True, param_attr="table")
            loss = L.mean(L.square(L.fc(rows, 2, param_attr="w") * 100.0))
            clip = fluid.clip.GradientClipByGlobalNorm(0.5)
            optimizer: Any = fluid.optimizer.SGD(0.1, grad_clip=clip)
            if factor:
                optimizer = decorate(optimizer, init_loss_scaling=factor)
            optimizer.minimize(loss)
        exe.run(startup, scope=scope)
        for _ in range(3):
            exe.run(main, {"ids": np.array([[1], [1], [5]])}, scope=scope)
        return [np.array(scope.find_var(name)) for name in ("table", "w")]

    for one, other in zip(trained(0.0), trained(1024.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


def test_an_optimizer_around_another_is_decorated() -> None:
    plain = Net()
    around = fluid.optimizer.RecomputeOptimizer(fluid.optimizer.SGD(LR))
    around._set_checkpoints([])
    wrapped = Net(around)
    assert plain.step(batch()) == wrapped.step(batch())
    assert torch.equal(plain.values()["fc.w_0"], wrapped.values()["fc.w_0"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": 0.1}, "decorate is given 0.1; expected an optimizer"),
        ({"dtype": "float32"}, "expected one of bfloat16, float16"),
        ({"init_loss_scaling": 0.0}, "init_loss_scaling is 0.0; expected a positive"),
        ({"incr_ratio": 0.5}, "incr_ratio is 0.5"),
        ({"decr_every_n_nan_or_inf": 0}, "expected positive numbers of runs"),
    ],
)
def test_what_no_factor_can_follow_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        decorate(more.pop("optimizer", None) or fluid.optimizer.SGD(LR), **more)
