"""Averages, optimizers around optimizers and clips of programs against Fluid's numbers.

The cases are in bench/peers/fluid_wrappers.py, the numbers in fluid_numbers.json (docs/optimizers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from bench.peers import fluid_cases
from bench.peers import fluid_wrappers as cases
from bench.peers.fluid_cases import EXACT, SINGLE
from bench.peers.fluid_numbers import read
from tests.program.fluid_runs import Numbers, data, listed, started, value

import penstock as fluid
from penstock.program.optimizers.decoupled import extend_with_decoupled_weight_decay

L: Any = fluid.layers
TABLE = read()["wrapped"]


def network(case: cases.WrappedCase, params: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the loss, and the checkpoints of RecomputeOptimizer."""
    losses, middle = [], []
    for name, param in params.items():
        product: Any = param
        if case.kind == "ErrorClipByValue":
            product = param * L.assign(cases.FACTORS[name])
            product._set_error_clip(fluid.clip.ErrorClipByValue(**case.arguments))
        elif case.kind == "RecomputeOptimizer":
            middle.append(L.tanh(param))
            product = L.tanh(middle[-1] * middle[-1] + param)
        losses.append(L.reduce_sum(product * data(f"{name}.g", fluid_cases.gradients(0)[name])))
    return losses[0] + losses[1], middle


def optimizer(case: cases.WrappedCase, middle: list[Any]) -> Any:
    kind, arguments = case.inner
    given, chosen = dict(case.arguments), case.arguments.get("of")
    base: Any = getattr(fluid.optimizer, kind)
    clip: Any = getattr(fluid.clip, given["clip"][0]) if "clip" in given else None
    if case.kind == "need_clip":
        whole = clip(given["clip"][1], need_clip=lambda param: param.name == chosen)
        return base(fluid_cases.RATE, grad_clip=whole, **arguments)
    if case.kind == "set_gradient_clip":
        fluid.clip.set_gradient_clip(clip(given["clip"][1]))
    if case.kind == "extend_with_decoupled_weight_decay":
        chooses = (lambda name: name == chosen) if chosen else None
        made = extend_with_decoupled_weight_decay(base)
        return made(given["weight_decay"], chooses, learning_rate=fluid_cases.RATE, **arguments)
    inner = base(fluid_cases.RATE, **arguments)
    if case.kind == "LookaheadOptimizer":
        return fluid.optimizer.LookaheadOptimizer(inner, **given)
    if case.kind == "RecomputeOptimizer":
        around = fluid.optimizer.RecomputeOptimizer(inner)
        around._set_checkpoints(middle)
        return around
    return inner


def average(case: cases.WrappedCase) -> Any:
    if case.kind not in cases.AVERAGES:
        return None
    more = {"thres_steps": fluid.data("steps", [1], "int64")} if case.is_counted else {}
    made = getattr(fluid.optimizer, case.kind)(**case.arguments, **more)
    if case.kind == "ExponentialMovingAverage":
        made.update()
    return made


def wrapped(case: cases.WrappedCase) -> Numbers:
    params = {}
    for name, start in fluid_cases.parameters().items():
        attr = fluid.ParamAttr(name, fluid.initializer.NumpyArrayInitializer(start))
        params[name] = L.create_parameter(list(start.shape), "float64", attr=attr)
    loss, middle = network(case, params)
    optimizer(case, middle).minimize(loss)
    mean = average(case)
    exe, scope = started()
    found: Numbers = {}
    with fluid.scope_guard(scope):
        for step in range(fluid_cases.STEPS):
            counted = {"steps": np.array([step])} if case.is_counted else {}
            exe.run(feed={f"{name}.g": g for name, g in fluid_cases.gradients(step).items()} | counted)
            if step + 1 in cases.SEEN:
                with mean.apply(exe) if mean else nullcontext():
                    found |= {f"{n} after {step + 1}": listed(value(scope, n)) for n in params}
    return found


@pytest.mark.parametrize("name", cases.WRAPPED)
def test_what_stands_around_optimizers_equals_fluids(name: str) -> None:
    case, wanted = cases.WRAPPED[name], TABLE[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        got = wrapped(case)
    assert got.keys() == wanted.keys()
    # Fluid corrects a moving average by a decay in float32
    wide = SINGLE if case.kind == "ExponentialMovingAverage" else EXACT
    for key, numbers in wanted.items():
        np.testing.assert_allclose(got[key], numbers, rtol=wide, atol=wide, err_msg=f"{name}: {key}")
