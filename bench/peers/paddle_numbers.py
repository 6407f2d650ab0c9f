"""The numbers of paddlepaddle 2.6.2's static graph for `fluid_cases`, printed as JSON: group -> case -> name -> values.

Runs in the peer's own environment, which has no torch. Classes of 2.6.2 where it has them under another name, its
operators where only those are left; the formulas of `fluid_cases` where its kernels have changed since Fluid 1.8.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.nn import initializer

from bench.peers import fluid_cases as cases
from bench.peers import paddle_counts, paddle_fills, paddle_losses, paddle_wrappers
from bench.peers.fluid_cases import (
    Array,
    LayerCase,
    MetricCase,
    OptimizerCase,
    RecurrentCase,
    ScheduleCase,
    SparseCase,
)
from bench.peers.fluid_names import GROUPS

Numbers = dict[str, list[float]]
_BESIDE = {"softmax_with_cross_entropy": "Softmax", "huber_loss": "Residual", "norm": "Norm", "lrn": "MidOut"}
_CLIPS = {
    "GradientClipByValue": "ClipGradByValue",
    "GradientClipByNorm": "ClipGradByNorm",
    "GradientClipByGlobalNorm": "ClipGradByGlobalNorm",
}


def main() -> None:
    """Print all numbers."""
    paddle.enable_static()
    with contextlib.redirect_stdout(sys.stderr):  # some layers print advice
        found = {
            group: {name: _guarded(_RUNS[group], one) for name, one in some.items()} for group, some in GROUPS.items()
        }
    json.dump(found, sys.stdout)


def _guarded(run: Callable[[Any], Numbers], case: Any) -> Numbers:
    paddle.set_default_dtype("float64")
    names = paddle.utils.unique_name.guard()
    with names, static.scope_guard(static.Scope()), static.program_guard(static.Program(), static.Program()):
        return run(case)


def _listed(array: Any) -> list[float]:
    return [float(v) for v in np.asarray(array, dtype=np.float64).reshape(-1)]


def _executor() -> Any:
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    return executor


def _trail(steps: Mapping[str, list[Array]]) -> Numbers:
    return {f"{name} after {n}": _listed(found[n - 1]) for name, found in steps.items() for n in (1, cases.STEPS)}


def _dtype(case: OptimizerCase | LayerCase) -> str:
    """The dtype to compute in; everything that is created without one has it too."""
    dtype = "float32" if case.is_single else "float64"
    paddle.set_default_dtype(dtype)
    return dtype


# -- optimizers ------------------------------------------------------------------------------------------------------


def optimizer(case: OptimizerCase) -> Numbers:
    """`p` and `q` after the first step and the last."""
    if case.formula:
        return _trail(getattr(cases, case.formula)(case))
    dtype = _dtype(case)
    own = {"p": paddle.ParamAttr("p"), "q": paddle.ParamAttr("q", learning_rate=case.factor)}
    if case.own_decay:
        own["q"].regularizer = _decay(case.own_decay)
    loss: Any = 0.0
    for name, shape in cases.SHAPES.items():
        param = static.create_parameter(list(shape), dtype, attr=own[name])
        loss = loss + paddle.sum(param * static.data(f"{name}.g", list(shape), dtype))
    _minimize(case, loss)
    executor, scope = _executor(), static.global_scope()
    for name, value in cases.parameters().items():
        scope.find_var(name).get_tensor().set(value.astype(dtype), paddle.CPUPlace())
    trail: dict[str, list[Array]] = {name: [] for name in cases.SHAPES}
    for step in range(cases.STEPS):
        executor.run(feed={f"{name}.g": g.astype(dtype) for name, g in cases.gradients(step).items()})
        for name, found in trail.items():
            found.append(np.array(scope.find_var(name).get_tensor()))
    return _trail(trail)


def _minimize(case: OptimizerCase, loss: Any) -> None:
    if case.kind in _BY_OPERATOR:
        for param, grad in static.append_backward(loss):
            _BY_OPERATOR[case.kind](case.arguments, param, grad)
        return
    more = dict(case.arguments)
    if case.clip:
        more["grad_clip"] = getattr(paddle.nn, _CLIPS[case.clip[0]])(case.clip[1])
    if case.decay:
        more["weight_decay"] = _decay(case.decay)
    getattr(paddle.optimizer, case.kind)(case.rate, **more).minimize(loss)


def _decay(decay: tuple[str, float]) -> Any:
    return getattr(paddle.regularizer, decay[0])(decay[1])


def _state(param: Any, name: str) -> Any:
    zero = initializer.Constant(0.0)
    attr = paddle.ParamAttr(f"{param.name}.{name}", initializer=zero, trainable=False)
    return static.create_parameter(list(param.shape), paddle.get_default_dtype(), attr=attr)


def _update(kind: str, param: Any, inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """Append the operator `kind`: each of its states is written in place."""
    rate = paddle.full([1], cases.RATE, paddle.get_default_dtype())
    states = {name: value for name, value in inputs.items() if name != "Grad"}
    static.default_main_program().global_block().append_op(
        type=kind,
        inputs={"Param": [param], "LearningRate": [rate], **{name: [value] for name, value in inputs.items()}},
        outputs={"ParamOut": [param], **{f"{name}Out": [value] for name, value in states.items()}},
        attrs=dict(attributes),
    )


def _lars(given: Mapping[str, Any], param: Any, grad: Any) -> None:
    attributes = {
        "mu": given["momentum"],
        "lars_coeff": given["lars_coeff"],
        "lars_weight_decay": [given["lars_weight_decay"]],
    }
    _update("lars_momentum", param, {"Grad": grad, "Velocity": _state(param, "velocity")}, attributes)


def _decayed_adagrad(given: Mapping[str, Any], param: Any, grad: Any) -> None:
    _update("decayed_adagrad", param, {"Grad": grad, "Moment": _state(param, "moment")}, given)


def _ftrl(given: Mapping[str, Any], param: Any, grad: Any) -> None:
    states = {"SquaredAccumulator": _state(param, "squared"), "LinearAccumulator": _state(param, "linear")}
    rate = paddle.full([1], cases.RATE, paddle.get_default_dtype())
    static.default_main_program().global_block().append_op(
        type="ftrl",
        inputs={"Param": [param], "Grad": [grad], "LearningRate": [rate], **{k: [v] for k, v in states.items()}},
        outputs={
            "ParamOut": [param],
            "SquaredAccumOut": [states["SquaredAccumulator"]],
            "LinearAccumOut": [states["LinearAccumulator"]],
        },
        attrs=dict(given),
    )


def _dpsgd(given: Mapping[str, Any], param: Any, grad: Any) -> None:
    _update("dpsgd", param, {"Grad": grad}, given)


_BY_OPERATOR: Mapping[str, Callable[[Mapping[str, Any], Any, Any], None]] = {
    "LarsMomentum": _lars,
    "DecayedAdagrad": _decayed_adagrad,
    "Ftrl": _ftrl,
    "Dpsgd": _dpsgd,
}


def sparse(case: SparseCase) -> Numbers:
    """The table after the first step and the last."""
    if case.formula:
        return _trail(getattr(cases, case.formula)(case))
    ids, grad = static.data("ids", [cases.ROWS, 1], "int64"), static.data("grad", [cases.ROWS, 2], "float64")
    size, attr = [cases.HEIGHT, 2], paddle.ParamAttr("table")
    found = static.nn.embedding(ids, size, is_sparse=True, param_attr=attr, dtype="float64")
    loss = paddle.sum(paddle.reshape(found, [cases.ROWS, 2]) * grad)
    getattr(paddle.optimizer, case.kind)(cases.RATE, **case.arguments).minimize(loss)
    executor, tensor = _executor(), static.global_scope().find_var("table").get_tensor()
    tensor.set(cases.table(), paddle.CPUPlace())
    trail = []
    for step in range(cases.STEPS):
        executor.run(feed=dict(zip(("ids", "grad"), cases.rows(step), strict=True)))
        trail.append(np.array(tensor))
    return _trail({"table": trail})


# -- schedules and initializers --------------------------------------------------------------------------------------


def schedule(case: ScheduleCase) -> Numbers:
    """The learning rate of each of the first runs."""
    rate: Any = None
    for name, arguments in case.calls:
        given = {key: rate if value == cases.BEFORE else value for key, value in arguments.items()}
        rate = getattr(paddle.optimizer.lr, name)(**given)
    executor = _executor()
    return {"learning_rate": [float(executor.run(fetch_list=[rate])[0].item()) for _ in range(cases.STEPS)]}


def initial(case: tuple[str, Mapping[str, Any], tuple[int, ...]]) -> Numbers:
    """What the operator that fills a parameter draws: `value`, or the bounds, or mean and deviation."""
    name, arguments, shape = case
    make = getattr(initializer, f"{name}Initializer")(**arguments)
    static.create_parameter(list(shape), "float32", attr=paddle.ParamAttr("p", initializer=make))
    op = static.default_startup_program().global_block().ops[-1]
    names = {
        "fill_constant": ["value"],
        "uniform_random": ["min", "max"],
        "gaussian_random": ["mean", "std"],
        "truncated_gaussian_random": ["mean", "std"],
    }[op.type]
    return {op.type: [float(op.attr(n)) for n in names]}


# -- layers and metrics ----------------------------------------------------------------------------------------------


def layer(case: LayerCase) -> Numbers:
    """The output, and the gradient of the first input for sum(output * weights)."""
    if case.formula:
        value, slope = getattr(cases, case.formula)(case.inputs)
        return {"output": _listed(value), "gradient": _listed(slope * cases.values(value.shape, 9))}
    feed = {name: v.astype(_dtype(case)) if v.dtype.kind == "f" else v for name, v in case.inputs.items()}
    given = {name: static.data(name, list(v.shape), str(v.dtype)) for name, v in feed.items()}
    first = next(iter(given.values()))
    first.stop_gradient = False
    out = _called(case, list(given.values()))
    feed["weights"] = cases.values([int(d) for d in out.shape], 9).astype(_dtype(case))
    weights = static.data("weights", list(feed["weights"].shape), _dtype(case))
    [slope] = static.gradients([paddle.sum(out * weights)], [first])
    found = _executor().run(feed=feed, fetch_list=[out, slope])
    return dict(zip(("output", "gradient"), map(_listed, found), strict=True))


def recurrent(case: RecurrentCase) -> Numbers:
    """Hidden and cells of the operator `lstm`, and the gradients of rows, weight and bias."""
    inputs = case.inputs()
    given = {name: static.data(name, list(v.shape), "float64", int(name == "rows")) for name, v in inputs.items()}
    for v in given.values():
        v.stop_gradient = False
    block = static.default_main_program().global_block()
    made = {name: block.create_var(dtype="float64") for name in ("Hidden", "Cell", "BatchGate", "BatchCellPreAct")}
    block.append_op(
        type="lstm",
        inputs={"Input": [given["rows"]], "Weight": [given["weight"]], "Bias": [given["bias"]]},
        outputs={name: [v] for name, v in made.items()},
        attrs={"use_peepholes": case.use_peepholes, "is_reverse": case.is_reverse},
    )
    trained = [given[name] for name in ("rows", "weight", "bias")]
    slopes = static.gradients([paddle.sum(made["Hidden"] * given["weights"])], trained)
    ragged = paddle.base.create_lod_tensor(inputs["rows"], [list(cases.LENGTHS)], paddle.CPUPlace())
    fetched = [made["Hidden"], made["Cell"], *slopes]
    found = _executor().run(feed={**inputs, "rows": ragged}, fetch_list=fetched, return_numpy=False)
    return dict(zip(("hidden", "cell", "rows", "weight", "bias"), map(_listed, found), strict=True))


def _called(case: LayerCase, given: list[Any]) -> Any:
    if not case.operator:
        return getattr(static.nn, case.layer)(given[0], **case.arguments)
    block = static.default_main_program().global_block()
    names = [case.output, *([_BESIDE[case.operator]] if case.operator in _BESIDE else [])]
    outputs = {name: block.create_var(dtype=_dtype(case)) for name in names}
    block.append_op(
        type=case.operator,
        inputs={name: [v] for name, v in zip(case.names, given, strict=True)},
        outputs={name: [v] for name, v in outputs.items()},
        attrs=dict(case.arguments if case.attributes is None else case.attributes),
    )
    return outputs[case.output]


def metric(case: MetricCase) -> Numbers:
    """The metric after each batch."""
    predictions, labels = case.batches[0]
    prediction = static.data("prediction", list(predictions.shape), "float32")
    label = static.data("label", list(labels.shape), "int64")
    made = getattr(static, case.layer)(prediction, label, **case.arguments)
    fetched = list(made[:2]) if isinstance(made, (list, tuple)) else [made]
    executor = _executor()
    feeds = [{"prediction": scores.astype(np.float32), "label": wanted} for scores, wanted in case.batches]
    found = [[float(v.item()) for v in executor.run(feed=feed, fetch_list=fetched)] for feed in feeds]
    return {f"batch {n}": one for n, one in enumerate(found)}


_RUNS: Mapping[str, Callable[[Any], Numbers]] = {
    "optimizers": optimizer,
    "sparse": sparse,
    "schedules": schedule,
    "initializers": initial,
    "layers": layer,
    "metrics": metric,
    "recurrent": recurrent,
    "losses": paddle_losses.loss,
    "sampled": paddle_losses.sampled,
    "wrapped": paddle_wrappers.wrapped,
    "filled": paddle_fills.filled,
    "drawn": paddle_fills.drawn,
    "counts": paddle_counts.count,
    "objects": paddle_counts.answered,
    "evaluated": paddle_counts.evaluated,
}


if __name__ == "__main__":
    main()
