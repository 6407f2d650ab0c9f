"""Kinds that work element by element, compare or reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer


def _scale(call: Call) -> Any:
    factor = call.optional("ScaleTensor")
    number = call["scale"] if factor is None else factor
    return layers.scale(call.one("X"), number, call["bias"], call["bias_after_scale"])


def _clip(call: Call) -> Any:
    least, most = call.optional("Min"), call.optional("Max")
    return layers.clip(call.one("X"), call["min"] if least is None else least, call["max"] if most is None else most)


def _power(call: Call) -> Any:
    factor = call.optional("FactorTensor")
    return layers.pow(call.one("X"), call["factor"] if factor is None else factor)


def _compared(kind: str) -> Kind:
    function = getattr(layers, kind)

    def make(call: Call) -> Any:
        x, y, axis = call.one("X"), call.one("Y"), call["axis"]
        behind = x.ndim - y.ndim - axis if axis >= 0 else 0
        return function(x, y.reshape([*y.shape, *[1] * behind]) if behind > 0 else y)

    return Kind(make, "X Y", "Out", {"axis": -1})


def _reduced(kind: str) -> Kind:
    function = getattr(layers, kind)

    def make(call: Call) -> Any:
        dims = None if call["reduce_all"] else call["dim"]
        made = function(call.one("X"), dims, call["keep_dim"])
        kept = call.dtype("out_dtype")
        return made if kept is None else layers.cast(made, kept)

    return Kind(make, attrs={"dim": [0], "keep_dim": False, "reduce_all": False, "out_dtype": -1})


def _position(function: Any) -> Kind:
    def make(call: Call) -> Any:
        x = call.one("X").flatten() if call["flatten"] else call.one("X")
        found = function(x, 0 if call["flatten"] else call["axis"], keepdim=call["keepdims"])
        dtype = call.dtype()
        return found if dtype in (None, "int64") else layers.cast(found, dtype)

    attrs = {"axis": REQUIRED, "keepdims": False, "flatten": False, "dtype": "int64"}
    return Kind(make, attrs=attrs)


def _logsumexp(call: Call) -> Any:
    dims = list(range(call.one("X").ndim)) if call["reduce_all"] else list(call["axis"])
    return torch.logsumexp(call.one("X"), dims, call["keepdim"])


def _cumsum(call: Call) -> Any:
    x = call.one("X").flatten() if call["flatten"] else call.one("X")
    return layers.cumsum(x, 0 if call["flatten"] else call["axis"], call["exclusive"], call["reverse"])


def _top_k(call: Call) -> tuple[Any, Any]:
    axis, largest = (call["axis"], call["largest"]) if call.type == "top_k_v2" else (-1, True)
    values, indices = torch.topk(call.one("X"), call["k"], axis, largest=largest)
    return values, indices


def _dropout(call: Call) -> Any:
    x, prob, how = call.one("X"), call["dropout_prob"], call["dropout_implementation"]
    if call["is_test"]:
        return x * (1.0 - prob) if how == "downgrade_in_infer" else layers.assign(x)
    if call.optional("Seed") is not None:
        raise call.refuse("has input 'Seed' while training (masks follow from Program.random_seed)")
    seed = call["seed"] if call.attrs.get("fix_seed") else 0
    return layers.dropout(x, prob, seed=seed, dropout_implementation=how)


def _norm(call: Call) -> Any:
    return layers.l2_normalize(call.one("X"), call["axis"], call["epsilon"])


def _label_smooth(call: Call) -> Any:
    return layers.label_smooth(call.one("X"), call.optional("PriorDist"), call["epsilon"])


_PLAIN = (
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "square", "mean", "assign", "sign", "ceil", "floor",
    "round", "sin", "cos", "asin", "acos", "atan", "reciprocal", "rsqrt", "erf", "softsign", "logsigmoid",
    "tanh_shrink", "log1p", "logical_not", "isfinite", "is_empty",
)  # fmt: skip
_TORCH: dict[str, Any] = {
    "sinh": torch.sinh, "cosh": torch.cosh, "tan": torch.tan, "log2": torch.log2, "log10": torch.log10,
    "expm1": torch.expm1, "silu": F.silu, "trunc": torch.trunc, "isfinite_v2": torch.isfinite,
    "isinf_v2": torch.isinf, "isnan_v2": torch.isnan,
    "squared_l2_norm": lambda x: (x * x).sum().reshape([1]), "l1_norm": lambda x: x.abs().sum(),
}  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "mod", "floordiv")

ELEMENTS: dict[str, Kind] = {
    **{name: layer(getattr(layers, name)) for name in _PLAIN},
    **{name: layer(function) for name, function in _TORCH.items()},
    "isinf": layer(layers.has_inf), "isnan": layer(layers.has_nan),
    **{f"elementwise_{name}": layer(getattr(layers, f"elementwise_{name}"), "X Y", attrs={"axis": -1})
       for name in _BINARY},
    **{name: _compared(name)
       for name in ("less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal")},
    **{name: layer(getattr(layers, name), "X Y") for name in ("logical_and", "logical_or", "logical_xor")},
    **{f"reduce_{name}": _reduced(f"reduce_{name}") for name in ("sum", "mean", "max", "min", "prod", "all", "any")},
    "minus": layer(torch.sub, "X Y"), "sum": layer(layers.sum, "X*"),
    "gelu": layer(layers.gelu, attrs={"approximate": False}),
    "elu": layer(layers.elu, attrs={"alpha": 1.0}), "leaky_relu": layer(layers.leaky_relu, attrs={"alpha": 0.02}),
    "relu6": layer(layers.relu6, attrs={"threshold": 6.0}),
    "brelu": layer(layers.brelu, attrs={"t_min": 0.0, "t_max": 24.0}),
    "soft_relu": layer(layers.soft_relu, attrs={"threshold": 40.0}),
    "stanh": layer(layers.stanh, attrs={"scale_a": 0.67, "scale_b": 1.7159}),
    "hard_sigmoid": layer(layers.hard_sigmoid, attrs={"slope": 0.2, "offset": 0.5}),
    "hard_swish": layer(layers.hard_swish, attrs={"threshold": 6.0, "scale": 6.0, "offset": 3.0}),
    "hard_shrink": layer(layers.hard_shrink, attrs={"threshold": 0.5}),
    "softshrink": layer(layers.softshrink, attrs={"lambda": 0.5}, names={"lambda": "alpha"}),
    "thresholded_relu": layer(layers.thresholded_relu, attrs={"threshold": 1.0}),
    "selu": layer(layers.selu, attrs={"scale": 1.0507009873554805, "alpha": 1.6732632423543772}),
    "swish": layer(layers.swish, attrs={"beta": 1.0}), "mish": layer(layers.mish, attrs={"threshold": 20.0}),
    "softplus": layer(F.softplus, attrs={"beta": 1.0, "threshold": 20.0}),
    "maxout": layer(layers.maxout, attrs={"groups": REQUIRED, "axis": 1}),
    "prelu": Kind(lambda call: layers.prelu(call.one("X"), call["mode"], call.parameter("Alpha")), "X Alpha",
                  attrs={"mode": "all"}),
    "pow": Kind(_power, "X FactorTensor?", attrs={"factor": 1.0}),
    "scale": Kind(_scale, "X ScaleTensor?", attrs={"scale": 1.0, "bias": 0.0, "bias_after_scale": True}),
    "clip": Kind(_clip, "X Min? Max?", attrs={"min": REQUIRED, "max": REQUIRED}),
    "clip_by_norm": layer(layers.clip_by_norm, attrs={"max_norm": REQUIRED}),
    "cast": layer(layers.cast, attrs={"out_dtype": REQUIRED}, names={"out_dtype": "dtype"}),
    "increment": layer(lambda x, step: layers.increment(x, step, in_place=False), attrs={"step": 1.0}),
    "softmax": layer(layers.softmax, attrs={"axis": -1}), "log_softmax": layer(layers.log_softmax, attrs={"axis": -1}),
    "cumsum": Kind(_cumsum, attrs={"axis": -1, "flatten": False, "exclusive": False, "reverse": False}),
    "logsumexp": Kind(_logsumexp, attrs={"axis": [0], "keepdim": False, "reduce_all": False}),
    "arg_max": _position(torch.argmax), "arg_min": _position(torch.argmin),
    "argsort": layer(layers.argsort, outputs="Out Indices", attrs={"axis": -1, "descending": False}),
    "top_k": Kind(_top_k, outputs="Out Indices", attrs={"k": 1}),
    "top_k_v2": Kind(_top_k, outputs="Out Indices", attrs={"k": 1, "axis": -1, "largest": True}),
    "dropout": Kind(_dropout, "X Seed?", "Out Mask-", {
        "dropout_prob": 0.5, "dropout_implementation": "downgrade_in_infer", "is_test": False, "seed": 0,
        "fix_seed": False,
    }),
    "norm": Kind(_norm, outputs="Out Norm-", attrs={"axis": REQUIRED, "epsilon": 1e-10}),
    "label_smooth": Kind(_label_smooth, "X PriorDist?", attrs={"epsilon": 0.0}),
    "cos_sim": layer(layers.cos_sim, "X Y", "Out XNorm- YNorm-"),
    "dist": layer(layers.dist, "X Y", attrs={"p": 2.0}),
}  # fmt: skip
