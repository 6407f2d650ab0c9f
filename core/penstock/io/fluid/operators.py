"""Operators of Fluid's inference models, as the layers and torch functions that compute the same.

Types of `program.framework.appending.KINDS` are recorded as they are when a script appends them; here are the others,
those above all whose parameters are inputs: the layer is given the name of the stored parameter. Models are at rest:
dropout scales or does nothing, batch-norm uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import UserError
from penstock.io.fluid.uses import not_honoured
from penstock.program import layers
from penstock.program.framework.appending import KINDS, results_of
from penstock.program.training.parameters import ParamAttr


@dataclass(frozen=True, slots=True)
class Call:
    """An operator of a model: variables of its input slots, and its attributes."""

    type: str
    inputs: Mapping[str, Sequence[Any]]
    attrs: Mapping[str, Any]
    num_outputs: Mapping[str, int]

    def one(self, slot: str) -> Any:
        """Return the variable of a slot. Raises UserError if it has none."""
        found = self.optional(slot)
        if found is None:
            raise UserError(f"operator {self.type!r} of the model has no input {slot!r}; it has {sorted(self.inputs)}")
        return found

    def optional(self, slot: str) -> Any:
        """Return the variable of a slot, or None."""
        given = self.inputs.get(slot) or ()
        return given[0] if given else None

    def named(self, slot: str) -> Any:
        """Return the ParamAttr of the parameter in a slot; False if there is none."""
        variable = self.optional(slot)
        return False if variable is None else ParamAttr(name=variable.name)

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attrs.get(name, default)

    def refuse(self, reason: str) -> UserError:
        """Return the error of an operator that is used in a way that is not supported."""
        return UserError(f"operator {self.type!r} of the model {reason}; that is not supported")


def _lookup(call: Call) -> Any:
    table, ids = call.one("W"), call.one("Ids")
    padding = call.attr("padding_idx", -1)
    rows = layers.embedding(
        ids, list(table.desc.shape), padding_idx=None if padding == -1 else padding, param_attr=call.named("W"),
        dtype=table.desc.dtype,
    )  # fmt: skip
    keeps = call.type == "lookup_table_v2" and ids.ndim > 1 and ids.desc.shape[-1] == 1
    return rows.unsqueeze(-2) if keeps else rows


def _convolution(call: Call) -> Any:
    weight = list(call.one("Filter").desc.shape)
    out = layers.conv2d(call.one("Input"), weight[0], weight[2:], padding=_padding(call), **_windows(call))
    return _with_bias(call, out)


def _transposed(call: Call) -> Any:
    if call.attr("output_size") or call.attr("output_padding"):
        raise call.refuse("has output_size or output_padding")
    weight, groups = list(call.one("Filter").desc.shape), call.attr("groups", 1) or 1
    image, filters = call.one("Input"), weight[1] * groups
    out = layers.conv2d_transpose(image, filters, filter_size=weight[2:], padding=_padding(call), **_windows(call))
    return _with_bias(call, out)


def _windows(call: Call) -> dict[str, Any]:
    return {
        "stride": call.attr("strides", [1, 1]), "dilation": call.attr("dilations", [1, 1]),
        "groups": call.attr("groups", 1) or 1, "param_attr": call.named("Filter"), "bias_attr": False,
        "data_format": _format(call),
    }  # fmt: skip


def _with_bias(call: Call, out: Any) -> Any:
    bias = call.optional("Bias")
    return out if bias is None else out + bias.reshape([-1, 1, 1])


def _padding(call: Call) -> Any:
    algorithm = call.attr("padding_algorithm", "EXPLICIT")
    return list(call.attr("paddings", [0, 0])) if algorithm == "EXPLICIT" else algorithm


def _format(call: Call) -> str:
    found = call.attr("data_format", "NCHW")
    return "NCHW" if found == "AnyLayout" else str(found)


def _pool(call: Call) -> Any:
    if call.attr("adaptive"):
        if call.attr("ksize") != [1, 1]:
            raise call.refuse(f"is adaptive to {call.attr('ksize')}")
        return layers.pool2d(call.one("X"), pool_type=call.attr("pooling_type"), global_pooling=True)
    return layers.pool2d(
        call.one("X"), list(call.attr("ksize")), call.attr("pooling_type", "max"), list(call.attr("strides", [1, 1])),
        _padding(call), call.attr("global_pooling", False), ceil_mode=call.attr("ceil_mode", False),
        exclusive=call.attr("exclusive", True), data_format=_format(call),
    )  # fmt: skip


def _batch_norm(call: Call) -> Any:
    return layers.batch_norm(
        call.one("X"), is_test=True, epsilon=call.attr("epsilon", 1e-5), param_attr=call.named("Scale"),
        bias_attr=call.named("Bias"), data_layout=call.attr("data_layout", "NCHW"),
        moving_mean_name=call.one("Mean").name, moving_variance_name=call.one("Variance").name,
    )  # fmt: skip


def _layer_norm(call: Call) -> Any:
    scale, shift = call.named("Scale"), call.named("Bias")
    return layers.layer_norm(
        call.one("X"), scale is not False, shift is not False, call.attr("begin_norm_axis", 1),
        call.attr("epsilon", 1e-5), scale or None, shift or None,
    )  # fmt: skip


def _prelu(call: Call) -> Any:
    return layers.prelu(call.one("X"), call.attr("mode", "all"), call.named("Alpha"))


def _sequence_conv(call: Call) -> Any:
    size, weight = call.attr("contextLength"), call.one("Filter")
    return layers.sequence_conv(
        call.one("X"), weight.desc.shape[1], size, padding_start=call.attr("contextStart"),
        param_attr=call.named("Filter"), bias_attr=False,
    )  # fmt: skip


def _dropout(call: Call) -> Any:
    x = call.one("X")
    scaled = call.attr("dropout_implementation", "downgrade_in_infer") == "downgrade_in_infer"
    return x * (1.0 - call.attr("dropout_prob", 0.5)) if scaled else x


def _flatten(call: Call) -> Any:
    if call.type == "flatten_contiguous_range":
        return torch.flatten(call.one("X"), call.attr("start_axis", 1), call.attr("stop_axis", 1))
    return layers.flatten(call.one("X"), call.attr("axis", 1))


def _split(call: Call) -> list[Any]:
    sections = list(call.attr("sections") or ()) or call.attr("num") or call.num_outputs["Out"]
    return layers.split(call.one("X"), sections, call.attr("axis", 0))


def _slice(call: Call) -> Any:
    out = layers.slice(call.one("Input"), call.attr("axes"), call.attr("starts"), call.attr("ends"))
    for axis in sorted(call.attr("decrease_axis") or (), reverse=True):
        out = out.squeeze(axis)
    return out


def _top_k(call: Call) -> tuple[Any, Any]:
    values, indices = torch.topk(
        call.one("X"), call.attr("k", 1), call.attr("axis", -1), largest=call.attr("largest", True)
    )
    return values, indices


def _arg_max(call: Call) -> Any:
    found = torch.argmax(call.one("X"), call.attr("axis", -1), keepdim=call.attr("keepdims", False))
    dtype = call.attr("dtype", -1)
    return found if dtype in (-1, "int64") else layers.cast(found, dtype)


def _softplus(call: Call) -> Any:
    return F.softplus(call.one("X"), call.attr("beta", 1.0), call.attr("threshold", 20.0))


def _one_hot(call: Call) -> Any:
    found, dtype = layers.one_hot(call.one("X"), call.attr("depth")), call.attr("dtype", "float32")
    return found if dtype in (-1, "float32") else layers.cast(found, dtype)


def _sequence_expand(call: Call) -> Any:
    return layers.sequence_expand(call.one("X"), call.one("Y"), call.attr("ref_level", -1))


def _matmul(call: Call) -> Any:
    return layers.matmul(call.one("X"), call.one("Y"), call.attr("trans_x", False), call.attr("trans_y", False))


def _elementwise(call: Call) -> Any:
    return getattr(layers, call.type)(call.one("X"), call.one("Y"), call.attr("axis", -1))


def _of_two(call: Call) -> Any:
    return getattr(layers, call.type)(call.one("X"), call.one("Y"))


def _unary(name: str, **attributes: str) -> Callable[[Call], Any]:
    """The layer `name` of X; `attributes`: its keywords with Fluid's names of them."""

    def made(call: Call) -> Any:
        given = {key: call.attrs[theirs] for key, theirs in attributes.items() if theirs in call.attrs}
        return getattr(layers, name)(call.one("X"), **given)

    return made


