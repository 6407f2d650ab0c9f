"""Cases whose numbers are compared with PaddlePaddle's: names and arguments of Fluid 1.8, inputs, and no framework.

`paddle_numbers` runs them with paddlepaddle 2.6.2, tests/program/test_numbers_equal_fluid.py with Penstock. Settings
are sums of a few powers of two and inputs multiples of 1/1024: Fluid keeps settings in float32, and these are the same
in float64, so that results are compared to 1e-9.

Formulas whose kernel changed after Fluid 1.8 are here in NumPy, each with its source; `Case.formula` names one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
STEPS = 20
SHAPES: Mapping[str, tuple[int, ...]] = {"p": (3, 2), "q": (4,)}
EPSILON = 2.0**-20
EXACT, SINGLE = 1e-9, 5e-6
"""Relative tolerances: sums in another order in float64; up to 20 roundings of 2**-24 each in float32."""
RATE = 0.0625
HEIGHT, ROWS = 6, 4


def values(shape: Sequence[int], seed: int, low: float = -1.0, high: float = 1.0) -> Array:
    """Return multiples of 1/1024 in [low, high], the same everywhere: Knuth's multiplicative hash of positions."""
    counts = (np.arange(1, math.prod(shape) + 1, dtype=np.uint64) + np.uint64(1009 * seed)) * np.uint64(2654435761)
    shares = (counts % np.uint64(2**32)).astype(np.float64) / 2.0**32
    return np.asarray(np.round((low + shares * (high - low)) * 1024) / 1024).reshape(shape)


def gradients(step: int) -> dict[str, Array]:
    """Return the gradient of each parameter in one step (from 0)."""
    return {name: values(shape, 10 * step + len(name) + ord(name)) for name, shape in SHAPES.items()}


def parameters() -> dict[str, Array]:
    """Return what each parameter starts from."""
    return {name: values(shape, ord(name)) for name, shape in SHAPES.items()}


@dataclass(frozen=True, slots=True)
class OptimizerCase:
    """STEPS updates of `p` and `q` by gradients that are fed.

    `kind` and `arguments`: a class of fluid.optimizer, without learning_rate, which is `rate`. `clip`, `decay`: a class
    of fluid.clip and of fluid.regularizer with its argument. `own_decay`: the regularizer of `q` instead. `factor`: the
    learning rate of `q`. `formula`: its numbers are those of a function here, not of 2.6.2. `is_single`: 2.6.2 has the
    kernel in float32 alone, and its numbers are compared to SINGLE.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    clip: tuple[str, float] | None = None
    decay: tuple[str, float] | None = None
    own_decay: tuple[str, float] | None = None
    factor: float = 1.0
    formula: str = ""
    is_single: bool = False
    rate: float = RATE


_BETAS = {"beta1": 0.875, "beta2": 0.984375, "epsilon": EPSILON}
_LARS = {"momentum": 0.875, "lars_coeff": 0.03125, "lars_weight_decay": 0.015625}
_RMS = {"rho": 0.875, "epsilon": EPSILON, "momentum": 0.5}
OPTIMIZERS: Mapping[str, OptimizerCase] = {
    "SGD": OptimizerCase("SGD"),
    "Momentum": OptimizerCase("Momentum", {"momentum": 0.875}),
    "Momentum, Nesterov": OptimizerCase("Momentum", {"momentum": 0.875, "use_nesterov": True}),
    "LarsMomentum": OptimizerCase("LarsMomentum", _LARS),
    "LarsMomentum without decay": OptimizerCase("LarsMomentum", _LARS | {"lars_weight_decay": 0.0}),
    "Adagrad": OptimizerCase("Adagrad", {"epsilon": EPSILON, "initial_accumulator_value": 0.125}),
    "DecayedAdagrad": OptimizerCase("DecayedAdagrad", {"decay": 0.875, "epsilon": EPSILON}, is_single=True),
    "Adadelta": OptimizerCase("Adadelta", {"rho": 0.875, "epsilon": EPSILON}, rate=1.0),
    "RMSProp": OptimizerCase("RMSProp", _RMS),
    "RMSProp, centered": OptimizerCase("RMSProp", _RMS | {"centered": True}),
    "Adam": OptimizerCase("Adam", _BETAS, formula="adam"),
    "Adam without epsilon": OptimizerCase("Adam", _BETAS | {"epsilon": 0.0}),
    "AdamW": OptimizerCase("AdamW", _BETAS | {"weight_decay": 0.03125}),
    "Adamax": OptimizerCase("Adamax", _BETAS),
    "Lamb": OptimizerCase("Lamb", _BETAS | {"lamb_weight_decay": 0.03125}, formula="lamb"),
    "Ftrl": OptimizerCase("Ftrl", {"l1": 0.015625, "l2": 0.03125}, is_single=True),
    "Ftrl, power -0.75": OptimizerCase("Ftrl", {"l1": 0.015625, "l2": 0.03125, "lr_power": -0.75}, is_single=True),
    "Dpsgd": OptimizerCase("Dpsgd", {"clip": 0.5, "batch_size": 8.0, "sigma": 0.0}, is_single=True),
    "L1 decay": OptimizerCase("Momentum", {"momentum": 0.875}, decay=("L1Decay", 0.125)),
    "L2 decay": OptimizerCase("Momentum", {"momentum": 0.875}, decay=("L2Decay", 0.125)),
    "a parameter's own decay": OptimizerCase("SGD", decay=("L2Decay", 0.125), own_decay=("L1Decay", 0.25)),
    "a parameter's own rate": OptimizerCase("Adagrad", {"epsilon": EPSILON}, factor=0.25),
    "clip by value": OptimizerCase("SGD", clip=("GradientClipByValue", 0.375)),
    "clip by norm": OptimizerCase("SGD", clip=("GradientClipByNorm", 0.5), is_single=True),
    "clip by global norm": OptimizerCase("SGD", clip=("GradientClipByGlobalNorm", 0.5)),
    "clip, then decay": OptimizerCase("SGD", clip=("GradientClipByGlobalNorm", 0.5), decay=("L2Decay", 0.25)),
}


@dataclass(frozen=True, slots=True)
class SparseCase:
    """STEPS updates of a table [HEIGHT, 2] by rows that repeat; the last two rows are never used."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    formula: str = ""


