"""Rules for layers with parameters, products, pooling, normalization, dropout and reductions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.io.fluid.writing.call import Call, Result, Rule
from penstock.io.fluid.writing.description import Attribute, Long, Value
from penstock.io.fluid.writing.sequences import convolved
from penstock.io.fluid.writing.writer import Unsupported


def _mm(call: Call) -> Value:
    return call.writer.reshaped(_product(call, 0, "self"), call.shape())


def _addmm(call: Call) -> Value:
    if (call.args["beta"], call.args["alpha"]) != (1, 1):
        raise Unsupported(f"beta is {call.args['beta']}, alpha {call.args['alpha']}; expected 1")
    found = _product(call, 1, "mat1")
    return call.writer.reshaped(call.writer.binary("elementwise_add", found, call.x, found.shape), call.shape())


def _product(call: Call, at: int, key: str) -> Value:
    """A product of matrices; of rows that were flattened for it, with the dimensions that those had."""
    y = call.value("mat2")
    if (rows := convolved(call, at, y)) is not None:
        return rows
    x = call.value(key)
    source = x.made_by("reshape2")
    wide = source.inputs["X"][0] if source is not None else x
    if len(wide.shape) <= 2 or wide.shape[-1] != x.shape[-1]:
        wide = x
    attrs: dict[str, Attribute] = {"x_num_col_dims": len(wide.shape) - 1, "y_num_col_dims": 1}
    shape = (*wide.shape[:-1], y.shape[-1])
    return call.writer.add("mul", {"X": wide, "Y": y}, attrs, shape=shape, dtype=call.dtype())


def _bmm(call: Call) -> Value:
    """Products of matrices; of batches with several dimensions, which are flattened for it, with those."""
    x, y = call.x, call.value("mat2")
    sources = [maker.inputs["X"][0] for one in (x, y) if (maker := one.made_by("reshape2")) is not None]
    if len(sources) == 2 and len(sources[0].shape) > 3 and sources[0].shape[:-2] == sources[1].shape[:-2]:
        if all(wide.shape[-2:] == one.shape[-2:] for wide, one in zip(sources, (x, y), strict=True)):
            x, y = sources
    attrs: dict[str, Attribute] = {"transpose_X": False, "transpose_Y": False, "alpha": 1.0}
    shape = (*x.shape[:-1], y.shape[-1])
    found = call.writer.add("matmul", {"X": x, "Y": y}, attrs, shape=shape, dtype=call.dtype())
    return call.writer.reshaped(found, call.shape())


# -- convolution and pooling ---------------------------------------------------------------------------


def _convolution(call: Call) -> Value:
    weight = call.value("weight")
    rank, transposed = len(weight.shape) - 2, bool(call.args["transposed"])
    if rank not in (2, 3):
        raise Unsupported(f"it has {rank} dimensions of space; Fluid has 2 and 3")
    attrs: dict[str, Attribute] = {
        "strides": call.ints("stride", rank), "paddings": call.ints("padding", rank),
        "dilations": call.ints("dilation", rank), "groups": call.ints("groups")[0],
        "padding_algorithm": "EXPLICIT", "data_format": "NCHW" if rank == 2 else "NCDHW",
    }  # fmt: skip
    if transposed:
        more = call.ints("output_padding", rank)
        attrs |= {"output_padding": more if any(more) else [], "output_size": [], "data_format": "NCHW"}
    kind = f"conv{rank}d_transpose" if transposed else f"conv{rank}d"
    found = call.add(kind, {"Input": call.value("input"), "Filter": weight}, attrs, out="Output")
    bias = call.optional("bias")
    if bias is None:
        return found
    return call.add("elementwise_add", {"X": found, "Y": bias}, {"axis": 1})


def _pooled(call: Call, rank: int, attrs: dict[str, Attribute]) -> Value:
    plain: dict[str, Attribute] = {
        "strides": [1] * rank, "paddings": [0] * rank, "ceil_mode": False, "exclusive": True, "adaptive": False,
        "global_pooling": False, "padding_algorithm": "EXPLICIT", "data_format": "NCHW" if rank == 2 else "NCDHW",
    }  # fmt: skip
    return call.add(f"pool{rank}d", {"X": call.x}, {**plain, **attrs})


def _windows(call: Call, rank: int) -> dict[str, Attribute]:
    ksize = call.ints("kernel_size", rank)
    strides = call.ints("stride", rank) if call.args["stride"] else ksize
    ceil = bool(call.args["ceil_mode"])
    return {"ksize": ksize, "strides": strides, "paddings": call.ints("padding", rank), "ceil_mode": ceil}


def _max_pool(rank: int) -> Rule:
    def rule(call: Call) -> Result:
        if set(call.ints("dilation")) != {1}:
            raise Unsupported(f"its windows are dilated by {call.ints('dilation')}; Fluid's pooling has no dilation")
        return [_pooled(call, rank, {**_windows(call, rank), "pooling_type": "max"}), None]

    return rule


def _avg_pool(rank: int) -> Rule:
    def rule(call: Call) -> Value:
        windows, padded = _windows(call, rank), bool(call.args["count_include_pad"])
        if call.args["divisor_override"] is not None:
            raise Unsupported("it divides by a number of its own; Fluid's pooling by the size of the window")
        if padded and windows["ceil_mode"]:
            raise Unsupported("it counts padding in windows that end beyond it, which Fluid counts otherwise")
        return _pooled(call, rank, {**windows, "pooling_type": "avg", "exclusive": not padded})

    return rule


def _adaptive(kind: str, size: str) -> Rule:
    def rule(call: Call) -> Result:
        found = _pooled(call, 2, {"ksize": call.ints(size, 2), "pooling_type": kind, "adaptive": True})
        return [found, None] if kind == "max" else found

    return rule


def _resized(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        sizes = [(before, after) for before, after in zip(call.x.shape[2:], call.shape()[2:], strict=True)]
        scales = [call.args.get(key) for key in ("scales_h", "scales_w")]
        for (before, after), scale in zip(sizes, scales, strict=True):
            if not isinstance(before, int) or not isinstance(after, int) or scale not in (None, after / before):
                raise Unsupported(
                    f"it resizes {before} to {after} by a scale of {scale}; Fluid's scale is of the sizes"
                )
        attrs: dict[str, Attribute] = {
            "out_h": int(str(sizes[0][1])), "out_w": int(str(sizes[1][1])), "interp_method": kind, "align_mode": 0,
            "align_corners": bool(call.args.get("align_corners", False)), "data_layout": "NCHW",
        }  # fmt: skip
        return call.add(f"{kind}_interp", {"X": call.x}, attrs)

    return rule


# -- normalization -------------------------------------------------------------------------------------


def _batch_norm(call: Call) -> Result:
    if call.args.get("training"):
        raise Unsupported("it trains: a model has running statistics; clone the program with for_test=True")
    x, mean, variance = call.value("input"), call.value("running_mean"), call.value("running_var")
    ones, zeros = (call.optional(key) for key in ("weight", "bias"))
    inputs = {
        "X": x, "Mean": mean, "Variance": variance,
        "Scale": ones or call.writer.constant(1.0, mean.dtype, _static(mean)),
        "Bias": zeros or call.writer.constant(0.0, mean.dtype, _static(mean)),
    }  # fmt: skip
    made = Value(call.shape(), call.dtype())
    attrs: dict[str, Attribute] = {
        "momentum": 1.0 - float(call.number("momentum")), "epsilon": float(call.number("eps")), "is_test": True,
        "data_layout": "NCHW", "use_global_stats": False,
    }  # fmt: skip
    call.writer.append("batch_norm", inputs, {"Y": made, "MeanOut": mean, "VarianceOut": variance}, attrs)
    mean.maker = variance.maker = None  # what it writes are the values that it reads
    return [made, None, None]


def _static(value: Value) -> list[int]:
    return [size for size in value.shape if isinstance(size, int)]


def _layer_norm(call: Call) -> Result:
    x, normalized = call.value("input"), call.ints("normalized_shape")
    inputs = {"X": x}
    for slot, key in (("Scale", "weight"), ("Bias", "bias")):
        given = call.optional(key)
        if given is not None:
            inputs[slot] = _flat(call, given)
    attrs: dict[str, Attribute] = {
        "epsilon": float(call.number("eps")), "begin_norm_axis": len(x.shape) - len(normalized),
    }  # fmt: skip
    return [call.add("layer_norm", inputs, attrs, out="Y"), None, None]


def _flat(call: Call, value: Value) -> Value:
    """The parameter that has the values in one dimension: `value` is often a view of it."""
    while (maker := value.made_by("reshape2")) is not None:
        value = maker.inputs["X"][0]
    size = 1
    for one in _static(value):
        size *= one
    return call.writer.reshaped(value, [size])


def _group_norm(call: Call) -> Result:
    inputs = {"X": call.value("input")}
    for slot, key in (("Scale", "weight"), ("Bias", "bias")):
        given = call.optional(key)
        if given is not None:
            inputs[slot] = _flat(call, given)
    attrs: dict[str, Attribute] = {
        "groups": call.ints("group")[0], "epsilon": float(call.number("eps")), "data_layout": "NCHW",
    }  # fmt: skip
    return [call.add("group_norm", inputs, attrs, out="Y"), None, None]


def _softmax(kind: str) -> Rule:
    return lambda call: call.add(kind, {"X": call.x}, {"axis": call.axis("dim")})


# -- dropout, reductions ---------------------------------------------------------------------------------


def _dropout(call: Call) -> Result:
    if call.args["training"]:
        raise Unsupported("it trains; clone the program with for_test=True")
    attrs: dict[str, Attribute] = {
        "dropout_prob": float(call.number("p")), "is_test": True, "dropout_implementation": "upscale_in_train",
    }  # fmt: skip
    return [call.add("dropout", {"X": call.value("x")}, attrs), None]


def _reduced(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        x = call.x if call.dtype() == "bool" else call.writer.cast(call.x, call.dtype())
        axes = call.axes("dim") if "dim" in call.args else range(len(x.shape))
        return _reduce(call, kind, x, list(axes), bool(call.args.get("keepdim", False)))

    return rule


def _reduce(call: Call, kind: str, x: Value, axes: Sequence[int], keeps: bool) -> Value:
    whole = len(axes) == len(x.shape)
    attrs: dict[str, Attribute] = {
        "dim": list(axes) or [0], "keep_dim": keeps, "reduce_all": whole, "in_dtype": -1, "out_dtype": -1,
    }  # fmt: skip
    return call.writer.add(kind, {"X": x}, attrs, shape=call.shape(), dtype=x.dtype)


def _mean(call: Call) -> Value:
    return call.add("mean", {"X": call.writer.cast(call.x, call.dtype())})


def _extreme(kind: str) -> Rule:
    """The largest or smallest along a dimension, and where it is."""

    def rule(call: Call) -> list[Value]:
        axis, keeps = call.axis("dim"), bool(call.args["keepdim"])
        return [_reduce(call, f"reduce_{kind}", call.x, [axis], keeps), _position(call, f"arg_{kind}", axis, keeps)]

    return rule


def _position(call: Call, kind: str, axis: int, keeps: bool, flatten: bool = False) -> Value:
    attrs: dict[str, Attribute] = {"axis": Long(axis), "keepdims": keeps, "flatten": flatten, "dtype": 3}
    return call.writer.add(kind, {"X": call.x}, attrs, shape=call.shape(), dtype="int64")


def _arg(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        flatten = call.args["dim"] is None
        return _position(call, kind, 0 if flatten else call.axis("dim"), bool(call.args["keepdim"]), flatten)

    return rule


def _pairs(call: Call, kind: str, attrs: dict[str, Attribute]) -> list[Value]:
    made = [Value(call.shape(), call.x.dtype), Value(call.shape(), "int64")]
    call.writer.append(kind, {"X": call.x}, {"Out": made[0], "Indices": made[1]}, attrs)
    return made


def _top_k(call: Call) -> list[Value]:
    axis, k, largest = call.axis("dim"), call.ints("k")[0], bool(call.args["largest"])
    if largest and axis == len(call.x.shape) - 1:
        return _pairs(call, "top_k", {"k": k})
    return _pairs(call, "top_k_v2", {"k": k, "axis": axis, "largest": largest, "sorted": True})


def _sort(call: Call) -> list[Value]:
    return _pairs(call, "argsort", {"axis": call.axis("dim"), "descending": bool(call.args["descending"])})


def _log_sum_exp(call: Call) -> Value:
    axes = call.axes("dim")
    attrs: dict[str, Attribute] = {
        "axis": axes, "keepdim": bool(call.args["keepdim"]), "reduce_all": len(axes) == len(call.x.shape),
    }  # fmt: skip
    return call.add("logsumexp", {"X": call.x}, attrs)


def _cumsum(call: Call) -> Value:
    attrs: dict[str, Attribute] = {
        "axis": call.axis("dim"), "exclusive": False, "reverse": False, "flatten": False,
    }  # fmt: skip
    return call.add("cumsum", {"X": call.writer.cast(call.x, call.dtype())}, attrs)


_RECORDED: dict[str, Rule] = {
    "_softmax": _softmax("softmax"), "_log_softmax": _softmax("log_softmax"),
    "_adaptive_avg_pool2d": _adaptive("avg", "output_size"),
}  # fmt: skip
"""By names of ATen that programs hold, as `operator_types` has them; none is called here."""
NETWORKS: dict[str, Rule] = {
    **{f"aten.{name}.default": rule for name, rule in _RECORDED.items()},
    "aten.mm.default": _mm, "aten.addmm.default": _addmm, "aten.bmm.default": _bmm,
    "aten.convolution.default": _convolution,
    "aten.max_pool2d_with_indices.default": _max_pool(2), "aten.max_pool3d_with_indices.default": _max_pool(3),
    "aten.avg_pool2d.default": _avg_pool(2), "aten.avg_pool3d.default": _avg_pool(3),
    "aten.adaptive_max_pool2d.default": _adaptive("max", "output_size"),
    "aten.upsample_bilinear2d.default": _resized("bilinear"),
    "aten.upsample_nearest2d.default": _resized("nearest"),
    "aten.native_batch_norm.default": _batch_norm, "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    "penstock.dropout.default": _dropout,
    **{f"aten.sum.{overload}": _reduced("reduce_sum") for overload in ("default", "dim_IntList")},
    "aten.mean.default": _mean, "aten.mean.dim": _reduced("reduce_mean"),
    "aten.amax.default": _reduced("reduce_max"), "aten.amin.default": _reduced("reduce_min"),
    "aten.max.default": _reduced("reduce_max"), "aten.min.default": _reduced("reduce_min"),
    "aten.prod.default": _reduced("reduce_prod"), "aten.prod.dim_int": _reduced("reduce_prod"),
    **{f"aten.{name}.{overload}": _reduced(f"reduce_{name}")
       for name in ("any", "all") for overload in ("default", "dim", "dims")},
    "aten.max.dim": _extreme("max"), "aten.min.dim": _extreme("min"),
    "aten.argmax.default": _arg("arg_max"), "aten.argmin.default": _arg("arg_min"),
    "aten.topk.default": _top_k, "aten.sort.default": _sort, "aten.cumsum.default": _cumsum,
    "aten.logsumexp.default": _log_sum_exp,
}  # fmt: skip