def _fill_like(call: Call) -> Any:
    dtype = call.attr("dtype", -1)
    return torch.full_like(call.one("X"), call.attr("value", 0.0), dtype=None if dtype == -1 else getattr(torch, dtype))


Made = Callable[[Call], Any]
# A type: the slots of its results, and what records them. Results that a model at rest does not need are left out.
OPERATORS: dict[str, tuple[tuple[str, ...], Made]] = {
    "lookup_table": (("Out",), _lookup), "lookup_table_v2": (("Out",), _lookup),
    "conv2d": (("Output",), _convolution), "depthwise_conv2d": (("Output",), _convolution),
    "conv2d_transpose": (("Output",), _transposed), "pool2d": (("Out",), _pool),
    "batch_norm": (("Y",), _batch_norm), "layer_norm": (("Y",), _layer_norm), "prelu": (("Out",), _prelu),
    "sequence_conv": (("Out",), _sequence_conv), "dropout": (("Out",), _dropout),
    "sequence_pool": (("Out",), _unary("sequence_pool", pool_type="pooltype", pad_value="pad_value")),
    "sequence_softmax": (("Out",), _unary("sequence_softmax")),
    "sequence_reverse": (("Y",), _unary("sequence_reverse")),
    "sequence_reshape": (("Out",), _unary("sequence_reshape", new_dim="new_dim")),
    "sequence_concat": (("Out",), lambda call: layers.sequence_concat(list(call.inputs["X"]))),
    "sequence_expand": (("Out",), _sequence_expand), "sequence_expand_as": (("Out",), _of_two),
    "flatten": (("Out",), _flatten), "flatten2": (("Out",), _flatten), "flatten_contiguous_range": (("Out",), _flatten),
    "squeeze": (("Out",), _unary("squeeze", axes="axes")), "unsqueeze": (("Out",), _unary("unsqueeze", axes="axes")),
    "split": (("Out",), _split), "slice": (("Out",), _slice),
    "expand": (("Out",), _unary("expand", expand_times="expand_times")),
    "gather": (("Out",), lambda call: layers.gather(call.one("X"), call.one("Index"))),
    "top_k": (("Out", "Indices"), _top_k), "top_k_v2": (("Out", "Indices"), _top_k), "matmul_v2": (("Out",), _matmul),
    "arg_max": (("Out",), _arg_max),
    "softmax": (("Out",), _unary("softmax", axis="axis")),
    "log_softmax": (("Out",), _unary("log_softmax", axis="axis")),
    "relu6": (("Out",), _unary("relu6", threshold="threshold")), "elu": (("Out",), _unary("elu", alpha="alpha")),
    "leaky_relu": (("Out",), _unary("leaky_relu", alpha="alpha")), "swish": (("Out",), _unary("swish", beta="beta")),
    "hard_sigmoid": (("Out",), _unary("hard_sigmoid", slope="slope", offset="offset")),
    "pow": (("Out",), _unary("pow", factor="factor")),
    "softplus": (("Out",), _softplus),
    "softsign": (("Out",), lambda call: F.softsign(call.one("X"))),
    "rsqrt": (("Out",), lambda call: torch.rsqrt(call.one("X"))),
    "reciprocal": (("Out",), lambda call: torch.reciprocal(call.one("X"))),
    "one_hot": (("Out",), _one_hot),
    "cos_sim": (("Out",), _of_two), "fill_zeros_like": (("Out",), _fill_like),
    "fill_any_like": (("Out",), _fill_like),
    "elementwise_mod": (("Out",), _elementwise), "elementwise_floordiv": (("Out",), _elementwise),
    "assign": (("Out",), lambda call: call.one("X")),
}  # fmt: skip


def supported() -> list[str]:
    """Return the types that a model may have."""
    return sorted({*KINDS, *OPERATORS} - {"sgd"})


def recorded(call: Call) -> dict[str, list[Any]]:
    """Record an operator into the current Program; return its results by slot. Its type is one of `supported`.

    Raises UserError for an input or an attribute that is not honoured.
    """
    asked = list(not_honoured(call.type, call.inputs, call.attrs))
    if asked:
        raise call.refuse(f"has {', '.join(asked)}")
    if call.type not in OPERATORS:
        return {slot: [value] for slot, value in results_of(call.type, _lists(call.inputs), call.attrs).items()}
    slots, make = OPERATORS[call.type]
    made = make(call)
    if isinstance(made, list):
        return {slots[0]: made}
    return {slot: [value] for slot, value in zip(slots, made if isinstance(made, tuple) else (made,), strict=True)}


def _lists(inputs: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {slot: list(variables) for slot, variables in inputs.items()}
