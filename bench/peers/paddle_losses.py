"""The numbers of paddlepaddle 2.6.2 for `fluid_losses`: its operators, functions, or `fluid_formulas`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.nn import functional

from bench.peers import fluid_formulas, fluid_losses
from bench.peers.fluid_cases import Array
from bench.peers.fluid_losses import RESULT, LossCase, SampledCase

Numbers = dict[str, list[float]]
_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] = {
    "dice_loss": lambda given, settings: functional.dice_loss(given["input"], given["label"], settings["epsilon"]),
    "mse_loss": lambda given, _: functional.mse_loss(given["input"], given["label"]),
}


def listed(array: Any) -> list[float]:
    """Return the elements of an array in order."""
    return [float(v) for v in np.asarray(array, dtype=np.float64).reshape(-1)]


def started() -> Any:
    """Return an executor that has run the startup program."""
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    return executor


def appended(
    operator: str, given: Mapping[str, Any], outputs: Mapping[str, str], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Append an operator: slot -> variable, or a list of them; slot -> dtype of each result. Return the results."""
    block = static.default_main_program().global_block()
    made = {slot: block.create_var(dtype=dtype) for slot, dtype in outputs.items()}
    block.append_op(
        type=operator,
        inputs={slot: v if isinstance(v, list) else [v] for slot, v in given.items()},
        outputs={slot: [v] for slot, v in made.items()},
        attrs=dict(attributes),
    )
    return made


def fed(arrays: Mapping[str, Array], lengths: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is fed: tensors with LoD where there are lengths."""
    place = paddle.CPUPlace()
    return {
        name: paddle.base.create_lod_tensor(v, [list(lengths[name])], place) if name in lengths else v
        for name, v in arrays.items()
    }


def loss(case: LossCase) -> Numbers:
    """The result, and the gradients for sum(result * weights)."""
    if case.formula:
        found = {name: listed(v) for name, v in fluid_formulas.slopes(case).items()}
        return found | ({"centers": listed(fluid_formulas.centers_after(case))} if case.layer == "center_loss" else {})
    given = {}
    for name, v in case.values().items():
        is_ragged = name in case.lengths
        sizes = [-1, *v.shape[1:]] if is_ragged else list(v.shape)
        given[name] = static.data(name, sizes, str(v.dtype), int(is_ragged))
        given[name].stop_gradient = name not in case.trained
    if case.operator:
        outputs = dict.fromkeys((case.output, *case.beside), "float64")
        attributes = case.arguments if case.attributes is None else case.attributes
        slots = {slot: given[name] for slot, name in case.slots.items()}
        out = appended(case.operator, slots, outputs, attributes)[case.output]
    else:
        out = _FUNCTIONS[case.layer](given, case.arguments)
    weights = static.data("weights", [case.size], "float64")
    slopes = static.gradients([paddle.sum(paddle.reshape(out, [-1]) * weights)], [given[n] for n in case.trained])
    feed = {**fed(case.values(), case.lengths), "weights": case.weights()}
    found = started().run(feed=feed, fetch_list=[out, *slopes], return_numpy=False)
    return dict(zip((RESULT, *case.trained), map(listed, found), strict=True))


def sampled(case: SampledCase) -> Numbers:
    """The costs that rows of one input have, with the gradients of their inputs in order, and the share of each."""
    rows, label = [fluid_losses.DRAWS, 3], [fluid_losses.DRAWS, 1]
    x, ids = static.data("x", rows, "float64"), static.data("label", label, "int64")
    weight = static.data("weight", label, "float64")
    x.stop_gradient = False
    custom = None if case.custom_dist is None else np.array(case.custom_dist, dtype=np.float32)
    cost = static.nn.nce(
        x,
        ids,
        fluid_losses.CLASSES,
        weight,
        paddle.ParamAttr("w"),
        paddle.ParamAttr("b"),
        1,
        sampler=case.sampler,
        custom_dist=custom,
        seed=7,
        is_sparse=case.is_sparse,
    )
    slopes = static.gradients([paddle.sum(cost)], [x])
    executor, scope = started(), static.global_scope()
    for name, start in (("w", fluid_losses.NCE_WEIGHT), ("b", fluid_losses.NCE_BIAS)):
        scope.find_var(name).get_tensor().set(start, paddle.CPUPlace())
    feed = {
        "x": np.repeat(fluid_losses.NCE_INPUT, fluid_losses.DRAWS, 0),
        "label": np.full(label, fluid_losses.NCE_LABEL, dtype=np.int64),
        "weight": np.full(label, fluid_losses.WEIGHT_OF_SAMPLE),
    }
    return fluid_losses.counted(*executor.run(feed=feed, fetch_list=[cost, *slopes]))
