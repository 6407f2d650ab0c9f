"""Losses of fluid.layers against Fluid's numbers: results, and gradients of all that is trained.

The cases are in bench/peers/fluid_losses.py, the numbers in fluid_numbers.json (docs/optimizers.md).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers import fluid_losses as cases
from bench.peers.fluid_cases import EXACT, SINGLE
from bench.peers.fluid_numbers import read
from tests.program.fluid_runs import Numbers, fed, given, listed, started, value

import penstock as fluid
from penstock.program.training.backward import append_backward

L: Any = fluid.layers
TABLE = read()


def loss(case: cases.LossCase) -> Numbers:
    inputs = given(case.inputs, case.lengths, case.trained, case.rows)
    attrs = {argument: fluid.ParamAttr(argument) for argument in case.parameters}
    out = getattr(L, case.layer)(**inputs, **attrs, **case.arguments)
    weights = case.weights()
    weighed = L.reshape(out, [-1]) * fluid.data("weights", [case.size], "float64")
    append_backward(L.reduce_sum(weighed))
    exe, scope = started()
    for name, start in case.parameters.items():
        value(scope, name).copy_(torch.from_numpy(start))
    fetched = [out, *(f"{name}@GRAD" for name in case.trained)]
    arrays = exe.run(feed={**fed(case.inputs, case.lengths), "weights": weights}, fetch_list=fetched, scope=scope)
    found = dict(zip((cases.RESULT, *case.trained), map(listed, arrays), strict=True))
    return found | ({"centers": listed(value(scope, "param_attr"))} if case.layer == "center_loss" else {})


def sampled(case: cases.SampledCase) -> Numbers:
    x = L.data("x", [3], dtype="float64", stop_gradient=False)
    cost = L.nce(
        x,
        L.data("label", [1], dtype="int64"),
        cases.CLASSES,
        L.data("weight", [1], dtype="float64"),
        fluid.ParamAttr("w"),
        fluid.ParamAttr("b"),
        1,
        sampler=case.sampler,
        custom_dist=case.custom_dist,
        is_sparse=case.is_sparse,
    )
    append_backward(L.reduce_sum(cost))
    exe, scope = started()
    for name, start in (("w", cases.NCE_WEIGHT), ("b", cases.NCE_BIAS)):
        value(scope, name).copy_(torch.from_numpy(start))
    feed = {
        "x": np.repeat(cases.NCE_INPUT, cases.DRAWS, 0),
        "label": np.full((cases.DRAWS, 1), cases.NCE_LABEL),
        "weight": np.full((cases.DRAWS, 1), cases.WEIGHT_OF_SAMPLE),
    }
    return cases.counted(*exe.run(feed=feed, fetch_list=[cost, "x@GRAD"], scope=scope))


@pytest.mark.parametrize("name", cases.LOSSES)
def test_losses_and_their_gradients_equal_fluids(name: str) -> None:
    wanted = TABLE["losses"][name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        got = loss(cases.LOSSES[name])
    assert got.keys() == wanted.keys()
    for key, numbers in wanted.items():
        np.testing.assert_allclose(got[key], numbers, rtol=EXACT, atol=EXACT, err_msg=f"{name}: {key}")


@pytest.mark.parametrize("name", cases.SAMPLED)
def test_costs_of_drawn_classes_are_those_of_fluid(name: str) -> None:
    wanted = TABLE["sampled"][name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        got = sampled(cases.SAMPLED[name])
    # Fluid has the probabilities of log-uniform ids in float32
    wide = SINGLE if cases.SAMPLED[name].sampler == "log_uniform" else EXACT
    np.testing.assert_allclose(got["rows"], wanted["rows"], rtol=wide, atol=wide)
    # both sides draw: a share has a deviation of sqrt(p (1 - p) / n), at most sqrt(0.25 / n) each
    np.testing.assert_allclose(got["shares"], wanted["shares"], atol=5 * math.sqrt(0.5 / cases.DRAWS))
