"""Fluid's names of layers' results, `fc_0.tmp_1`, by which scripts fetch them.

The k-th temporary of Fluid's layer is `<kind>_<n>.tmp_<k>`, counted for each kind. Variables here have names of their
operators; a name of Fluid's that no variable has stands for the result that a layer has registered. Operators within a
layer of another kind do not count as that kind: the relu of `fc(act="relu")` is no `relu_0`.
Source: LayerHelper.create_variable_for_type_inference and the layers' functions (Fluid 1.8).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock.program.layers.activations import activate
from penstock.program.record.context import layer_called
from penstock.program.record.opening import recording_of
from penstock.program.record.variable import Variable

_BY_THEMSELVES = {
    "batch_norm", "conv2d", "conv3d", "cos_sim", "cross_entropy", "embedding", "fc", "layer_norm",
    "softmax_with_cross_entropy", "square_error_cost",
}  # fmt: skip
_WITHOUT = {  # whose results Fluid names by what the layer is given, or after its last operator, or by no layer
    "adaptive_pool2d", "adaptive_pool3d", "assign", "auc", "autoincreased_step_counter", "conv2d_transpose",
    "conv3d_transpose", "create_global_var", "create_parameter", "create_tensor", "data", "dice_loss", "fluid_data",
    "group_norm", "increment", "mse_loss", "nce", "npair_loss", "rank", "read_file", "resize_bilinear",
    "resize_nearest", "resize_trilinear", "sampled_softmax_with_cross_entropy", "ssd_loss",
}  # fmt: skip
_KINDS = {  # where Fluid calls the layer otherwise
    "arange": "range", "argmax": "arg_max", "argmin": "arg_min", "continuous_value_model": "cvm", "dynamic_gru": "gru",
    "dynamic_lstm": "lstm", "dynamic_lstmp": "lstmp", "has_inf": "isinf", "has_nan": "isnan",
    "hsigmoid": "hierarchical_sigmoid", "max_sequence_len": "max_seqence_len", "ones": "fill_constant",
    "sequence_first_step": "sequence_pool", "sequence_last_step": "sequence_pool",
    "smooth_l1": "smooth_l1_loss", "sums": "sum", "topk": "top_k", "unsqueeze": "unsqueeze2", "where": "where_index",
    "zeros": "fill_constant",
}  # fmt: skip
_NUMBERS = {  # which temporaries the results are, of those that are not 0, 1, ...
    "center_loss": (1,), "gru_unit": (2, 1, 0), "huber_loss": (1,), "instance_norm": (2,), "linear_chain_crf": (3,),
    "lrn": (1,), "lstm_unit": (1, 0), "smooth_l1": (1,),
}  # fmt: skip
_BEFORE_ACT = {"reshape": 2}  # the temporaries before that of `act=`


def named(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer's results be fetched by Fluid's names, and operators within it not count as layers of their kind."""
    own = layer.__name__
    kind, position = _KINDS.get(own, own), _position_of_act(layer)

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        with layer_called(kind) as opened:
            made = layer(*args, **kwargs)
        if own not in _BY_THEMSELVES and own not in _WITHOUT:
            act = args[position] if position < len(args) else kwargs.get("act")
            numbers = (_BEFORE_ACT.get(own, 1),) if act else _NUMBERS.get(own, ())
            _register(made, kind, opened[0] if opened else kwargs.get("name"), numbers)
        return made

    return call


def _position_of_act(layer: Callable[..., Any]) -> int:
    """The position of the argument `act` of a layer; beyond all of them if it has none, or takes it by name alone."""
    positional = [p.name for p in inspect.signature(layer).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional.index("act") if "act" in positional else sys.maxsize


def _register(made: Any, kind: str, prefix: str | None, numbers: Sequence[int]) -> None:
    """Register what a layer returns; `prefix`: the layer's name, where it has one already."""
    values = [v for v in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(v, Variable)]
    if not values or (not prefix and re.fullmatch(rf"{kind}_\d+\.tmp_0", values[0].name)):
        return  # the operator has the layer's name
    layer = prefix or values[0].program.unique(kind)
    registered = recording_of(values[0].program).results
    is_shared = prefix is not None and any(name.startswith(f"{prefix}.tmp_") for name in registered)
    for number, value in zip(numbers or range(len(values)), values, strict=False):
        name = f"{layer}.tmp_{number}"
        if is_shared:  # with a layer before it, whose temporaries Fluid counts too
            registered.setdefault(name, None)
        elif value.name != name:
            result(value, layer, number)


def result(value: Any, layer: str, number: int) -> Any:
    """Return a layer's value, which can be fetched as `<layer>.tmp_<number>` from now on.

    Not where another layer of that name has one: Fluid counts on, by numbers that depend on what the layers do inside.
    """
    if isinstance(value, Variable):
        made, name = recording_of(value.program).results, f"{layer}.tmp_{number}"
        made[name] = None if name in made else value.fake
    return value


def activated(value: Any, act: str | None, layer: str, number: int) -> Any:
    """Return `act` of a layer's temporary `number`, which is the next one, or the temporary itself without `act`."""
    before = result(value, layer, number)
    if not act:
        return before
    with layer_called(layer.rpartition("_")[0] or layer):
        return result(activate(before, act), layer, number + 1)
