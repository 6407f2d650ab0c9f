"""Penstock's numbers against Fluid's, from the table that `python -m bench.peers.fluid_numbers` checks.

The cases, their inputs and the two tolerances are in bench/peers/fluid_cases.py. Penstock computes in float64,
schedules and metrics in float32 as Fluid does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers import fluid_cases as cases
from bench.peers.fluid_numbers import read
from tests.program.fluid_runs import Numbers, data, listed, started, value

import penstock as fluid
from penstock.program.ir import Operator
from penstock.program.training.backward import append_backward

L: Any = fluid.layers
TABLE = read()
_FILLS = {
    "aten.full.default": "fill_constant",
    "penstock.uniform.default": "uniform_random",
    "penstock.normal.default": "gaussian_random",
    "penstock.truncated_normal.default": "truncated_gaussian_random",
}


def trail(steps: Mapping[str, list[cases.Array]]) -> Numbers:
    return {f"{name} after {n}": listed(found[n - 1]) for name, found in steps.items() for n in (1, cases.STEPS)}


def decay(given: tuple[str, float] | None) -> Any:
    return getattr(fluid.regularizer, given[0])(given[1]) if given else None


def optimizer(case: cases.OptimizerCase) -> Numbers:
    own = {"p": fluid.ParamAttr("p"), "q": fluid.ParamAttr("q", None, case.factor, decay(case.own_decay))}
    losses = []
    for name, start in cases.parameters().items():
        param = L.create_parameter(list(start.shape), "float64", attr=own[name])
        losses.append(L.reduce_sum(param * data(f"{name}.g", start)))
    more = dict(case.arguments)
    if case.clip:
        more["grad_clip"] = getattr(fluid.clip, case.clip[0])(case.clip[1])
    if case.decay:
        more["regularization"] = decay(case.decay)
    getattr(fluid.optimizer, case.kind)(case.rate, **more).minimize(losses[0] + losses[1])
    exe, scope = started()
    for name, start in cases.parameters().items():
        value(scope, name).copy_(torch.from_numpy(start))
    found: dict[str, list[cases.Array]] = {name: [] for name in cases.SHAPES}
    for step in range(cases.STEPS):
        exe.run(feed={f"{name}.g": g for name, g in cases.gradients(step).items()}, scope=scope)
        for name, steps in found.items():
            steps.append(value(scope, name).numpy().copy())
    return trail(found)


def sparse(case: cases.SparseCase) -> Numbers:
    ids, grad = cases.rows(0)
    attr = fluid.ParamAttr("table")
    looked_up = fluid.embedding(data("ids", ids[:, 0]), [cases.HEIGHT, 2], True, param_attr=attr, dtype="float64")
    loss = L.reduce_sum(looked_up * data("grad", grad))
    getattr(fluid.optimizer, case.kind)(cases.RATE, **case.arguments).minimize(loss)
    exe, scope = started()
    value(scope, "table").copy_(torch.from_numpy(cases.table()))
    found = []
    for step in range(cases.STEPS):
        ids, grad = cases.rows(step)
        exe.run(feed={"ids": ids[:, 0], "grad": grad}, scope=scope)
        found.append(value(scope, "table").numpy().copy())
    return trail({"table": found})


def schedule(case: cases.ScheduleCase) -> Numbers:
    rate: Any = None
    for name, arguments in case.calls:
        given = {key: rate if v == cases.BEFORE else v for key, v in arguments.items()}
        rate = getattr(L, name)(**given)
    exe, scope = started()
    return {"learning_rate": [float(exe.run(fetch_list=[rate], scope=scope)[0].item()) for _ in range(cases.STEPS)]}


def initial(case: tuple[str, Mapping[str, Any], tuple[int, ...]]) -> Numbers:
    name, arguments, shape = case
    make = getattr(fluid.initializer, name)(**arguments)
    L.create_parameter(list(shape), "float32", attr=fluid.ParamAttr("p", make))
    op: Operator = fluid.default_startup_program().operators[-1]
    numbers = op.args[1:2] if op.type.startswith("aten") else op.args[1:3]
    return {_FILLS[op.type]: [float(v) for v in numbers if isinstance(v, (int, float))]}


def layer(case: cases.LayerCase) -> Numbers:
    first, *others = case.inputs
    param = L.create_parameter(list(case.inputs[first].shape), "float64", first)
    feed = {name: case.inputs[name] for name in others}
    out = getattr(L, case.layer)(**{first: param}, **{n: data(n, v) for n, v in feed.items()}, **case.arguments)
    feed["weights"] = cases.values([int(d) for d in out.shape], 9)
    pairs = append_backward(L.reduce_sum(out * data("weights", feed["weights"])))
    slope = next(gradient for of, gradient in pairs if of.name == first)
    exe, scope = started()
    value(scope, first).copy_(torch.from_numpy(case.inputs[first]))
    found = exe.run(feed=feed, fetch_list=[out, slope], scope=scope)
    return dict(zip(("output", "gradient"), map(listed, found), strict=True))


def recurrent(case: cases.RecurrentCase) -> Numbers:
    inputs = case.inputs()
    rows = L.data("rows", [4 * cases.HIDDEN], dtype="float64", lod_level=1, stop_gradient=False)
    attrs = {f"{name}_attr": fluid.ParamAttr(own) for name, own in (("param", "weight"), ("bias", "bias"))}
    flags = {"use_peepholes": case.use_peepholes, "is_reverse": case.is_reverse}
    hidden, cell = L.dynamic_lstm(rows, 4 * cases.HIDDEN, dtype="float64", **attrs, **flags)
    weights = L.data("weights", [cases.HIDDEN], dtype="float64", lod_level=1)
    append_backward(L.reduce_sum(hidden * weights))
    exe, scope = started()
    for name in ("weight", "bias"):
        value(scope, name).copy_(torch.from_numpy(inputs[name]))
    feed = {name: fluid.create_lod_tensor(inputs[name], [[*cases.LENGTHS]]) for name in ("rows", "weights")}
    names = ("hidden", "cell", "rows", "weight", "bias")
    found = exe.run(feed=feed, fetch_list=[hidden, cell, *(f"{name}@GRAD" for name in names[2:])], scope=scope)
    return dict(zip(names, map(listed, found), strict=True))


def metric(case: cases.MetricCase) -> Numbers:
    (scores, wanted), *_ = case.batches
    made = getattr(L, case.layer)(data("scores", scores.astype(np.float32)), data("label", wanted), **case.arguments)
    fetched = list(made[:2]) if isinstance(made, tuple) else [made]
    exe, scope = started()
    feeds = [{"scores": scores.astype(np.float32), "label": wanted} for scores, wanted in case.batches]
    found = [[float(v.item()) for v in exe.run(feed=feed, fetch_list=fetched, scope=scope)] for feed in feeds]
    return {f"batch {n}": one for n, one in enumerate(found)}


GROUPS: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], Numbers], float]] = {
    "optimizers": (cases.OPTIMIZERS, optimizer, cases.EXACT),
    "sparse": (cases.SPARSE, sparse, cases.EXACT),
    "schedules": (cases.SCHEDULES, schedule, cases.SINGLE),
    "initializers": (cases.INITIALIZERS, initial, cases.SINGLE),
    "layers": (cases.LAYERS, layer, cases.EXACT),
    "metrics": (cases.METRICS, metric, cases.SINGLE),
    "recurrent": (cases.RECURRENT, recurrent, cases.EXACT),
}


def test_softmax_is_returned_beside_its_cross_entropy() -> None:
    logits, label = cases.values((4, 3), 1), np.array([[0], [2], [1], [2]])
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        both = L.softmax_with_cross_entropy(data("x", logits), data("label", label), return_softmax=True)
        exe, scope = started()
        loss, softmax = exe.run(feed={"x": logits, "label": label}, fetch_list=list(both), scope=scope)
    wanted = torch.from_numpy(logits).softmax(-1).numpy()
    np.testing.assert_allclose(softmax, wanted, rtol=1e-12)
    np.testing.assert_allclose(loss, -np.log(np.take_along_axis(wanted, label, -1)), rtol=1e-12)


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in GROUPS[group][0]])
def test_numbers_equal_fluids(group: str, name: str) -> None:
    some, run, tolerance = GROUPS[group]
    case, wanted = some[name], TABLE[group][name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        got = run(case)
    assert got.keys() == wanted.keys()
    wide = cases.SINGLE if getattr(case, "is_single", False) else tolerance
    for key, numbers in wanted.items():
        np.testing.assert_allclose(got[key], numbers, rtol=wide, atol=wide, err_msg=f"{group}: {name}: {key}")