SPARSE: Mapping[str, SparseCase] = {
    "SGD": SparseCase("SGD"),
    "Adagrad": SparseCase("Adagrad", {"epsilon": EPSILON}),
    "Adam, lazy": SparseCase("Adam", _BETAS | {"lazy_mode": True}, formula="lazy_adam"),
}


def table() -> Array:
    """Return what the table starts from."""
    return values((HEIGHT, 2), 3)


def rows(step: int) -> tuple[Array, Array]:
    """Return the ids [ROWS, 1] and the gradient of each row that is looked up [ROWS, 2]."""
    ids = (np.array([[0], [1], [1], [3]]) + step) % (HEIGHT - 2)
    return ids.astype(np.int64), values((ROWS, 2), 50 + step)


@dataclass(frozen=True, slots=True)
class ScheduleCase:
    """STEPS values of a schedule: calls of fluid.layers in order. BEFORE stands for the result of the call before."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]


BEFORE = "<the schedule before>"


def _one(name: str, **arguments: Any) -> ScheduleCase:
    return ScheduleCase(((name, arguments),))


def _warmup(rate: Any) -> tuple[str, Mapping[str, Any]]:
    return "linear_lr_warmup", {"learning_rate": rate, "warmup_steps": 10, "start_lr": 1 / 30, "end_lr": 0.1}


_NOAM: tuple[str, Mapping[str, Any]] = ("noam_decay", {"d_model": 64, "warmup_steps": 6, "learning_rate": 2.0})
_EXPONENTIAL: tuple[str, Mapping[str, Any]] = (
    "exponential_decay",
    {"learning_rate": 0.5, "decay_steps": 4, "decay_rate": 0.25},
)
SCHEDULES: Mapping[str, ScheduleCase] = {
    "noam_decay": ScheduleCase((_NOAM,)),
    "noam_decay after another": ScheduleCase((_EXPONENTIAL, _NOAM)),
    "exponential_decay": ScheduleCase((_EXPONENTIAL,)),
    "exponential_decay, staircase": ScheduleCase(((_EXPONENTIAL[0], {**_EXPONENTIAL[1], "staircase": True}),)),
    "exponential_decay after noam_decay": ScheduleCase((_NOAM, _EXPONENTIAL)),
    "natural_exp_decay": _one("natural_exp_decay", learning_rate=0.5, decay_steps=4, decay_rate=0.25),
    "natural_exp_decay, staircase": _one(
        "natural_exp_decay", learning_rate=0.5, decay_steps=4, decay_rate=0.25, staircase=True
    ),
    "inverse_time_decay": _one("inverse_time_decay", learning_rate=0.5, decay_steps=4, decay_rate=0.25),
    "inverse_time_decay, staircase": _one(
        "inverse_time_decay", learning_rate=0.5, decay_steps=4, decay_rate=0.25, staircase=True
    ),
    "polynomial_decay": _one("polynomial_decay", learning_rate=0.5, decay_steps=8, end_learning_rate=0.125, power=2.0),
    "polynomial_decay, cycle": _one(
        "polynomial_decay", learning_rate=0.5, decay_steps=8, end_learning_rate=0.125, power=2.0, cycle=True
    ),
    "piecewise_decay": _one("piecewise_decay", boundaries=[5, 11], values=[0.5, 0.25, 0.125]),
    "cosine_decay": _one("cosine_decay", learning_rate=0.5, step_each_epoch=3, epochs=6),
    "linear_lr_warmup to a number": ScheduleCase((_warmup(0.1),)),
    "linear_lr_warmup to noam_decay": ScheduleCase((_NOAM, _warmup(BEFORE))),
    "linear_lr_warmup to exponential_decay": ScheduleCase((_EXPONENTIAL, _warmup(BEFORE))),
}

INITIALIZERS: Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]] = {
    "Constant": ("Constant", {"value": 0.25}, (3, 2)),
    "Uniform": ("Uniform", {}, (3, 2)),
    "Uniform, bounds": ("Uniform", {"low": -0.25, "high": 0.5}, (3, 2)),
    "Normal": ("Normal", {"loc": 0.5, "scale": 0.25}, (3, 2)),
    "TruncatedNormal": ("TruncatedNormal", {"loc": 0.5, "scale": 0.25}, (3, 2)),
    **{
        f"{kind}{'' if uniform else ', normal'} {list(shape)}": (kind, {"uniform": uniform}, shape)
        for kind in ("Xavier", "MSRA")
        for uniform in (True, False)
        for shape in ((7,), (6, 4), (8, 3, 5, 2))
    },
    "Xavier, fans": ("Xavier", {"fan_in": 5.0, "fan_out": 0.0}, (6, 4)),
    "MSRA, fan": ("MSRA", {"fan_in": 5.0}, (6, 4)),
}


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One layer of fluid.layers, forward and the gradient of its first input, for sum(output * weights).

    `inputs`: arrays by the layer's names of arguments. `operator`, `names`, `output`, `attributes`: how Fluid's
    operator calls it, its inputs, its output and `arguments`; without `operator`, it is a layer of 2.6.2's static.nn.
    `is_single`: as above, or a default (0.02, 0.2) that Fluid rounds to float32.
    """

    layer: str
    inputs: Mapping[str, Array]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    operator: str = ""
    names: tuple[str, ...] = ("X",)
    output: str = "Out"
    attributes: Mapping[str, Any] | None = None
    formula: str = ""
    is_single: bool = False


