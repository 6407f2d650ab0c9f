"""Kinds that lay variables out anew, take parts of them, put them together, or make them of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer, like
from penstock.program.layers.random import drawn
from penstock.program.layers.sizes import sizes_in
from penstock.program.record.source import user_line
from penstock.program.record.variable import dtype_named


def _reshape(call: Call) -> Any:
    return layers.reshape(call.one("X"), call.sizes("shape", "Shape", "ShapeTensor"))


def _flatten(call: Call) -> Any:
    if call.type == "flatten_contiguous_range":
        return torch.flatten(call.one("X"), call["start_axis"], call["stop_axis"])
    return layers.flatten(call.one("X"), call["axis"])


def _split(call: Call) -> list[Any]:
    sections = list(call["sections"]) or call["num"] or len(call.outputs.get("Out", ()))
    return layers.split(call.one("X"), sections, call["axis"])


def _slice(call: Call) -> Any:
    starts = call.sizes("starts", "StartsTensor", "StartsTensorList")
    ends = call.sizes("ends", "EndsTensor", "EndsTensorList")
    out = layers.slice(call.one("Input"), call["axes"], starts, ends)
    return _without(out, call["decrease_axis"])


def _strided(call: Call) -> Any:
    out = layers.strided_slice(call.one("Input"), call["axes"], call["starts"], call["ends"], call["strides"])
    return _without(out, call["decrease_axis"])


def _without(out: Any, axes: Sequence[int]) -> Any:
    for axis in sorted(axes or (), reverse=True):
        out = out.squeeze(axis)
    return out


def _expand(call: Call) -> Any:
    return layers.expand(call.one("X"), call.sizes("expand_times", "ExpandTimes", "expand_times_tensor"))


def _tile(call: Call) -> Any:
    return layers.expand(call.one("X"), call.sizes("repeat_times", "RepeatTimes", "repeat_times_tensor"))


def _expand_to(call: Call) -> Any:
    x, sizes = call.one("X"), call.sizes("shape", "Shape", "expand_shapes_tensor")
    return x.expand(sizes).clone()


def _gather(call: Call) -> Any:
    x, index, axis = call.one("X"), call.one("Index"), call["axis"]
    return layers.gather(x, index) if axis == 0 else torch.index_select(x, axis, index.reshape([-1]))


def _one_hot(call: Call) -> Any:
    ids = call.one("X")
    if call.type == "one_hot_v2":
        ids = ids.unsqueeze(-1)
    found, dtype = layers.one_hot(ids, call["depth"]), call.dtype()
    return found if dtype in (None, "float32") else layers.cast(found, dtype)


def _fill_like(call: Call) -> Any:
    x = call.one("X")
    return torch.full_like(x, call["value"], dtype=like(x, call.dtype()))


def number_of(type_: str, attrs: Mapping[str, Any], dtype: Any) -> float:
    """Return the number that an operator fills with: `str_value`, which is exact, unless it is empty, then `value`.

    Raises ProgramError for a `str_value` that is no number of the dtype.
    """
    text, kind = str(attrs.get("str_value") or "").strip(), dtype_named(dtype)
    if not text:
        return attrs.get("value", 0.0)  # type: ignore[no-any-return]  # a number
    try:
        if kind.is_floating_point or kind is torch.bool:
            return float(text) if kind.is_floating_point else int(float(text) != 0.0)
        return int(text) if text.lstrip("+-").isdecimal() else int(float(text))
    except (ValueError, OverflowError) as error:
        raise ProgramError(
            f"{user_line()}: operator {type_!r} has str_value={text!r}; expected a number of "
            f"{str(kind).removeprefix('torch.')}, or an empty str_value and the number in `value`"
        ) from error


def _number(call: Call) -> float:
    return number_of(call.type, call.attrs, call["dtype"])


def _fill(call: Call) -> Any:
    value = call.optional("ValueTensor")
    return layers.fill_constant(call.sizes("shape"), call["dtype"], _number(call) if value is None else value)


def _fill_batch(call: Call) -> Any:
    given = (_number(call), call["input_dim_idx"], call["output_dim_idx"])
    return layers.fill_constant_batch_size_like(call.one("Input"), call["shape"], call["dtype"], *given)


_VALUES = ("fp32_values", "fp64_values", "int32_values", "int64_values", "bool_values", "values")


def _assign_value(call: Call) -> Any:
    values: Sequence[Any] = next((call[name] for name in _VALUES if len(call[name])), ())
    kind = dtype_named(call["dtype"])
    array = torch.tensor(list(values), dtype=kind).reshape(list(call["shape"])).numpy()
    return layers.assign(np.ascontiguousarray(array))


def _range(call: Call) -> Any:
    start, end, step = (call.one(slot) for slot in ("Start", "End", "Step"))
    return layers.range(start, end, step, start.desc.dtype)


def _tril(call: Call) -> Any:
    return (layers.tril if call["lower"] else layers.triu)(call.one("X"), call["diagonal"])


def _unstack(call: Call) -> list[Any]:
    return layers.unstack(call.one("X"), call["axis"])


def _crop(call: Call) -> Any:
    y, offsets = call.optional("Y"), call.optional("Offsets")
    shape = list(call["shape"]) if y is None else y
    return layers.crop(call.one("X"), shape, list(call["offsets"]) or None if offsets is None else offsets)


def _roll(call: Call) -> Any:
    return layers.roll(call.one("X"), call["shifts"], call["axis"] or None)


def _where(call: Call) -> Any:
    return torch.where(call.one("Condition"), call.one("X"), call.one("Y"))


def _uniform(call: Call) -> Any:
    return layers.uniform_random(call.sizes("shape"), call["dtype"], call["min"], call["max"], call["seed"])


def _gaussian(call: Call) -> Any:
    return layers.gaussian_random(call.sizes("shape"), call["mean"], call["std"], call["seed"], call["dtype"])


def _truncated(call: Call) -> Any:
    bounds = (call["mean"], call["std"])
    sizes = sizes_in(call["shape"])
    return drawn("truncated_gaussian_random", "truncated_normal", sizes, bounds, call["seed"], call["dtype"])


def _randint(call: Call) -> Any:
    return layers.randint(call["low"], call["high"], call.sizes("shape"), dtype=call["dtype"], seed=call["seed"])


def _sampled(call: Call) -> Any:
    return layers.sampling_id(call.one("X"), call["min"], call["max"], call["seed"])


_SHAPED = "X Shape? ShapeTensor*"
_PARTS = "Input StartsTensor? StartsTensorList* EndsTensor? EndsTensorList*"
_BATCH = {"shape": REQUIRED, "input_dim_idx": 0, "output_dim_idx": 0}
_SIZED = "ShapeTensor? ShapeTensorList*"

SHAPES: dict[str, Kind] = {
    "reshape": Kind(_reshape, _SHAPED, attrs={"shape": []}),
    "reshape2": Kind(_reshape, _SHAPED, "Out XShape-", {"shape": []}),
    "transpose": layer(layers.transpose, attrs={"axis": REQUIRED}, names={"axis": "perm"}),
    "transpose2": layer(layers.transpose, "X", "Out XShape-", {"axis": REQUIRED}, {"axis": "perm"}),
    "squeeze": layer(layers.squeeze, attrs={"axes": []}), "unsqueeze": layer(layers.unsqueeze, attrs={"axes": []}),
    "squeeze2": layer(layers.squeeze, outputs="Out XShape-", attrs={"axes": []}),
    "unsqueeze2": layer(layers.unsqueeze, outputs="Out XShape-", attrs={"axes": []}),
    "flatten": Kind(_flatten, attrs={"axis": 1}), "flatten2": Kind(_flatten, "X", "Out XShape-", {"axis": 1}),
    "flatten_contiguous_range": Kind(_flatten, "X", "Out XShape-", {"start_axis": 1, "stop_axis": 1}),
    "concat": layer(layers.concat, "X*", attrs={"axis": 0}),
    "stack": layer(layers.stack, "X*", "Y", {"axis": 0}),
    "unstack": Kind(_unstack, "X", "Y*", {"axis": 0, "num": 0}),
    "split": Kind(_split, "X", "Out*", {"sections": [], "num": 0, "axis": 0}),
    "slice": Kind(_slice, _PARTS, attrs={"axes": REQUIRED, "starts": [], "ends": [], "decrease_axis": []}),
    "strided_slice": Kind(_strided, "Input", attrs={
        "axes": REQUIRED, "starts": [], "ends": [], "strides": [], "decrease_axis": [],
    }),
    "expand": Kind(_expand, "X ExpandTimes? expand_times_tensor*", attrs={"expand_times": []}),
    "expand_as": layer(layers.expand_as, "X target_tensor"),
    "expand_v2": Kind(_expand_to, "X Shape? expand_shapes_tensor*", attrs={"shape": []}),
    "tile": Kind(_tile, "X RepeatTimes? repeat_times_tensor*", attrs={"repeat_times": []}),
    "gather": Kind(_gather, "X Index", attrs={"axis": 0}), "gather_nd": layer(layers.gather_nd, "X Index"),
    "scatter": layer(layers.scatter, "X Ids Updates", attrs={"overwrite": True}),
    "scatter_nd_add": layer(layers.scatter_nd_add, "X Index Updates"),
    "index_select": layer(layers.index_select, "X Index", attrs={"dim": 0}),
    "index_sample": layer(layers.index_sample, "X Index"),
    "pad": layer(layers.pad, attrs={"paddings": REQUIRED, "pad_value": 0.0}),
    "pad2d": layer(layers.pad2d, attrs={"paddings": REQUIRED, "mode": "constant", "pad_value": 0.0}),
    "pad_constant_like": layer(layers.pad_constant_like, "X Y", attrs={"pad_value": 0.0}),
    "crop": Kind(_crop, "X Y? Offsets?", attrs={"shape": [], "offsets": []}),
    "crop_tensor": Kind(lambda call: layers.crop_tensor(call.one("X"), list(call["shape"]), list(call["offsets"])),
                        attrs={"shape": [], "offsets": []}),
    "reverse": layer(layers.reverse, attrs={"axis": REQUIRED}),
    "flip": layer(layers.flip, attrs={"axis": REQUIRED}, names={"axis": "dims"}),
    "roll": Kind(_roll, attrs={"shifts": [], "axis": []}),
    "tril_triu": Kind(_tril, attrs={"diagonal": 0, "lower": False}),
    "diag": layer(layers.diag, "Diagonal"),
    "diag_embed": layer(layers.diag_embed, "Input", attrs={"offset": 0, "dim1": -2, "dim2": -1}),
    "trace": layer(layers.trace, "Input", attrs={"offset": 0, "axis1": 0, "axis2": 1},
                   names={"axis1": "dim1", "axis2": "dim2"}),
    "meshgrid": layer(layers.meshgrid, "X*", "Out*"),
    "multiplex": layer(layers.multiplex, "X* Ids"),
    "one_hot": Kind(_one_hot, attrs={"depth": -1, "dtype": "float32"}),
    "one_hot_v2": Kind(_one_hot, attrs={"depth": -1, "dtype": "float32"}),
    "where": Kind(_where, "Condition X Y"), "where_index": layer(layers.where, "Condition"),
    "unique": layer(layers.unique, "X", "Out Index", {"dtype": REQUIRED}),
    "unique_with_counts": layer(layers.unique_with_counts, "X", "Out Index Count", {"dtype": REQUIRED}),
    "shape": layer(layers.shape, "Input"), "size": layer(layers.size, "Input"),
    "shard_index": layer(layers.shard_index, attrs={
        "index_num": REQUIRED, "nshards": REQUIRED, "shard_id": REQUIRED, "ignore_value": -1,
    }),
    "hash": Kind(lambda call: layers.hash(call.one("X"), call["mod_by"], call["num_hash"]),
                 attrs={"num_hash": 1, "mod_by": 100000}),
    "range": Kind(_range, "Start End Step"),
    "eye": Kind(lambda call: layers.eye(call["num_rows"], None if call["num_columns"] < 0 else call["num_columns"],
                                        dtype=call.dtype() or "float32"),
                "", attrs={"num_rows": REQUIRED, "num_columns": -1, "dtype": "float32"}),
    "fill_constant": Kind(_fill, f"ValueTensor? {_SIZED}", attrs={
        "shape": [], "dtype": "float32", "value": 0.0, "str_value": "",
    }),
    "fill_constant_batch_size_like": Kind(_fill_batch, "Input", attrs={
        **_BATCH, "dtype": "float32", "value": 0.0, "str_value": "",
    }),
    "fill_zeros_like": layer(layers.zeros_like), "fill_any_like": Kind(_fill_like, attrs={"value": 0.0, "dtype": -1}),
    "assign_value": Kind(_assign_value, "", attrs={
        "shape": REQUIRED, "dtype": REQUIRED, **{key: [] for key in _VALUES},
    }),
    "uniform_random": Kind(_uniform, _SIZED, attrs={
        "shape": [], "dtype": "float32", "min": -1.0, "max": 1.0, "seed": 0,
    }),
    "gaussian_random": Kind(_gaussian, _SIZED, attrs={
        "shape": [], "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 0,
    }),
    "truncated_gaussian_random": Kind(_truncated, "", attrs={
        "shape": REQUIRED, "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 0,
    }),
    "uniform_random_batch_size_like": layer(layers.uniform_random_batch_size_like, "Input", attrs={
        **_BATCH, "dtype": "float32", "min": -1.0, "max": 1.0, "seed": 0,
    }),
    "gaussian_random_batch_size_like": layer(layers.gaussian_random_batch_size_like, "Input", attrs={
        **_BATCH, "dtype": "float32", "mean": 0.0, "std": 1.0, "seed": 0,
    }),
    "randint": Kind(_randint, _SIZED, attrs={
        "low": REQUIRED, "high": REQUIRED, "shape": [], "dtype": "int64", "seed": 0,
    }),
    "randperm": layer(layers.randperm, "", attrs={"n": REQUIRED, "dtype": "int64", "seed": 0}),
    "sampling_id": Kind(_sampled, attrs={"min": 0.0, "max": 1.0, "seed": 0}),
}  # fmt: skip
