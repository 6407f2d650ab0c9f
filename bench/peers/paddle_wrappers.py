"""The numbers of paddlepaddle 2.6.2 for `fluid_wrappers`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.incubate.optimizer import ModelAverage, RecomputeOptimizer

from bench.peers import fluid_cases as cases
from bench.peers import fluid_wrappers
from bench.peers.fluid_wrappers import AVERAGES, FACTORS, SEEN, WrappedCase
from bench.peers.paddle_losses import Numbers, listed, started

_CLIPS = {"GradientClipByValue": paddle.nn.ClipGradByValue, "GradientClipByGlobalNorm": paddle.nn.ClipGradByGlobalNorm}


def wrapped(case: WrappedCase) -> Numbers:
    """`p` and `q`, or their averages, after the steps of SEEN."""
    if case.formula:
        trail: Mapping[str, Any] = getattr(fluid_wrappers, case.formula)(case)
        return {f"{name} after {n}": listed(found[n - 1]) for name, found in trail.items() for n in SEEN}
    average = _recorded(case, _parameters(case))
    executor, scope = started(), static.global_scope()
    tensors = {name: scope.find_var(name).get_tensor() for name in cases.SHAPES}
    for name, start in cases.parameters().items():
        tensors[name].set(start, paddle.CPUPlace())
    found: Numbers = {}
    for step in range(cases.STEPS):
        executor.run(feed={f"{name}.g": g for name, g in cases.gradients(step).items()})
        if step + 1 in SEEN:
            with average.apply(executor) if average else nullcontext():
                found |= {f"{name} after {step + 1}": listed(np.array(v)) for name, v in tensors.items()}
    return {f"{name} after {n}": found[f"{name} after {n}"] for name in cases.SHAPES for n in SEEN}


def _parameters(case: WrappedCase) -> dict[str, Any]:
    chosen = case.arguments.get("of")
    return {
        name: static.create_parameter(
            list(shape),
            "float64",
            attr=paddle.ParamAttr(name, need_clip=case.kind != "need_clip" or name == chosen),
        )
        for name, shape in cases.SHAPES.items()
    }


def _recorded(case: WrappedCase, params: Mapping[str, Any]) -> Any:
    """Record network, optimizer and what is around it; return the average, if it is one."""
    fed = {name: static.data(f"{name}.g", list(shape), "float64") for name, shape in cases.SHAPES.items()}
    loss, middle = _loss(case, params, fed)
    kind, arguments = case.inner
    clip = _CLIPS[case.arguments["clip"][0]](case.arguments["clip"][1]) if "clip" in case.arguments else None
    more = {"grad_clip": clip} if case.kind == "need_clip" else {}
    if case.kind == "set_gradient_clip":
        paddle.nn.clip.set_gradient_clip(clip)
    optimizer = getattr(paddle.optimizer, kind)(cases.RATE, **arguments, **more)
    if case.kind == "RecomputeOptimizer":
        optimizer = RecomputeOptimizer(optimizer)
        optimizer._set_checkpoints(middle)
    optimizer.minimize(loss)
    if case.kind not in AVERAGES:
        return None
    if case.kind == "ModelAverage":
        return ModelAverage(parameters=list(params.values()), **case.arguments)
    average = static.ExponentialMovingAverage(**case.arguments)
    average.update()
    return average


def _loss(case: WrappedCase, params: Mapping[str, Any], fed: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    loss, middle = 0.0, []
    for name, param in params.items():
        if case.kind == "ErrorClipByValue":
            product = param * paddle.assign(FACTORS[name])
            product._set_error_clip(paddle.nn.clip.ErrorClipByValue(**case.arguments))
        elif case.kind == "RecomputeOptimizer":
            product = paddle.tanh(param)
            middle.append(product)
            product = paddle.tanh(product * product + param)
        else:
            product = param
        loss = loss + paddle.sum(product * fed[name])
    return loss, middle