_X = values((4, 3), 1, -3.0, 3.0)
_OTHER = values((4, 3), 2, -3.0, 3.0)
_PROBABILITIES = values((4, 3), 4, 0.25, 1.0)
_SHARE = values((4, 1), 5, 0.125, 0.875)
_BINARY = np.array([[0.0], [1.0], [1.0], [0.0]])
_IDS = np.array([[0], [2], [1], [2]], dtype=np.int64)
_SOFT = np.array([[0.25, 0.25, 0.5], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.125, 0.125, 0.75]])
_FLAGS = np.array([[0.0, 1.0, -1.0], [1.0, 1.0, 0.0], [0.0, -1.0, 0.0], [1.0, 0.0, 1.0]])
_IMAGES = values((2, 6, 2, 2), 6)


def _plain(layer: str, operator: str = "", **arguments: Any) -> LayerCase:
    return LayerCase(layer, {"x": _X}, arguments, operator or layer)


def _labelled(
    layer: str, first: str, x: Array, label: Array, names: tuple[str, ...], output: str, **more: Any
) -> LayerCase:
    return LayerCase(layer, {first: x, "label": label}, more, layer, names, output)


_ENTROPY = (("X", "Label"), "Y")
_TINY = _PROBABILITIES * 1e-30
_SOFTMAX = (("Logits", "Label"), "Loss")
LAYERS: Mapping[str, LayerCase] = {
    "relu": _plain("relu"),
    "sigmoid": _plain("sigmoid"),
    "tanh": _plain("tanh"),
    "softmax": LayerCase("softmax", {"input": _X}, {}, "softmax", attributes={"axis": -1}),
    "softmax over axis 0": LayerCase("softmax", {"input": _X}, {"axis": 0}, "softmax"),
    "leaky_relu": LayerCase("leaky_relu", {"x": _X}, {}, "leaky_relu", attributes={"alpha": 0.02}, is_single=True),
    "leaky_relu, alpha": _plain("leaky_relu", alpha=0.125),
    "elu": _plain("elu"),
    "elu, alpha": _plain("elu", alpha=0.25),
    "gelu": _plain("gelu"),
    "gelu, approximate": _plain("gelu", approximate=True),
    "swish": _plain("swish"),
    "swish, beta": LayerCase("swish", {"x": _X}, {"beta": 0.5}, formula="swish"),
    "hard_sigmoid": LayerCase(
        "hard_sigmoid", {"x": _X}, {}, "hard_sigmoid", attributes={"slope": 0.2, "offset": 0.5}, is_single=True
    ),
    "hard_sigmoid, slope and offset": _plain("hard_sigmoid", slope=0.25, offset=0.375),
    "pow": LayerCase("pow", {"x": _PROBABILITIES}, {"factor": 2.5}, "pow"),
    "scale": _plain("scale", scale=2.0, bias=0.5),
    "scale, bias first": _plain("scale", scale=2.0, bias=0.5, bias_after_scale=False),
    "clip": _plain("clip", min=-0.5, max=1.5),
    "lrn": LayerCase("lrn", {"input": _IMAGES}, {"n": 3, "k": 1.5, "alpha": 0.25, "beta": 0.75}, "lrn", is_single=True),
    "l2_normalize": LayerCase(
        "l2_normalize", {"x": _X}, {"axis": 1, "epsilon": EPSILON}, "norm", attributes={"axis": 1, "epsilon": EPSILON}
    ),
    "batch_norm": LayerCase("batch_norm", {"input": _IMAGES}, {"epsilon": EPSILON}),
    "layer_norm": LayerCase("layer_norm", {"input": _IMAGES}, {"epsilon": EPSILON}),
    "layer_norm, begin_norm_axis": LayerCase("layer_norm", {"input": _IMAGES}, {"begin_norm_axis": 2}),
    "cross_entropy": _labelled("cross_entropy", "input", _PROBABILITIES, _IDS, *_ENTROPY),
    "cross_entropy, soft_label": _labelled("cross_entropy", "input", _PROBABILITIES, _SOFT, *_ENTROPY, soft_label=True),
    "cross_entropy, ignore_index": _labelled("cross_entropy", "input", _PROBABILITIES, _IDS, *_ENTROPY, ignore_index=2),
    "cross_entropy, negative ignore_index": _labelled(
        "cross_entropy", "input", _PROBABILITIES, np.where(_IDS == 2, -1, _IDS), *_ENTROPY, ignore_index=-1
    ),
    "cross_entropy, underflow": _labelled("cross_entropy", "input", _TINY, _IDS, *_ENTROPY),
    "cross_entropy, underflow, soft_label": _labelled(
        "cross_entropy", "input", _TINY, _SOFT, *_ENTROPY, soft_label=True
    ),
    "softmax_with_cross_entropy": _labelled("softmax_with_cross_entropy", "logits", _X, _IDS, *_SOFTMAX),
    "softmax_with_cross_entropy, soft_label": _labelled(
        "softmax_with_cross_entropy", "logits", _X, _SOFT, *_SOFTMAX, soft_label=True
    ),
    "softmax_with_cross_entropy, ignore_index": _labelled(
        "softmax_with_cross_entropy", "logits", _X, _IDS, *_SOFTMAX, ignore_index=2
    ),
    "softmax_with_cross_entropy, negative ignore_index": _labelled(
        "softmax_with_cross_entropy", "logits", _X, np.where(_IDS == 2, -1, _IDS), *_SOFTMAX, ignore_index=-1
    ),
    "softmax_with_cross_entropy, ignore_index above all classes": _labelled(
        "softmax_with_cross_entropy", "logits", _X, np.where(_IDS == 2, 255, _IDS), *_SOFTMAX, ignore_index=255
    ),
    "softmax_with_cross_entropy, axis": _labelled(
        "softmax_with_cross_entropy", "logits", _X, np.array([[0, 3, 1]]), *_SOFTMAX, axis=0
    ),
    "log_loss": LayerCase(
        "log_loss",
        {"input": _SHARE, "label": _BINARY},
        {"epsilon": EPSILON},
        "log_loss",
        ("Predicted", "Labels"),
        "Loss",
        is_single=True,
    ),
    "sigmoid_cross_entropy_with_logits": _labelled(
        "sigmoid_cross_entropy_with_logits", "x", _X, np.abs(_FLAGS), ("X", "Label"), "Out"
    ),
    "sigmoid_cross_entropy_with_logits, normalize": _labelled(
        "sigmoid_cross_entropy_with_logits", "x", _X, _FLAGS, ("X", "Label"), "Out", ignore_index=-1, normalize=True
    ),
    "huber_loss": _labelled("huber_loss", "input", _X, _OTHER, ("X", "Y"), "Out", delta=0.75),
    "square_error_cost": LayerCase("square_error_cost", {"input": _X, "label": _OTHER}, formula="square_error"),
    "smooth_l1": LayerCase("smooth_l1", {"x": _X, "y": _OTHER}, {"sigma": 1.5}, formula="smooth_l1"),
    "cos_sim": LayerCase("cos_sim", {"X": _X, "Y": _OTHER}, formula="cos_sim"),
}


