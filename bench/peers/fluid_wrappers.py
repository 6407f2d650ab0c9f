"""Averages, optimizers around optimizers, and clips of programs, whose numbers are compared with PaddlePaddle's.

As in `fluid_cases`: `paddle_wrappers` runs them with paddlepaddle 2.6.2, tests/program/test_wrappers_equal_fluid.py
with Penstock; where 2.6.2 differs from Fluid 1.8, a formula is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.peers.fluid_cases import RATE, STEPS, Array, gradients, parameters, values

SEEN = (1, 7, STEPS)
"""Steps after which parameters, and averages that are applied, are looked at."""


@dataclass(frozen=True, slots=True)
class WrappedCase:
    """STEPS updates of `p` and `q` by gradients that are fed, with SGD of RATE (or `inner`) underneath.

    `kind`: a name of fluid.optimizer, fluid.clip or fluid.contrib; `arguments`: its own. `formula`: a function here.
    `of`: the one parameter that it is for. `is_counted`: `thres_steps` is an input that has the number of steps made.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inner: tuple[str, Mapping[str, Any]] = ("SGD", {})
    formula: str = ""
    is_counted: bool = False


_MOMENTUM = ("Momentum", {"momentum": 0.875})
WRAPPED: Mapping[str, WrappedCase] = {
    "ExponentialMovingAverage": WrappedCase("ExponentialMovingAverage", {"decay": 0.875}),
    "ExponentialMovingAverage, thres_steps": WrappedCase(
        "ExponentialMovingAverage", {"decay": 0.5}, formula="moving_average", is_counted=True
    ),
    **{
        f"ModelAverage, window of {rate}, {least} to {most}": WrappedCase(
            "ModelAverage",
            {"average_window_rate": rate, "min_average_window": least, "max_average_window": most},
        )
        for rate, least, most in ((0.5, 2, 6), (0.25, 3, 100), (1.0, 100, 100), (0.125, 1, 4))
    },
    "LookaheadOptimizer": WrappedCase("LookaheadOptimizer", {"alpha": 0.25, "k": 3}, formula="lookahead"),
    "LookaheadOptimizer of Momentum": WrappedCase(
        "LookaheadOptimizer", {"alpha": 0.5, "k": 5}, _MOMENTUM, formula="lookahead"
    ),
    "extend_with_decoupled_weight_decay": WrappedCase(
        "extend_with_decoupled_weight_decay", {"weight_decay": 0.125}, formula="decoupled"
    ),
    "extend_with_decoupled_weight_decay of some": WrappedCase(
        "extend_with_decoupled_weight_decay", {"weight_decay": 0.125, "of": "q"}, _MOMENTUM, formula="decoupled"
    ),
    "RecomputeOptimizer": WrappedCase("RecomputeOptimizer", inner=_MOMENTUM),
    "ErrorClipByValue": WrappedCase("ErrorClipByValue", {"max": 0.375}),
    "ErrorClipByValue, min": WrappedCase("ErrorClipByValue", {"max": 0.375, "min": -0.125}),
    "set_gradient_clip": WrappedCase("set_gradient_clip", {"clip": ("GradientClipByGlobalNorm", 0.5)}),
    "set_gradient_clip by value": WrappedCase("set_gradient_clip", {"clip": ("GradientClipByValue", 0.25)}),
    "need_clip": WrappedCase("need_clip", {"clip": ("GradientClipByGlobalNorm", 0.5), "of": "q"}, _MOMENTUM),
}
AVERAGES = ("ExponentialMovingAverage", "ModelAverage")
FACTORS: Mapping[str, Array] = {name: values(v.shape, 120 + len(v)) for name, v in parameters().items()}
"""What `p` and `q` are multiplied by in the network of ErrorClipByValue, before the gradient that is fed."""

Trail = dict[str, list[Array]]


def _trained(case: WrappedCase) -> Any:
    """Return p and a function that makes one step of the inner optimizer, for each parameter."""
    factor = case.inner[1].get("momentum", 0.0)
    for name, p in parameters().items():
        velocity = np.zeros_like(p)

        def step(p: Array, number: int, name: str = name, velocity: Array = velocity) -> Array:
            velocity *= factor
            velocity += gradients(number)[name]
            return np.asarray(p - RATE * velocity)

        yield name, p, step


def moving_average(case: WrappedCase) -> Trail:
    """ExponentialMovingAverage with thres_steps (python/paddle/fluid/optimizer.py, 1.8); 2.6.2 cannot record it.

    The averages that `apply` puts into the parameters: divided by 1 - the last decay to the power of the steps.
    """
    trail: Trail = {}
    for name, p, step in _trained(case):
        average, trail[name] = np.zeros_like(p), []
        for number in range(STEPS):
            p = step(p, number)
            decay = min(case.arguments["decay"], (number + 1) / (number + 10))
            average = decay * average + (1 - decay) * p
            trail[name].append(average / (1 - decay ** (number + 1)))
    return trail


def lookahead(case: WrappedCase) -> Trail:
    """LookaheadOptimizer (python/paddle/fluid/optimizer.py, 1.8); slow parameters begin with the first values.

    In 2.6.2 they begin with those after the first step.
    """
    trail: Trail = {}
    share, every = case.arguments["alpha"], case.arguments["k"]
    for name, p, step in _trained(case):
        slow, trail[name] = p.copy(), []
        for number in range(STEPS):
            p = step(p, number)
            if (number + 1) % every == 0:
                p = slow = share * p + (1 - share) * slow
            trail[name].append(p)
    return trail


def decoupled(case: WrappedCase) -> Trail:
    """extend_with_decoupled_weight_decay (contrib/extend_optimizer, 1.8): p shrinks, then the update of the base."""
    trail: Trail = {}
    for name, p, step in _trained(case):
        share, trail[name] = case.arguments["weight_decay"] * (name in case.arguments.get("of", name)), []
        for number in range(STEPS):
            p = step(p - share * p, number)
            trail[name].append(p)
    return trail
