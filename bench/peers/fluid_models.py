"""Operators that a model of Fluid may have, with their inputs: what `paddle_saves` saves, and Penstock runs.

Inputs are named: `ids`, `words` and `column` are rows of two sequences, the others two rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LENGTHS = (2, 3)


def _values(*sizes: int) -> np.ndarray:
    """Values between -1 and 1 without a pattern that an operator could hide."""
    count = int(np.prod(sizes))
    return np.sin(np.arange(1, count + 1, dtype=np.float64) * 1.7).astype(np.float32).reshape(sizes)


FEEDS: dict[str, np.ndarray] = {
    "ids": np.array([[1], [2], [3], [4], [5]], np.int64),
    "words": _values(5, 3),
    "column": _values(5, 1),
    "dense": _values(2, 4),
    "other": _values(2, 4)[::-1].copy() + np.float32(0.3),
    "image": _values(2, 3, 6, 6),
    "label": np.array([[0], [2]], np.int64),
}


@dataclass(frozen=True, slots=True)
class Case:
    """An operator. `inputs`: names of `FEEDS` by slot; `parameters`: shapes by slot; the first output is compared."""

    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...] = ("Out",)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_DENSE: Mapping[str, tuple[str, ...]] = {"X": ("dense",)}
_WORDS: Mapping[str, tuple[str, ...]] = {"X": ("words",)}
_IMAGE: Mapping[str, tuple[str, ...]] = {"X": ("image",)}
_TWO: Mapping[str, tuple[str, ...]] = {"X": ("dense",), "Y": ("other",)}
_WINDOW = {"strides": [2, 2], "paddings": [1, 1]}

OPERATORS: dict[str, Case] = {
    **{name: Case(name, _DENSE) for name in (
        "relu", "sigmoid", "tanh", "exp", "abs", "square", "softsign", "softplus", "softmax",
    )},
    **{f"elementwise_{name}": Case(f"elementwise_{name}", _TWO) for name in ("add", "sub", "mul", "max", "min")},
    **{f"pool of {kind}": Case("sequence_pool", _WORDS, ("Out", "MaxIndex"), {"pooltype": kind}) for kind in (
        "SUM", "AVERAGE", "SQRT", "MAX", "LAST", "FIRST",
    )},
    "mul": Case("mul", _DENSE, parameters={"Y": (4, 3)}),
    "matmul": Case("matmul", _TWO, attributes={"transpose_Y": True, "alpha": 0.5}),
    "lookup_table": Case("lookup_table", {"Ids": ("ids",)}, attributes={"padding_idx": 2}, parameters={"W": (6, 3)}),
    "lookup_table_v2": Case("lookup_table_v2", {"Ids": ("ids",)}, parameters={"W": (6, 3)}),
    "leaky_relu": Case("leaky_relu", _DENSE, attributes={"alpha": 0.1}),
    "elu": Case("elu", _DENSE, attributes={"alpha": 0.7}),
    "swish": Case("swish", _DENSE, attributes={"beta": 1.0}),
    "hard_sigmoid": Case("hard_sigmoid", _DENSE, attributes={"slope": 0.3, "offset": 0.4}),
    "pow": Case("pow", {"X": ("dense",)}, attributes={"factor": 2.0}),
    "clip": Case("clip", _DENSE, attributes={"min": -0.5, "max": 0.5}),
    "scale": Case("scale", _DENSE, attributes={"scale": 2.0, "bias": 1.0, "bias_after_scale": False}),
    "cast": Case("cast", _DENSE, attributes={"in_dtype": 5, "out_dtype": 6}),
    "reduce_sum": Case("reduce_sum", _IMAGE, attributes={"dim": [1, 2], "keep_dim": True}),
    "reduce_mean": Case("reduce_mean", _IMAGE, attributes={"dim": [3]}),
    "concat": Case("concat", {"X": ("dense", "other")}, attributes={"axis": 1}),
    "sum": Case("sum", {"X": ("dense", "other")}),
    "split": Case("split", _DENSE, attributes={"axis": 1, "sections": [4], "num": 0}),
    "slice": Case("slice", {"Input": ("image",)}, attributes={"axes": [2, 3], "starts": [1, 0], "ends": [4, -1]}),
    "reshape2": Case("reshape2", _IMAGE, ("Out", "XShape"), {"shape": [-1, 9, 12]}),
    "transpose2": Case("transpose2", _IMAGE, ("Out", "XShape"), {"axis": [0, 2, 3, 1]}),
    "flatten2": Case("flatten2", _IMAGE, ("Out", "XShape"), {"axis": 1}),
    "unsqueeze2": Case("unsqueeze2", _DENSE, ("Out", "XShape"), {"axes": [1]}),
    "dropout": Case("dropout", _DENSE, ("Out", "Mask"), {
        "dropout_prob": 0.3, "is_test": True, "dropout_implementation": "downgrade_in_infer",
    }),
    "conv2d": Case("conv2d", {"Input": ("image",)}, ("Output",), {
        **_WINDOW, "dilations": [1, 1], "groups": 1,
    }, {"Filter": (4, 3, 3, 3)}),
    "depthwise_conv2d": Case("depthwise_conv2d", {"Input": ("image",)}, ("Output",), {
        **_WINDOW, "dilations": [1, 1], "groups": 3, "use_cudnn": False,
    }, {"Filter": (3, 1, 3, 3)}),
    "conv2d_transpose": Case("conv2d_transpose", {"Input": ("image",)}, ("Output",), {
        **_WINDOW, "dilations": [1, 1], "groups": 1,
    }, {"Filter": (3, 2, 3, 3)}),
    "pool2d of max": Case("pool2d", _IMAGE, attributes={**_WINDOW, "ksize": [3, 3], "pooling_type": "max"}),
    "pool2d of avg": Case("pool2d", _IMAGE, attributes={
        **_WINDOW, "ksize": [3, 3], "pooling_type": "avg", "exclusive": True,
    }),
    "pool2d of all": Case("pool2d", _IMAGE, attributes={
        "ksize": [1, 1], "pooling_type": "avg", "global_pooling": True,
    }),
    "batch_norm": Case(
        "batch_norm", _IMAGE, ("Y", "MeanOut", "VarianceOut", "SavedMean", "SavedVariance"),
        {"is_test": True, "epsilon": 1e-3}, dict.fromkeys(("Scale", "Bias", "Mean", "Variance"), (3,)),
    ),
    "layer_norm": Case(
        "layer_norm", _IMAGE, ("Y", "Mean", "Variance"), {"begin_norm_axis": 1}, {"Scale": (108,), "Bias": (108,)}
    ),
    "prelu": Case("prelu", _IMAGE, attributes={"mode": "channel"}, parameters={"Alpha": (1, 3, 1, 1)}),
    "top_k": Case("top_k", _DENSE, ("Out", "Indices"), {"k": 2}),
    "arg_max": Case("arg_max", _DENSE, attributes={"axis": 1, "dtype": 3}),
    "sequence_conv": Case("sequence_conv", _WORDS, attributes={
        "contextStart": -1, "contextLength": 3, "contextStride": 1,
    }, parameters={"Filter": (9, 2)}),
    "sequence_softmax": Case("sequence_softmax", {"X": ("column",)}),
    "sequence_reverse": Case("sequence_reverse", _WORDS, ("Y",)),
    "sequence_expand_as": Case("sequence_expand_as", {"X": ("dense",), "Y": ("words",)}),
    "sequence_concat": Case("sequence_concat", {"X": ("words", "words")}),
}  # fmt: skip