@dataclass(frozen=True, slots=True)
class MetricCase:
    """A metric over batches of (prediction, label); the value after each."""

    layer: str
    batches: tuple[tuple[Array, Array], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _scores(seed: int) -> tuple[Array, Array]:
    share = values((8, 1), seed, 0.0, 1.0)
    return np.hstack([1.0 - share, share]), ((np.arange(8) * 5 + seed) % 8 < 3).astype(np.int64).reshape(8, 1)


_BATCHES = tuple(_scores(30 + k) for k in range(3))
_EDGES = np.arange(8, dtype=np.float32).reshape(8, 1) / np.float32(7)
_CLASSES = tuple((values((8, 5), 60 + k), np.arange(8, dtype=np.int64).reshape(8, 1) % 5) for k in range(3))
METRICS: Mapping[str, MetricCase] = {
    "auc": MetricCase("auc", _BATCHES),
    "auc, 7 thresholds": MetricCase("auc", _BATCHES, {"num_thresholds": 7}),
    "auc at the edges of bins": MetricCase(
        "auc", ((np.hstack([1 - _EDGES, _EDGES]), _BATCHES[0][1]),), {"num_thresholds": 7}
    ),
    "auc of the last 2 batches": MetricCase("auc", _BATCHES, {"slide_steps": 2}),
    "auc of all batches": MetricCase("auc", _BATCHES, {"slide_steps": 0}),
    "auc of one class": MetricCase("auc", ((_BATCHES[0][0], np.ones((8, 1), np.int64)),)),
    "accuracy": MetricCase("accuracy", _CLASSES),
    "accuracy, k = 3": MetricCase("accuracy", _CLASSES, {"k": 3}),
}


@dataclass(frozen=True, slots=True)
class RecurrentCase:
    """`dynamic_lstm` over ragged rows of `LENGTHS`: outputs, and gradients for sum(hidden * weights)."""

    use_peepholes: bool
    is_reverse: bool

    def inputs(self) -> dict[str, Array]:
        """Return rows [8, 4 h], weight [h, 4 h], bias [1, 4 h] or, with peepholes, [1, 7 h], and weights [8, h]."""
        bias = (1, (7 if self.use_peepholes else 4) * HIDDEN)
        shapes = {"rows": (sum(LENGTHS), 4 * HIDDEN), "weight": (HIDDEN, 4 * HIDDEN), "bias": bias}
        shapes["weights"] = (sum(LENGTHS), HIDDEN)
        return {name: values(shape, 80 + seed) for seed, (name, shape) in enumerate(shapes.items())}


LENGTHS, HIDDEN = (3, 1, 4), 2
RECURRENT: Mapping[str, RecurrentCase] = {
    f"lstm{', peepholes' if peepholes else ''}{', reverse' if reverse else ''}": RecurrentCase(peepholes, reverse)
    for peepholes in (False, True)
    for reverse in (False, True)
}


# -- formulas of Fluid 1.8 that 2.6.2 does not have as they were ------------------------------------------------------


def _adam_step(case: OptimizerCase | SparseCase, state: list[Array], g: Array, t: int) -> None:
    """Change parameter and moments in place, at the rows of `g` that are not NaN."""
    b1, b2, epsilon = (case.arguments[name] for name in ("beta1", "beta2", "epsilon"))
    p, m, s = state
    used = ~np.isnan(g)
    m[used] = b1 * m[used] + (1 - b1) * g[used]
    s[used] = b2 * s[used] + (1 - b2) * g[used] ** 2
    p[used] -= RATE * math.sqrt(1 - b2**t) / (1 - b1**t) * (m[used] / (np.sqrt(s[used]) + epsilon))


def adam(case: OptimizerCase) -> dict[str, list[Array]]:
    """paddle/fluid/operators/optimizers/adam_op.h (1.8): epsilon beside the uncorrected root; 2.0 moved it."""
    trail: dict[str, list[Array]] = {name: [] for name in SHAPES}
    for name, p in parameters().items():
        state = [p, np.zeros_like(p), np.zeros_like(p)]
        for step in range(STEPS):
            _adam_step(case, state, gradients(step)[name], step + 1)
            trail[name].append(p.copy())
    return trail


def lamb(case: OptimizerCase) -> dict[str, list[Array]]:
    """paddle/fluid/operators/optimizers/lamb_op.h (1.8): moments are not corrected; 2.0 corrects them."""
    b1, b2, epsilon, decay = (case.arguments[k] for k in ("beta1", "beta2", "epsilon", "lamb_weight_decay"))
    trail: dict[str, list[Array]] = {name: [] for name in SHAPES}
    for name, p in parameters().items():
        m, s = np.zeros_like(p), np.zeros_like(p)
        for step in range(STEPS):
            g = gradients(step)[name]
            m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * g * g
            change = m / (np.sqrt(s) + epsilon) + decay * p
            p = p - RATE * np.linalg.norm(p) / np.linalg.norm(change) * change
            trail[name].append(p)
    return trail


def lazy_adam(case: SparseCase) -> dict[str, list[Array]]:
    """As `adam`, of the rows that are used. The CPU kernels of 1.8 and 2.6.2 raise the betas to t + 1 here alone."""
    trail: list[Array] = []
    state = [table(), np.zeros((HEIGHT, 2)), np.zeros((HEIGHT, 2))]
    for step in range(STEPS):
        ids, values_of_rows = rows(step)
        g = np.full((HEIGHT, 2), np.nan)
        g[ids[:, 0]] = 0.0
        np.add.at(g, ids[:, 0], values_of_rows)
        _adam_step(case, state, g, step + 1)
        trail.append(state[0].copy())
    return {"table": trail}


def swish(inputs: Mapping[str, Array], beta: float = 0.5) -> tuple[Array, Array]:
    """paddle/fluid/operators/activation_op.h (1.8), SwishFunctor; the operator of 2.6.2 does not read its beta."""
    x = inputs["x"]
    share = 1 / (1 + np.exp(-beta * x))
    return x * share, share + beta * x * share * (1 - share)


def square_error(inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """python/paddle/fluid/layers/loss.py (1.8), square_error_cost: the square of input - label; its derivative."""
    d = inputs["input"] - inputs["label"]
    return d * d, 2 * d


def smooth_l1(inputs: Mapping[str, Array], sigma: float = 1.5) -> tuple[Array, Array]:
    """paddle/fluid/operators/smooth_l1_loss_op.h (1.8): sums of rows; the derivative of each element."""
    d, square = inputs["x"] - inputs["y"], sigma * sigma
    near = np.abs(d) < 1 / square
    loss = np.where(near, 0.5 * square * d * d, np.abs(d) - 0.5 / square)
    return loss.sum(1, keepdims=True), np.where(near, square * d, np.sign(d))


def cos_sim(inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """paddle/fluid/operators/cos_sim_op.h (1.8); the derivative by X."""
    x, y = inputs["X"], inputs["Y"]
    of_x, of_y = (np.sqrt((v * v).sum(1, keepdims=True)) for v in (x, y))
    z = (x * y).sum(1, keepdims=True) / (of_x * of_y)
    return z, y / (of_x * of_y) - z * x / (of_x * of_x)
