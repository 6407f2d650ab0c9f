"""Metrics against Fluid's numbers: layers, fluid.metrics, fluid.average and fluid.evaluator.

The cases are in bench/peers/fluid_counts.py, the numbers in fluid_numbers.json (docs/optimizers.md).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers import fluid_counts as cases
from bench.peers.fluid_cases import SINGLE
from bench.peers.fluid_numbers import read
from tests.program.fluid_runs import Numbers, fed, given, listed, started, value

import penstock as fluid
from penstock.program.layers.contrib import ctr_metric_bundle

L: Any = fluid.layers
TABLE = read()


def count(case: cases.CountCase) -> Numbers:
    inputs = given(case.batches[0], case.lengths)
    attrs = {argument: fluid.ParamAttr(argument) for argument in case.parameters}
    if case.layer == "crf_decoding":  # it reads what the loss has made
        label = inputs.get("label", L.data("tags", [1], dtype="int64", lod_level=1))
        L.linear_chain_crf(inputs["input"], label, **attrs)
    layer: Any = ctr_metric_bundle if case.layer == "ctr_metric_bundle" else getattr(L, case.layer)
    made = layer(**inputs, **attrs, **case.arguments)
    fetched = list(made) if isinstance(made, tuple) else [made]
    exe, scope = started()
    for name, start in case.parameters.items():
        value(scope, name).copy_(torch.from_numpy(start))
    found = {}
    for n, batch in enumerate(case.batches):
        arrays = exe.run(
            feed=fed(batch, case.lengths), fetch_list=fetched, scope=scope, return_numpy=False, use_prune=True
        )
        found[f"batch {n}"] = [v for one in arrays for v in listed(np.array(one))]
    return found


def told(case: cases.ObjectCase) -> Numbers:
    package: Any = fluid
    metric = functools.reduce(getattr, case.path.split("."), package)(**case.arguments)
    if case.path.endswith("CompositeMetric"):
        for part in (fluid.metrics.Precision(), fluid.metrics.Recall()):
            metric.add_metric(part)
    found = {}
    for n, update in enumerate(case.updates):
        getattr(metric, case.method)(*update)
        found[f"update {n}"] = listed(metric.eval())
    return found


def evaluated(name: str) -> Numbers:
    case = cases.COUNTS[{"ChunkEvaluator": "chunk_eval, IOB", "EditDistance": "edit_distance"}[name]]
    inputs = given(case.batches[0], case.lengths)
    settings = {key: v for key, v in case.arguments.items() if key != "normalized"}
    evaluator = getattr(fluid.evaluator, name)(**inputs, **settings)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    evaluator.reset(exe)
    for batch in case.batches:
        exe.run(feed=fed(batch, case.lengths), fetch_list=evaluator.metrics)
    return {"all": listed(evaluator.eval(exe))}


def precisions(kind: Any) -> Numbers:
    case = cases.COUNTS["detection_map"]
    label = case.batches[0]["label"]
    parts = {"gt_label": label[:, :1], "gt_difficult": label[:, 1:2], "gt_box": label[:, 2:]}
    lengths = {"detect_res": case.lengths["detect_res"], **dict.fromkeys(parts, case.lengths["label"])}
    inputs = given({"detect_res": case.batches[0]["detect_res"], **parts}, lengths)
    metric = kind(inputs.pop("detect_res"), **inputs, **case.arguments)
    exe, scope = started()
    metric.reset(exe)
    found = {}
    for n, batch in enumerate(case.batches):
        label = batch["label"]
        parts = {"gt_label": label[:, :1], "gt_difficult": label[:, 1:2], "gt_box": label[:, 2:]}
        feed = fed({"detect_res": batch["detect_res"], **parts}, lengths)
        found[f"batch {n}"] = listed(exe.run(feed=feed, fetch_list=list(metric.get_map_var()), scope=scope))
    return found


def compare(got: Numbers, wanted: Numbers) -> None:
    assert got.keys() == wanted.keys()
    for key, numbers in wanted.items():
        np.testing.assert_allclose(got[key], numbers, rtol=SINGLE, atol=SINGLE, err_msg=key)


@pytest.mark.parametrize("name", cases.COUNTS)
def test_layers_of_metrics_equal_fluids(name: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        compare(count(cases.COUNTS[name]), TABLE["counts"][name])


@pytest.mark.parametrize("name", cases.OBJECTS)
def test_metrics_of_passes_equal_fluids(name: str) -> None:
    compare(told(cases.OBJECTS[name]), TABLE["objects"][name])


@pytest.mark.parametrize("name", ["ChunkEvaluator", "EditDistance"])
def test_evaluators_equal_fluids(name: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        compare(evaluated(name), TABLE["evaluated"][name])


@pytest.mark.parametrize("module", ["metrics", "evaluator"])
def test_mean_average_precision_equals_fluids(module: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        compare(precisions(getattr(fluid, module).DetectionMAP), TABLE["evaluated"]["DetectionMAP"])
