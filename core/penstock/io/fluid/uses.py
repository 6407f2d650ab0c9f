"""What the operators of Fluid's inference models may say: inputs and attributes that are honoured, and what is refused.

An input that is not honoured is refused if the model gives it. An attribute that is not is refused if it asks for
something: if its value differs from its default, or from nothing (False, 0, -1, empty) where no default is listed.
What only places, quantises or trains an operator changes no result of a model at rest and is not looked at.

Source: the makers of paddle/fluid/operators (Fluid 1.8), and the protos of PaddlePaddle 2.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.program.framework.appending import KINDS

_WITHOUT_EFFECT = frozenset(
    [
        "op_role", "op_role_var", "op_namescope", "op_callstack", "op_device", "with_quant_attr", "skip_quant", "name",
        "use_mkldnn", "use_cudnn", "use_quantizer", "mkldnn_data_type", "is_test", "workspace_size_MB", "infer_flags",
        "exhaustive_search", "in_dtype", "force_cpu", "place_type", "is_sparse", "is_distributed", "remote_prefetch",
        "entry_config", "entry", "table_class", "table_names", "trainer_id", "slot", "grad_inplace", "epmap",
        "height_sections", "numeric_stable_mode", "str_value", "momentum", "use_global_stats", "seed", "fix_seed",
        "sorted", "overwrite", "use_addto", "allow_out_of_range",
    ]
)  # fmt: skip
_LAYOUTS = ("", "AnyLayout", "NCHW")
# Attributes that are not honoured, with what they may be. One that begins with "scale" is a factor of quantised values.
_DEFAULTS: dict[str, Sequence[Any]] = {
    "data_format": _LAYOUTS, "x_data_format": _LAYOUTS, "y_data_format": _LAYOUTS, "use_softmax": (True,),
    "head_number": (0, 1), "paddingTrainable": (False,), "contextStride": (1,),
}  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (False, 0, -1, "", [], None)
_WINDOW = "strides paddings padding_algorithm dilations groups data_format"
# A type: its inputs, then its attributes. Types of `KINDS` that are recorded as scripts append them say it themselves.
_HONOURED: dict[str, tuple[str, str]] = {
    "lookup_table": ("W Ids", "padding_idx"), "lookup_table_v2": ("W Ids", "padding_idx"),
    "conv2d": ("Input Filter Bias", _WINDOW), "depthwise_conv2d": ("Input Filter Bias", _WINDOW),
    "conv2d_transpose": ("Input Filter Bias", f"{_WINDOW} output_size output_padding"),
    "pool2d": (
        "X",
        "ksize strides paddings padding_algorithm pooling_type ceil_mode exclusive global_pooling adaptive data_format",
    ),
    "batch_norm": ("X Scale Bias Mean Variance MomentumTensor", "epsilon data_layout"),
    "layer_norm": ("X Scale Bias", "epsilon begin_norm_axis"), "prelu": ("X Alpha", "mode"),
    "sequence_conv": ("X Filter", "contextLength contextStart"),
    "dropout": ("X Seed", "dropout_prob dropout_implementation"), "sequence_pool": ("X", "pooltype pad_value"),
    "sequence_reshape": ("X", "new_dim"), "sequence_expand": ("X Y", "ref_level"), "sequence_expand_as": ("X Y", ""),
    "flatten": ("X", "axis"), "flatten2": ("X", "axis"), "flatten_contiguous_range": ("X", "start_axis stop_axis"),
    "squeeze": ("X", "axes"), "unsqueeze": ("X", "axes"), "split": ("X", "sections num axis"),
    "slice": ("Input", "axes starts ends decrease_axis"), "expand": ("X", "expand_times"), "gather": ("X Index", ""),
    "top_k": ("X", "k"), "top_k_v2": ("X", "k axis largest"), "matmul_v2": ("X Y", "trans_x trans_y"),
    "arg_max": ("X", "axis keepdims dtype"), "softmax": ("X", "axis"), "log_softmax": ("X", "axis"),
    "relu6": ("X", "threshold"), "elu": ("X", "alpha"), "leaky_relu": ("X", "alpha"), "swish": ("X", "beta"),
    "hard_sigmoid": ("X", "slope offset"), "pow": ("X", "factor"), "softplus": ("X", "beta threshold"),
    "one_hot": ("X", "depth dtype"), "cos_sim": ("X Y", ""), "fill_any_like": ("X", "value dtype"),
    "elementwise_mod": ("X Y", "axis"), "elementwise_floordiv": ("X Y", "axis"),
}  # fmt: skip


def not_honoured(type_: str, inputs: Mapping[str, Sequence[Any]], attrs: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over what a model asks of an operator that is not done: "input 'Shape'", "attribute 'largest' False"."""
    slots, known = _of(type_)
    for slot, variables in inputs.items():
        if variables and slot not in slots:
            yield f"input {slot!r}"
    for name, value in attrs.items():
        if name not in known and name not in _WITHOUT_EFFECT and not _asks_nothing(name, value):
            yield f"attribute {name!r} {value!r}"


def _of(type_: str) -> tuple[Sequence[str], Sequence[str]]:
    if type_ in _HONOURED:
        slots, names = _HONOURED[type_]
        return slots.split(), names.split()
    kind = KINDS.get(type_)
    if kind is None:
        return ("X",), ()
    return kind.inputs or (), (*(kind.attributes or ()), *(["reduce_all"] if type_.startswith("reduce_") else ()))


def _asks_nothing(name: str, value: Any) -> bool:
    if name in _DEFAULTS:
        return value in _DEFAULTS[name]
    if name.lower().startswith("scale"):
        return value in (1.0, 0.0, [1.0], [])
    return value in _NEUTRAL
