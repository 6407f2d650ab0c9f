"""Clipping, regularisation, schedules and a parameter's own rate, against numpy in all three ways of running.

Reference: SGD on gradients from torch over the whole batch, with Fluid's formulas for what is done to them (float64,
1e-9; a schedule is a float32, so what it multiplies is known to 1e-7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.program.optimizer_network import HOWS, Array, batches, network, numpy_of, trained

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

RATE = 0.1
Grads = dict[str, Array]
Change = Callable[[Grads, Grads, list[int]], Grads]


def by_value(params: Grads, grads: Grads, used: list[int]) -> Grads:
    return {n: np.clip(g, -0.05, 0.2) for n, g in grads.items()}


def by_norm(params: Grads, grads: Grads, used: list[int]) -> Grads:
    return {n: g * 0.3 / max(float(np.linalg.norm(g)), 0.3) for n, g in grads.items()}


def by_global_norm(params: Grads, grads: Grads, used: list[int]) -> Grads:
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    return {n: g * 0.3 / max(norm, 0.3) for n, g in grads.items()}


def decayed(l1: float, l2: float) -> Change:
    def change(params: Grads, grads: Grads, used: list[int]) -> Grads:
        terms = {n: l1 * np.sign(p) + l2 * p for n, p in params.items()}
        kept = np.zeros_like(terms["table"])
        kept[used] = terms["table"][used]
        return {"table": grads["table"] + kept, "weight": grads["weight"] + terms["weight"]}

    return change


def clipped_then_decayed(params: Grads, grads: Grads, used: list[int]) -> Grads:
    return decayed(0.0, 0.2)(params, by_global_norm(params, grads, used), used)


def sgd(**given: Any) -> Callable[[], Any]:
    return lambda: fluid.optimizer.SGD(RATE, **given)


class ByHand:
    """Changes the gradients between backward pass and update, as a script may do it itself."""

    def __init__(self, *changes: Callable[[list[Any]], list[Any]], **given: Any) -> None:
        self.changes, self.given = changes, given

    def __call__(self) -> ByHand:
        return self

    def minimize(self, loss: Any) -> None:
        pairs: list[Any] = [*fluid.append_backward(loss), (loss, None)]
        for change in self.changes:
            pairs = change(pairs)
        fluid.optimizer.SGD(RATE, **self.given).apply_gradients(pairs)


def own_clips(pairs: list[Any]) -> list[Any]:
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(0.3))
    return list(fluid.clip.append_gradient_clip_ops(pairs))


def own_decay(pairs: list[Any]) -> list[Any]:
    return list(fluid.regularizer.append_regularization_ops(pairs, fluid.regularizer.L2Decay(0.2)))


CALLED = fluid.clip.GradientClipByValue(0.2, -0.05)
CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "clip by value": (sgd(grad_clip=fluid.clip.GradientClipByValue(0.2, -0.05)), by_value),
    "clip by norm": (sgd(grad_clip=fluid.clip.GradientClipByNorm(0.3)), by_norm),
    "clip by global norm": (sgd(grad_clip=fluid.clip.GradientClipByGlobalNorm(0.3)), by_global_norm),
    "l1 decay": (sgd(regularization=fluid.regularizer.L1Decay(0.1)), decayed(0.1, 0.0)),
    "l2 decay": (sgd(regularization=fluid.regularizer.L2Decay(0.2)), decayed(0.0, 0.2)),
    "clip, then decay": (
        sgd(grad_clip=fluid.clip.GradientClipByGlobalNorm(0.3), regularization=fluid.regularizer.L2Decay(0.2)),
        clipped_then_decayed,
    ),
    "clip by value, by hand": (ByHand(fluid.clip.GradientClipByValue(0.2, -0.05)), by_value),
    "clip twice, by hand": (
        ByHand(fluid.clip.GradientClipByNorm(1e3), fluid.clip.GradientClipByNorm(0.3)),
        by_norm,
    ),
    "clip, decay and clip again, by hand": (
        ByHand(CALLED, own_decay, CALLED, grad_clip=CALLED),
        lambda params, grads, used: by_value(
            params, decayed(0.0, 0.2)(params, by_value(params, grads, used), used), used
        ),
    ),
    "clip, then decay, by hand": (ByHand(own_clips, own_decay), clipped_then_decayed),
    "clip by hand, then decay": (
        ByHand(own_clips, regularization=fluid.regularizer.L2Decay(0.2)),
        clipped_then_decayed,
    ),
}


def reference(change: Change, before: Grads, *, is_sparse: bool, rates: dict[str, float] | None = None) -> Grads:
    values = {n: v.copy() for n, v in before.items()}
    for feed in batches():
        leaves = {n: torch.from_numpy(v).requires_grad_() for n, v in values.items()}
        out = leaves["table"][torch.from_numpy(feed["ids"])].sum(1) @ leaves["weight"]
        ((out - torch.from_numpy(feed["label"])) ** 2).mean().backward()  # type: ignore[no-untyped-call]  # torch
        grads = {n: t.grad.numpy() for n, t in leaves.items() if t.grad is not None}
        used = np.unique(feed["ids"]).tolist() if is_sparse else list(range(len(values["table"])))
        changed = change(values, grads, used)
        values = {n: values[n] - (rates or {}).get(n, RATE) * changed[n] for n in values}
    return values


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_changed_after_the_exchange(
    monkeypatch: pytest.MonkeyPatch, name: str, is_sparse: bool, how: str
) -> None:
    make, change = CASES[name]
    scope, before = trained(monkeypatch, network(make, is_sparse=is_sparse), how)
    plain = reference(lambda _, grads, __: grads, before, is_sparse=is_sparse)
    for parameter, wanted in reference(change, before, is_sparse=is_sparse).items():
        assert np.abs(wanted - plain[parameter]).max() > 1e-3, "the case changes nothing"
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-9, atol=1e-9, err_msg=parameter)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "make", [lambda **k: fluid.optimizer.Adam(RATE, **k), lambda **k: fluid.optimizer.Adagrad(RATE, **k)]
)
def test_a_clip_that_never_acts_leaves_the_kernels_result(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], is_sparse: bool, how: str
) -> None:
    far = fluid.clip.GradientClipByNorm(1e6)
    scope, _ = trained(monkeypatch, network(lambda: make(grad_clip=far), is_sparse=is_sparse), how)
    kernel, _ = trained(monkeypatch, network(make, is_sparse=is_sparse), "executor")
    for parameter in ("table", "weight"):
        np.testing.assert_allclose(numpy_of(scope, parameter), numpy_of(kernel, parameter), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", HOWS)
def test_a_parameter_has_its_own_rate_decay_and_clip(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    own = fluid.ParamAttr(
        "weight",
        learning_rate=0.25,
        regularizer=fluid.regularizer.L1Decay(0.1),
        gradient_clip=fluid.clip.GradientClipByValue(0.05),
    )
    make = sgd(regularization=fluid.regularizer.L2Decay(0.2))
    scope, before = trained(monkeypatch, network(make, is_sparse=False, weight=own), how)

    def change(params: Grads, grads: Grads, used: list[int]) -> Grads:
        weight = np.clip(grads["weight"], -0.05, 0.05) + 0.1 * np.sign(params["weight"])
        return {"table": grads["table"] + 0.2 * params["table"], "weight": weight}

    for parameter, wanted in reference(change, before, is_sparse=False, rates={"weight": RATE / 4}).items():
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-9, atol=1e-9, err_msg=parameter)


@pytest.mark.parametrize("how", HOWS)
def test_set_gradient_clip_chooses_parameters(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def make() -> Any:
        fluid.clip.set_gradient_clip(fluid.clip.GradientClipByNorm(0.1), ["table"])
        return fluid.optimizer.SGD(RATE)

    def change(params: Grads, grads: Grads, used: list[int]) -> Grads:
        return {**grads, "table": grads["table"] * 0.1 / max(float(np.linalg.norm(grads["table"])), 0.1)}

    scope, before = trained(monkeypatch, network(make, is_sparse=False), how)
    for parameter, wanted in reference(change, before, is_sparse=False).items():
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-9, atol=1e-9, err_msg=parameter)


L: Any = fluid.layers
SCHEDULES: dict[str, tuple[Callable[[], Any], Callable[[int], float]]] = {
    "exponential": (lambda: L.exponential_decay(0.1, 3, 0.5), lambda n: 0.1 * 0.5 ** (n / 3)),
    "exponential stairs": (lambda: L.exponential_decay(0.1, 3, 0.5, True), lambda n: 0.1 * 0.5 ** (n // 3)),
    "natural exponential": (lambda: L.natural_exp_decay(0.1, 3, 0.5), lambda n: 0.1 * math.exp(-0.5 * n / 3)),
    "inverse time": (lambda: L.inverse_time_decay(0.1, 3, 0.5, True), lambda n: 0.1 / (1 + 0.5 * (n // 3))),
    "polynomial": (
        lambda: L.polynomial_decay(0.1, 5, 0.01, 2.0),
        lambda n: 0.09 * (1 - min(n, 5) / 5) ** 2 + 0.01,
    ),
    "polynomial cycle": (
        lambda: L.polynomial_decay(0.1, 4, 0.01, 1.0, cycle=True),
        lambda n: 0.09 * (1 - n / (4 * max(1, math.ceil(n / 4)))) + 0.01,
    ),
    "piecewise": (
        lambda: L.piecewise_decay([3, 6], [0.1, 0.05, 0.02]),
        lambda n: [0.1, 0.05, 0.02][(n >= 3) + (n >= 6)],
    ),
    "cosine": (lambda: L.cosine_decay(0.1, 2, 7), lambda n: 0.05 * (math.cos((n // 2) * math.pi / 7) + 1)),
    "noam": (lambda: L.noam_decay(64, 4), lambda n: 64**-0.5 * min((n + 1) ** -0.5, (n + 1) * 4**-1.5)),
    "warmup": (
        lambda: L.linear_lr_warmup(L.exponential_decay(0.1, 3, 0.5), 4, 0.01, 0.09),
        lambda n: 0.01 + 0.02 * n if n < 4 else 0.1 * 0.5 ** (n / 3),
    ),
    "warmup to a number": (lambda: L.linear_lr_warmup(0.2, 4, 0.0, 0.2), lambda n: min(0.05 * n, 0.2)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_follows_its_closed_form(name: str) -> None:
    record, formula = SCHEDULES[name]
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        rate = record()
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    got = [float(exe.run(main, {}, [rate], scope=scope)[0].reshape(())) for _ in range(10)]
    np.testing.assert_allclose(got, [formula(n) for n in range(10)], rtol=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_updates_use_this_runs_rate(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    record, formula = SCHEDULES["warmup"]
    scope, before = trained(monkeypatch, network(lambda: fluid.optimizer.SGD(record()), is_sparse=True), how)
    number = iter(range(100))

    def change(params: Grads, grads: Grads, used: list[int]) -> Grads:
        factor = formula(next(number)) / RATE
        return {n: g * factor for n, g in grads.items()}

    for parameter, wanted in reference(change, before, is_sparse=True).items():
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-6, atol=1e-7, err_msg=parameter)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a norm of zero": (lambda: fluid.clip.GradientClipByNorm(0.0), "clip_norm is 0.0"),
    "no clip": (lambda: fluid.optimizer.SGD(0.1, grad_clip=0.3), "a gradient clip is 0.3"),
    "no regulariser": (lambda: fluid.optimizer.SGD(0.1, regularization=0.3), "regularization is 0.3"),
    "boundaries": (lambda: L.piecewise_decay([1], [0.1]), "got 1 and 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused_with_the_value(name: str) -> None:
    make, text = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(ProgramError, match=text):
        make()


@pytest.mark.parametrize("how", HOWS)
def test_need_clip_leaves_parameters_out(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    clip = fluid.clip.GradientClipByGlobalNorm(0.3, need_clip=lambda p: p.name == "weight")

    def change(params: Grads, grads: Grads, used: list[int]) -> Grads:
        norm = float(np.sqrt((grads["weight"] ** 2).sum()))
        return {"table": grads["table"], "weight": grads["weight"] * 0.3 / max(norm, 0.3)}

    make = sgd(grad_clip=clip)
    scope, before = trained(monkeypatch, network(make, is_sparse=False), how)
    for parameter, wanted in reference(change, before, is_sparse=False).items():
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-9, atol=1e-9, err_msg=parameter)


def test_lamb_refuses_a_sparse_gradient_by_name() -> None:
    with pytest.raises(ProgramError, match=r"sparse gradient of 'table'.*is_sparse=False"):
        network(lambda: fluid.optimizer.Lamb(RATE), is_sparse=True)


def test_gradients_that_are_clipped_by_hand_are_fetched() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(Scope()):
        x: Any = fluid.data("x", [-1, 3], "float64")
        loss = fluid.layers.mean(fluid.layers.fc(x, 2, param_attr="w", bias_attr="b"))
        fluid.clip.set_gradient_clip(fluid.clip.GradientClipByNorm(0.5), ["w"])
        pairs = fluid.append_backward(loss)
        clipped = fluid.clip.append_gradient_clip_ops(pairs)
        assert [(p.name, new is old) for (p, new), (_, old) in zip(clipped, pairs, strict=True)] == [
            ("w", False), ("b", True),
        ]  # fmt: skip
        num_clips = sum("gradient_clip" in op.module for op in main.operators)
        updates = fluid.optimizer.SGD(RATE).apply_gradients(clipped)
        assert [op.type for op in updates] == ["sgd", "sgd"]
        assert sum("gradient_clip" in op.module for op in main.operators) == num_clips
        assert fluid.clip.append_gradient_clip_ops([(pairs[0][0], None)]) == []
        exe = fluid.Executor()
        exe.run(startup)
        rows = np.full((4, 3), 2.0)
        got, raw = exe.run(main, {"x": rows}, [clipped[0][1], pairs[0][1]])
    np.testing.assert_allclose(raw, np.ones((3, 2)), rtol=1e-12)
    np.testing.assert_allclose(got, np.full((3, 2), 0.5 / math.sqrt(6)), rtol=1e-12)


def test_a_clip_has_a_text_and_refuses_what_it_cannot_use() -> None:
    clips = [
        fluid.clip.GradientClipByValue(0.2),
        fluid.clip.GradientClipByNorm(2),
        fluid.clip.GradientClipByGlobalNorm(3),
    ]
    assert [str(clip) for clip in clips] == [
        "Gradient Clip By Value, min = -0.200000, max=0.200000",
        "Gradient Clip By Norm, clip_norm=2.000000",
        "Gradient Clip By GlobalNorm, global_norm=3.000000",
    ]
    decays = (fluid.regularizer.L1Decay(0.1), fluid.regularizer.L2Decay(0.2))
    assert [str(decay) for decay in decays] == [
        "L1Decay, regularization_coeff=0.100000", "L2Decay, regularization_coeff=0.200000",
    ]  # fmt: skip
    wrong: Any = "w"
    with pytest.raises(TypeError, match="need_clip is 'w'; expected a function of a parameter"):
        fluid.clip.GradientClipByNorm(2.0, need_clip=wrong)
    with pytest.raises(TypeError, match="a gradient clip is 'w'; expected GradientClipByValue"):
        fluid.optimizer.SGD(0.1, grad_clip=wrong)
    with pytest.raises(ProgramError, match="sparse gradient of 'table', which was clipped by value or decayed before"):
        network(ByHand(clips[0], clips[1]), is_sparse=True)


def test_one_group_has_one_norm() -> None:
    own = fluid.ParamAttr("weight", gradient_clip=fluid.clip.GradientClipByGlobalNorm(0.2))

    def make() -> Any:
        fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(0.1), ["table"])
        return fluid.optimizer.SGD(RATE)

    with pytest.raises(ProgramError, match=r"'default_group' is clipped to 0\.1 and to 0\.2"):
        network(make, is_sparse=False, weight=own)


def test_a_learning_rate_may_be_a_constant_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network(lambda: fluid.optimizer.SGD(L.fill_constant([1], "float32", RATE)), is_sparse=False)
    scope, before = trained(monkeypatch, made, "executor")
    for parameter, wanted in reference(lambda _, grads, __: grads, before, is_sparse=False).items():
        np.testing.assert_allclose(numpy_of(scope, parameter), wanted, rtol=1e-6, err_msg=parameter)
