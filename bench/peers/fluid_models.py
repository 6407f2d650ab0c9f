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
    "classes": np.array([[1], [3]], np.int64),
    "shares": np.abs(_values(2, 4)) / np.abs(_values(2, 4)).sum(1, keepdims=True),
    "flags": _values(2, 4) > 0,
    "gates": _values(5, 8) * np.float32(2.0),
    "updates": _values(5, 6) * np.float32(1.5),
    "steps": _values(2, 4, 3),
    "volume": _values(2, 1, 3, 4, 4),
    "divisors": np.array([[2], [2]], np.int64),
    "order": np.array([1, 0], np.int64),
    "order2": np.array([[1], [0]], np.int64),
    "places": np.array([[1, 2], [0, 3]], np.int64),
    "picks": np.array([[1], [0]], np.int32),
    "column01": np.array([[0.3], [0.8]], np.float32),
    "column10": np.array([[1.0], [0.0]], np.float32),
    "update": _values(2, 6),
    "other2": _values(2, 2)[::-1].copy(),
    "starts": np.zeros([2, 1], np.int64),
    "start_scores": np.zeros([2, 1], np.float32),
}
LEVELS: dict[str, list[list[int]]] = {
    **{name: [list(LENGTHS)] for name, array in FEEDS.items() if len(array) == sum(LENGTHS)},
    "starts": [[1, 1], [1, 1]],
    "start_scores": [[1, 1], [1, 1]],
}
"""Lengths of sequences, outermost level first."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operator. `inputs`: names of `FEEDS` by slot; `parameters`: shapes by slot; the first output is compared.

    "Weights.1" is the second variable of a slot."""

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
    **{f"{name} of one": Case(name, _DENSE) for name in (
        "sin", "cos", "atan", "ceil", "floor", "sign", "erf", "gelu", "logsigmoid", "log_softmax", "mean", "sinh",
        "cosh", "tan", "expm1", "silu", "squared_l2_norm", "assign", "fill_zeros_like", "fill_any_like", "round",
        "reciprocal", "mish", "tanh_shrink", "softshrink", "hard_shrink", "hard_swish", "relu6", "selu", "stanh",
        "soft_relu", "brelu", "thresholded_relu",
    )},
    **{f"{name} of shares": Case(name, {"X": ("shares",)}) for name in (
        "log", "sqrt", "rsqrt", "log1p", "log2", "asin",
    )},
    **{f"{name} of two": Case(name, _TWO) for name in (
        "elementwise_div", "less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal", "minus",
        "kron", "elementwise_floordiv",
    )},
    **{f"{name} of flags": Case(name, {"X": ("flags",), "Y": ("flags",)}) for name in ("logical_and", "logical_xor")},
    "logical_not": Case("logical_not", {"X": ("flags",)}),
    "elementwise_add at an axis": Case("elementwise_add", _IMAGE, attributes={"axis": 1}, parameters={"Y": (3,)}),
    "elementwise_mod": Case("elementwise_mod", {"X": ("classes",), "Y": ("divisors",)}),
    "elementwise_pow": Case("elementwise_pow", {"X": ("shares",), "Y": ("other",)}),
    "reduce_max": Case("reduce_max", _IMAGE, attributes={"dim": [-1], "keep_dim": True}),
    "reduce_min of all": Case("reduce_min", _IMAGE, attributes={"reduce_all": True}),
    "reduce_prod": Case("reduce_prod", _DENSE, attributes={"dim": [1]}),
    "reduce_any": Case("reduce_any", {"X": ("flags",)}, attributes={"dim": [1]}),
    "reduce_all": Case("reduce_all", {"X": ("flags",)}, attributes={"dim": [1]}),
    "logsumexp": Case("logsumexp", _DENSE, attributes={"axis": [1], "keepdim": True}),
    "cumsum": Case("cumsum", _DENSE, attributes={"axis": 1, "exclusive": True, "reverse": True}),
    "arg_min": Case("arg_min", _DENSE, attributes={"axis": 1, "keepdims": True, "dtype": 3}),
    "argsort": Case("argsort", _DENSE, ("Out", "Indices"), {"axis": 1, "descending": True}),
    "top_k_v2": Case("top_k_v2", _DENSE, ("Out", "Indices"), {"k": 2, "axis": 1, "largest": False}),
    "clip_by_norm": Case("clip_by_norm", _DENSE, attributes={"max_norm": 0.5}),
    "maxout": Case("maxout", _IMAGE, attributes={"groups": 3, "axis": 1}),
    "norm": Case("norm", _DENSE, ("Out", "Norm"), {"axis": 1, "epsilon": 1e-6}),
    "label_smooth": Case("label_smooth", {"X": ("shares",)}, attributes={"epsilon": 0.2}),
    "matmul_v2": Case("matmul_v2", _TWO, attributes={"trans_y": True}),
    "bmm": Case("bmm", {"X": ("steps",)}, parameters={"Y": (2, 3, 2)}),
    "mul of many": Case("mul", _IMAGE, attributes={"x_num_col_dims": 2}, parameters={"Y": (36, 2)}),
    "bilinear_tensor_product": Case(
        "bilinear_tensor_product", _TWO, parameters={"Weight": (3, 4, 4), "Bias": (1, 3)}
    ),
    "conv3d": Case("conv3d", {"Input": ("volume",)}, ("Output",), {
        "strides": [1, 2, 2], "paddings": [0, 1, 1], "dilations": [1, 1, 1], "groups": 1,
    }, {"Filter": (2, 1, 2, 3, 3)}),
    "pool3d": Case("pool3d", {"X": ("volume",)}, attributes={
        "strides": [1, 1, 1], "paddings": [0, 0, 0], "ksize": [2, 2, 2], "pooling_type": "avg",
    }),
    "adaptive pool2d": Case("pool2d", _IMAGE, attributes={"ksize": [2, 3], "pooling_type": "avg", "adaptive": True}),
    "group_norm": Case("group_norm", _IMAGE, ("Y", "Mean", "Variance"), {"groups": 3, "epsilon": 1e-3},
                       {"Scale": (3,), "Bias": (3,)}),
    "instance_norm": Case("instance_norm", _IMAGE, ("Y", "SavedMean", "SavedVariance"), {"epsilon": 1e-3},
                          {"Scale": (3,), "Bias": (3,)}),
    "affine_channel": Case("affine_channel", _IMAGE, attributes={"data_layout": "NCHW"},
                           parameters={"Scale": (3,), "Bias": (3,)}),
    "bilinear_interp": Case("bilinear_interp", _IMAGE, attributes={
        "out_h": 4, "out_w": 9, "align_corners": False, "align_mode": 0, "interp_method": "bilinear",
    }),
    "nearest_interp": Case("nearest_interp", _IMAGE, attributes={
        "out_h": 12, "out_w": 12, "align_corners": False, "interp_method": "nearest",
    }),
    "shuffle_channel": Case("shuffle_channel", _IMAGE, attributes={"group": 3}),
    "unfold": Case("unfold", _IMAGE, ("Y",), {
        "kernel_sizes": [2, 2], "strides": [2, 2], "paddings": [0, 0, 0, 0], "dilations": [1, 1],
    }),
    "stack": Case("stack", {"X": ("dense", "other")}, ("Y",), {"axis": 1}),
    "tile": Case("tile", _DENSE, attributes={"repeat_times": [1, 2]}),
    "expand": Case("expand", _DENSE, attributes={"expand_times": [1, 3]}),
    "expand_v2": Case("expand_v2", {"X": ("classes",)}, attributes={"shape": [-1, 3]}),
    "gather": Case("gather", {"X": ("dense",), "Index": ("order",)}),
    "gather_nd": Case("gather_nd", {"X": ("dense",), "Index": ("places",)}),
    "scatter": Case("scatter", {"X": ("dense",), "Ids": ("order",), "Updates": ("other",)}),
    "scatter_nd_add": Case("scatter_nd_add", {"X": ("dense",), "Index": ("order2",), "Updates": ("other",)}),
    "index_select": Case("index_select", {"X": ("dense",), "Index": ("order",)}, attributes={"dim": 1}),
    "index_sample": Case("index_sample", {"X": ("dense",), "Index": ("classes",)}),
    "pad": Case("pad", _DENSE, attributes={"paddings": [0, 0, 1, 2], "pad_value": 0.5}),
    "reverse": Case("reverse", _DENSE, attributes={"axis": [1]}),
    "flip": Case("flip", _DENSE, attributes={"axis": [1]}),
    "roll": Case("roll", _DENSE, attributes={"shifts": [1], "axis": [1]}),
    "tril_triu": Case("tril_triu", {"X": ("steps",)}, attributes={"diagonal": 1, "lower": True}),
    "diag_embed": Case("diag_embed", {"Input": ("dense",)}),
    "one_hot_v2": Case("one_hot_v2", {"X": ("classes",)}, attributes={"depth": 5, "dtype": 5}),
    "where": Case("where", {"Condition": ("flags",), **_TWO}),
    "multiplex": Case("multiplex", {"X": ("dense", "other"), "Ids": ("picks",)}),
    "slice of a column": Case("slice", {"Input": ("dense",)}, attributes={
        "axes": [1], "starts": [1], "ends": [2], "decrease_axis": [1],
    }),
    "strided_slice": Case("strided_slice", {"Input": ("dense",)}, attributes={
        "axes": [1], "starts": [0], "ends": [4], "strides": [2], "infer_flags": [1],
    }),
    "unstack": Case("unstack", {"X": ("classes",)}, ("Y",), {"axis": 1, "num": 1}),
    "fill_constant": Case("fill_constant", {}, attributes={"shape": [2, 3], "dtype": 5, "value": 1.5}),
    "fill of a batch": Case("fill_constant_batch_size_like", {"Input": ("dense",)}, attributes={
        "shape": [-1, 2], "dtype": 3, "value": 4.0,
    }),
    "assign_value": Case("assign_value", {}, attributes={
        "shape": [2, 2], "dtype": 5, "fp32_values": [1.0, 2.0, 3.0, 4.5],
    }),
    "cross_entropy": Case("cross_entropy", {"X": ("shares",), "Label": ("classes",)}, ("Y",)),
    "cross_entropy of shares": Case("cross_entropy", {"X": ("shares",), "Label": ("shares",)}, ("Y",), {
        "soft_label": True,
    }),
    "softmax_with_cross_entropy": Case("softmax_with_cross_entropy", {
        "Logits": ("dense",), "Label": ("classes",),
    }, ("Loss", "Softmax")),
    "sigmoid_cross_entropy_with_logits": Case("sigmoid_cross_entropy_with_logits", {
        "X": ("dense",), "Label": ("shares",),
    }),
    "log_loss": Case("log_loss", {"Predicted": ("column01",), "Labels": ("column10",)}, ("Loss",), {"epsilon": 1e-4}),
    "huber_loss": Case("huber_loss", _TWO, ("Out", "Residual"), {"delta": 0.4}),
    "kldiv_loss": Case("kldiv_loss", {"X": ("dense",), "Target": ("shares",)}, ("Loss",), {"reduction": "none"}),
    "hinge_loss": Case("hinge_loss", {"Logits": ("column01",), "Labels": ("column10",)}, ("Loss",)),
    "bpr_loss": Case("bpr_loss", {"X": ("dense",), "Label": ("classes",)}, ("Y",)),
    "rank_loss": Case("rank_loss", {"Label": ("column10",), "Left": ("column01",), "Right": ("column10",)}),
    "sequence_mask": Case("sequence_mask", {"X": ("order",)}, ("Y",), {"maxlen": 4, "out_dtype": 5}),
    "sequence_expand": Case("sequence_expand", {"X": ("dense",), "Y": ("words",)}),
    "sequence_enumerate": Case("sequence_enumerate", {"X": ("ids",)}, attributes={"win_size": 2, "pad_value": 7}),
    "sequence_pad": Case("sequence_pad", _WORDS, ("Out", "Length"), {"padded_length": 4}, {"PadValue": (1,)}),
    "lstm": Case("lstm", {"Input": ("gates",)}, ("Hidden", "Cell", "BatchGate", "BatchCellPreAct"), {
        "use_peepholes": True, "is_reverse": True,
    }, {"Weight": (2, 8), "Bias": (1, 14)}),
    "lstm of relu": Case("lstm", {"Input": ("gates",)}, ("Cell", "Hidden", "BatchGate", "BatchCellPreAct"), {
        "use_peepholes": False, "candidate_activation": "relu",
    }, {"Weight": (2, 8), "Bias": (1, 8), "H0": (2, 2), "C0": (2, 2)}),
    "gru": Case("gru", {"Input": ("updates",)}, ("Hidden", "BatchGate", "BatchResetHiddenPrev", "BatchHidden"), {
        "origin_mode": True,
    }, {"Weight": (2, 6), "Bias": (1, 6), "H0": (2, 2)}),
    "gru backwards": Case(
        "gru", {"Input": ("updates",)}, ("Hidden", "BatchGate", "BatchResetHiddenPrev", "BatchHidden"),
        {"is_reverse": True}, {"Weight": (2, 6)},
    ),
    "gru_unit": Case("gru_unit", {"Input": ("update",), "HiddenPrev": ("other2",)}, (
        "Hidden", "Gate", "ResetHiddenPrev",
    ), {"activation": 2, "gate_activation": 1}, {"Weight": (2, 6), "Bias": (1, 6)}),
    "rnn of LSTM": Case("rnn", {"Input": ("steps",)}, ("Out", "State.0", "State.1", "Reserve", "DropoutState"), {
        "mode": "LSTM", "input_size": 3, "hidden_size": 2, "num_layers": 1, "is_bidirec": True, "is_test": True,
    }, {
        "PreState.0": (2, 4, 2), "PreState.1": (2, 4, 2),
        **{f"WeightList.{i}": shape for i, shape in enumerate([(8, 3), (8, 2)] * 2 + [(8,)] * 4)},
    }),
    "rnn of GRU": Case("rnn", {"Input": ("steps",)}, ("Out", "State", "Reserve", "DropoutState"), {
        "mode": "GRU", "input_size": 3, "hidden_size": 2, "num_layers": 2, "is_test": True,
    }, {
        "PreState.0": (2, 4, 2),
        **{f"WeightList.{i}": shape for i, shape in enumerate([(6, 3), (6, 2), (6, 2), (6, 2)] + [(6,)] * 4)},
    }),
}  # fmt: skip
