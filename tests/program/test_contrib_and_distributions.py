"""fluid.contrib's layers and optimizers, distributions and scopes of a thread: against their formulas; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.program.layer_cases import Case, compare
from torch import distributions as D

import penstock as fluid
from penstock import default_scope_funcs
from penstock.errors import ProgramError, SpecError
from penstock.program.layers import contrib
from penstock.program.memory_usage import memory_usage
from penstock.program.optimizers.decoupled import extend_with_decoupled_weight_decay
from penstock.scope import Scope

L: Any = fluid.layers
C: Any = contrib


def _spread(x: torch.Tensor) -> torch.Tensor:
    return x * x + 0.5


def _diagonal(x: Any) -> Any:
    return L.MultivariateNormalDiag(L.reduce_sum(x, 0), L.diag(_spread(L.reduce_mean(x, 0))))


def _diagonal_of(x: torch.Tensor) -> D.MultivariateNormal:
    return D.MultivariateNormal(x.sum(0), torch.diag(_spread(x.mean(0))))


def _kl(p: D.Distribution, q: D.Distribution) -> torch.Tensor:
    return D.kl_divergence(p, q)


CASES: dict[str, Case] = {
    "partial_concat": (
        ((5,), (4,)),
        lambda x, y: C.partial_concat([x, y], 1, 2),
        lambda x, y: torch.cat([x[:, 1:3], y[:, 1:3]], 1),
    ),
    "partial_concat to the end": (
        ((5,), (4,)),
        lambda x, y: C.partial_concat([x, y], -2),
        lambda x, y: torch.cat([x[:, -2:], y[:, -2:]], 1),
    ),
    "partial_sum": (
        ((5,), (4,)),
        lambda x, y: C.partial_sum([x, y, x], 1, 3),
        lambda x, y: 2 * x[:, 1:4] + y[:, 1:4],
    ),
    "one of two": (
        ((5,), (5,)),
        lambda x, y: C.fused_elemwise_activation(x, y, ["tanh", "elementwise_mul"]),
        lambda x, y: (x * y).tanh(),
    ),
    "two of one": (
        ((3, 5), (3,)),
        lambda x, y: C.fused_elemwise_activation(x, y, "elementwise_add,scale", 0, 0.5),
        lambda x, y: x + 0.5 * y[:, :, None],
    ),
    "normal log_prob": (
        ((3,), (3,), (3,)),
        lambda x, a, b: L.Normal(a, _spread(b)).log_prob(x),
        lambda x, a, b: D.Normal(a, _spread(b)).log_prob(x),  # type: ignore[no-untyped-call]  # torch
    ),
    "normal entropy": (
        ((3,), (3,)),
        lambda a, b: L.Normal(a, _spread(b)).entropy(),
        lambda a, b: D.Normal(a, _spread(b)).entropy(),  # type: ignore[no-untyped-call]  # torch
    ),
    "normal kl": (
        ((3,), (3,)),
        lambda a, b: L.Normal(a, _spread(b)).kl_divergence(L.Normal(b, _spread(a))),
        lambda a, b: _kl(D.Normal(a, _spread(b)), D.Normal(b, _spread(a))),
    ),
    "uniform entropy": (
        ((3,), (3,)),
        lambda a, b: L.Uniform(a, a + _spread(b)).entropy(),
        lambda a, b: (a + _spread(b) - a).log(),
    ),
    "categorical entropy": (
        ((4,),),
        lambda x: L.Categorical(x).entropy(),
        lambda x: D.Categorical(logits=x).entropy()[:, None],  # type: ignore[no-untyped-call]  # torch
    ),
    "categorical kl": (
        ((4,), (4,)),
        lambda x, y: L.Categorical(x).kl_divergence(L.Categorical(y)),
        lambda x, y: _kl(D.Categorical(logits=x), D.Categorical(logits=y))[:, None],
    ),
    "diagonal entropy": (
        ((3,),),
        lambda x: _diagonal(x).entropy(),
        lambda x: _diagonal_of(x).entropy(),  # type: ignore[no-untyped-call]  # torch
    ),
    "diagonal kl": (
        ((3,), (3,)),
        lambda x, y: _diagonal(x).kl_divergence(_diagonal(y)),
        lambda x, y: _kl(_diagonal_of(x), _diagonal_of(y)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_formula(name: str) -> None:
    compare(CASES[name])


def ran(build: Callable[[], list[Any]], feed: dict[str, Any], steps: int = 1) -> list[np.ndarray]:
    """Record what `build` makes, run it, and return what the last run gives."""
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    main.random_seed = startup.random_seed = 5
    with fluid.program_guard(main, startup):
        made = build()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    for _ in range(steps):
        found = exe.run(main, feed, made, scope=scope)
    return list(found)


def test_samples_follow_their_distribution() -> None:
    x = np.full((4, 1), 10.0)

    def build() -> list[Any]:
        mean = fluid.data("x", [-1, 1], "float64")
        samples = [L.Normal(mean, 2.0).sample([2000]), L.Uniform(2.0, 4.0).sample([3000, 1])]
        return [*samples, L.Uniform([0.0, 1.0], [1.0, 3.0]).sample([500])]

    normal, uniform, pair = ran(build, {"x": x})
    assert normal.shape == (2000, 4, 1)
    assert abs(normal.mean() - 10.0) < 0.1
    assert abs(normal.std() - 2.0) < 0.1
    assert uniform.shape == (3000, 1)
    assert uniform.min() >= 2.0
    assert uniform.max() < 4.0
    assert abs(uniform.mean() - 3.0) < 0.05
    assert pair.shape == (500, 2)
    assert pair[:, 1].min() >= 1.0 > pair[:, 0].max()


def test_a_uniform_density_ends_at_its_bounds() -> None:
    x = np.array([[0.5], [2.0], [3.0]])
    [got] = ran(lambda: [L.Uniform(1.0, 3.0).log_prob(fluid.data("x", [-1, 1], "float32"))], {"x": x.astype("float32")})
    np.testing.assert_allclose(got, [[-np.inf], [-np.log(2.0)], [-np.inf]], rtol=1e-6)


def test_metrics_of_clicks_add_up_over_runs() -> None:
    draw = np.random.default_rng(2)
    x, label = draw.random((6, 1)), draw.integers(2, size=(6, 1)).astype("float64")

    def build() -> list[Any]:
        return list(C.ctr_metric_bundle(fluid.data("x", [-1, 1], "float64"), fluid.data("y", [-1, 1], "float64")))

    got = ran(build, {"x": x, "y": label}, steps=2)
    away = x - label
    wanted = [(away**2).sum(), np.abs(away).sum(), x.sum(), (1 / (1 + np.exp(-x))).sum(), label.sum(), 6.0]
    np.testing.assert_allclose(np.concatenate(got), 2 * np.array(wanted), rtol=1e-6)


def test_memory_usage_counts_what_operators_make() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 64], "float32")
        L.cast(L.reduce_sum(x * 2.0, 1), "float64")
    found = memory_usage(main, 10)
    total = (10 * 64 * 4 + 10 * 4 + 10 * 8) / 1024
    assert found[:2] == pytest.approx((total * 1.05, total * 1.1))
    assert found[2] == "KB"
    with pytest.raises(SpecError, match="batch_size is 0"):
        memory_usage(main, 0)


@pytest.mark.parametrize("parallel", [False, True])
def test_decoupled_decay_comes_before_the_update(parallel: bool) -> None:
    x = np.random.default_rng(1).normal(size=(4, 3))
    main, startup, scope = fluid.Program(), fluid.Program(), Scope()
    with fluid.program_guard(main, startup):
        start = fluid.initializer.Constant(0.5)
        kept, decayed = (L.create_parameter([3], "float64", n, default_initializer=start) for n in ("kept", "decayed"))
        loss = L.reduce_mean(fluid.data("x", [-1, 3], "float64") * kept * decayed)
        decoupled = extend_with_decoupled_weight_decay(fluid.optimizer.Momentum)
        given: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9}
        decoupled(weight_decay=0.25, apply_decay_param_fun=lambda name: name == "decayed", **given).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    program: Any = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=[fluid.CPUPlace()] * 2)
    for _ in range(3):
        exe.run(program if parallel else main, {"x": x}, [loss], scope=scope)
    mean, p, q, of_p, of_q = x.mean(0) / 3, np.full(3, 0.5), np.full(3, 0.5), np.zeros(3), np.zeros(3)
    for _ in range(3):
        of_p, of_q = 0.9 * of_p + mean * q, 0.9 * of_q + mean * p
        p, q = p - 0.1 * of_p, q * 0.75 - 0.1 * of_q
    np.testing.assert_allclose(np.array(scope.find_var("kept")), p, rtol=1e-10)
    np.testing.assert_allclose(np.array(scope.find_var("decayed")), q, rtol=1e-10)


def test_scopes_of_a_thread_lie_in_one_another() -> None:
    outer = default_scope_funcs.get_cur_scope()
    default_scope_funcs.var("kept").get_tensor().set(np.array([1.0]))

    def within() -> None:
        assert default_scope_funcs.get_cur_scope() is not outer
        default_scope_funcs.var("own").get_tensor().set(np.array([2.0]))
        assert default_scope_funcs.find_var("kept") is not None

    default_scope_funcs.scoped_function(within)
    assert default_scope_funcs.get_cur_scope() is outer
    assert default_scope_funcs.find_var("own") is None
    with pytest.raises(SpecError, match="without enter_local_scope"):
        default_scope_funcs.leave_local_scope()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "partial_concat": (lambda x: C.partial_concat([x], 3, 2), "partial_concat needs columns from start_index=3"),
    "partial_sum": (lambda x: C.partial_sum([L.unsqueeze(x, 1)]), "partial_sum needs a variable of 2 dimensions"),
    "fused": (lambda x: C.fused_elemwise_activation(x, x, ["relu", "tanh"]), "fused_elemwise_activation: functor_list"),
    "ctr_metric_bundle": (lambda x: C.ctr_metric_bundle(x, L.unsqueeze(x, 1)), "ctr_metric_bundle needs two inputs"),
    "normal": (lambda x: L.Normal(0.0, 1.0).kl_divergence(x), "Normal.kl_divergence: other is"),
    "categorical": (lambda x: L.Categorical(x).kl_divergence(x), "Categorical.kl_divergence: other is"),
    "diagonal": (lambda x: L.MultivariateNormalDiag(x, x), "MultivariateNormalDiag: scale is"),
    "decay": (lambda x: extend_with_decoupled_weight_decay(int), "no class of fluid.optimizer"),
    "decay share": (
        lambda x: extend_with_decoupled_weight_decay(fluid.optimizer.SGD)("0.1", learning_rate=0.1),
        "weight_decay is '0.1'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4], "float64")
        with pytest.raises(ProgramError, match=said):
            build(x)
