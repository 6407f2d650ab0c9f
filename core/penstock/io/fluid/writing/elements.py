"""Rules for calls that work element by element, compare, choose or convert."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from penstock.io.fluid.writing.call import Call, Rule
from penstock.io.fluid.writing.description import Attribute, Value
from penstock.io.fluid.writing.lookups import padded_lookup
from penstock.io.fluid.writing.writer import Unsupported, is_float32

_PLAIN = {
    **{name: name for name in (
        "relu", "sigmoid", "tanh", "exp", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "abs", "sign", "ceil",
        "floor", "round", "sin", "cos", "tan", "asin", "acos", "atan", "expm1", "sinh", "cosh", "reciprocal", "erf",
        "relu6", "logical_not",
    )},
    "silu": "swish",
}  # fmt: skip
_COMPARED = {
    "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal",
}  # fmt: skip
_FLOATING = ("float16", "bfloat16", "float32", "float64")


def _plain(kind: str) -> Rule:
    return lambda call: call.add(kind, {"X": call.writer.cast(call.x, call.dtype())})


def _of_two(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        writer, dtype = call.writer, call.dtype()
        x, y = writer.cast(call.x, dtype), call.optional("other")
        alpha = call.args.get("alpha", 1)
        if y is None:
            return _with_number(call, kind, x, call.number("other") * alpha)
        y = writer.cast(y, dtype)
        if alpha != 1:
            y = _with_number(call, "elementwise_mul", y, alpha, y)
        return writer.binary(kind, x, y, call.shape())

    return rule


def _with_number(call: Call, kind: str, x: Value, number: float, like: Value | None = None) -> Value:
    """Combine a variable and a number: `scale`, where that is exact."""
    shape = call.shape() if like is None else like.shape
    attrs = _as_scale(kind, x.dtype, number)
    if attrs is not None:
        return call.writer.add("scale", {"X": x}, attrs, shape=shape)
    return call.writer.binary(kind, x, call.writer.constant(number, x.dtype), shape)


def _as_scale(kind: str, dtype: str, number: float) -> dict[str, Attribute] | None:
    """The attributes of `scale` that do the same: its numbers have 32 bits, and it is for floating variables."""
    if dtype not in _FLOATING or (dtype == "float64" and not is_float32(number)):
        return None
    neutral: dict[str, Attribute] = {"scale": 1.0, "bias": 0.0, "bias_after_scale": True}
    if kind == "elementwise_mul":
        return {**neutral, "scale": float(number)}
    if kind in ("elementwise_add", "elementwise_sub"):
        return {**neutral, "bias": float(number if kind == "elementwise_add" else -number)}
    if kind == "elementwise_div" and _is_power_of_two(number):
        return {**neutral, "scale": 1.0 / number}
    return None


def _is_power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5 and abs(number) < 2.0**60


def _reversed_sub(call: Call) -> Value:
    """`other - alpha * self`."""
    writer, dtype = call.writer, call.dtype()
    negated = _with_number(call, "elementwise_mul", writer.cast(call.x, dtype), -call.args["alpha"], call.x)
    other = call.optional("other")
    if other is None:
        return _with_number(call, "elementwise_add", negated, call.number("other"))
    return writer.binary("elementwise_add", negated, writer.cast(other, dtype), call.shape())


def _power(call: Call) -> Value:
    x, exponent = call.writer.cast(call.x, call.dtype()), call.number("exponent")
    if exponent in (2, 0.5):
        return call.add("square" if exponent == 2 else "sqrt", {"X": x})
    if not is_float32(exponent) and x.dtype == "float64":
        return call.writer.binary("elementwise_pow", x, call.writer.constant(exponent, x.dtype), call.shape())
    return call.add("pow", {"X": x}, {"factor": float(exponent)})


def _power_of(call: Call) -> Value:
    dtype = call.dtype()
    x, y = call.writer.cast(call.x, dtype), call.writer.cast(call.value("exponent"), dtype)
    return call.writer.binary("elementwise_pow", x, y, call.shape())


def _compared(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        writer, x, y = call.writer, call.x, call.optional("other")
        if y is None:
            number = call.number("other")
            whole = x.dtype in _FLOATING or float(number).is_integer()
            x = x if whole and x.dtype != "bool" else writer.cast(x, "float32" if not whole else "int64")
            return writer.binary(kind, x, writer.constant(number, x.dtype), call.shape(), "bool")
        dtype = str(torch.promote_types(getattr(torch, x.dtype), getattr(torch, y.dtype))).removeprefix("torch.")
        return writer.binary(kind, writer.cast(x, dtype), writer.cast(y, dtype), call.shape(), "bool")

    return rule


def _logical(kind: str) -> Rule:
    def rule(call: Call) -> Value:
        x, y = (call.writer.cast(one, "bool") for one in (call.x, call.value("other")))
        return call.add(kind, {"X": x, "Y": y})

    return rule


def _clip(call: Call) -> Value:
    names = ("min", "max") if "min" in call.args or "max" in call.args else ("min_val", "max_val")
    least, most = (None if call.args.get(name) is None else call.number(name) for name in names)
    return _clipped(call, call.writer.cast(call.x, call.dtype()), least, most)


def _clipped(call: Call, x: Value, least: float | None, most: float | None) -> Value:
    if least is not None and most is not None and (x.dtype == "float32" or (is_float32(least) and is_float32(most))):
        return call.add("clip", {"X": x}, {"min": float(least), "max": float(most)})
    for kind, bound in (("elementwise_max", least), ("elementwise_min", most)):
        if bound is not None:
            x = call.writer.binary(kind, x, call.writer.constant(bound, x.dtype), x.shape)
    return x


def _where(call: Call) -> Value:
    shape, writer, dtype = call.shape(), call.writer, call.dtype()
    condition = writer.spread(writer.cast(call.value("condition"), "bool"), shape)
    x, y = (writer.spread(writer.cast(call.value(key), dtype), shape) for key in ("self", "other"))
    return call.add("where", {"Condition": condition, "X": x, "Y": y})


def _masked_fill(call: Call) -> Value:
    if (rows := padded_lookup(call)) is not None:
        return rows
    shape, writer, dtype = call.shape(), call.writer, call.dtype()
    x = writer.spread(writer.cast(call.x, dtype), shape)
    mask = writer.spread(call.value("mask"), shape)
    return call.add("where", {"Condition": mask, "X": writer.filled_like(x, dtype, call.number("value")), "Y": x})


def _elu(call: Call) -> Value:
    alpha, scale, before = (call.number(key) for key in ("alpha", "scale", "input_scale"))
    if before != 1:
        raise Unsupported(f"its input is scaled by {before}, which Fluid's elu does not do")
    if scale != 1:
        return call.add("selu", {"X": call.x}, {"alpha": float(alpha), "scale": float(scale)})
    return call.add("elu", {"X": call.x}, {"alpha": float(alpha)})


def _threshold(call: Call) -> Value:
    threshold, value = call.number("threshold"), call.number("value")
    if value != 0:
        raise Unsupported(f"it gives {value} below its threshold, where Fluid's thresholded_relu gives 0")
    if threshold == 0:
        return call.add("relu", {"X": call.x})
    return call.add("thresholded_relu", {"X": call.x}, {"threshold": float(threshold)})


def _divided(call: Call) -> Value:
    if call.args["rounding_mode"] != "floor":
        raise Unsupported(f"it rounds by {call.args['rounding_mode']!r}; Fluid's elementwise_floordiv by 'floor'")
    return _whole("elementwise_floordiv", call)


def _remainder(call: Call) -> Value:
    return _whole("elementwise_mod", call)


def _whole(kind: str, call: Call) -> Value:
    writer, dtype, y = call.writer, call.dtype(), call.optional("other")
    other = writer.constant(call.number("other"), dtype) if y is None else writer.cast(y, dtype)
    return writer.binary(kind, writer.cast(call.x, dtype), other, call.shape())


def _cast(call: Call) -> Value:
    return call.writer.cast(call.x, call.dtype())


def _same(call: Call) -> Value:
    return call.x


def _scaled(scale: float) -> Rule:
    return lambda call: _with_number(call, "elementwise_mul", call.x, scale)


def _with(kind: str, attrs: Callable[[Call], dict[str, Attribute]]) -> Rule:
    return lambda call: call.add(kind, {"X": call.x}, attrs(call))


ELEMENTS: dict[str, Rule] = {
    **{f"aten.{name}.default": _plain(kind) for name, kind in _PLAIN.items()},
    **{f"aten.{name}.{overload}": _compared(kind)
       for name, kind in _COMPARED.items() for overload in ("Tensor", "Scalar")},
    **{f"aten.{name}.default": _logical(name) for name in ("logical_and", "logical_or", "logical_xor")},
    **{f"aten.{name}.{overload}": _of_two(f"elementwise_{name}")
       for name in ("add", "sub", "mul", "div") for overload in ("Tensor", "Scalar")},
    "aten.maximum.default": _of_two("elementwise_max"), "aten.minimum.default": _of_two("elementwise_min"),
    "aten.rsub.Scalar": _reversed_sub, "aten.rsub.Tensor": _reversed_sub,
    "aten.neg.default": _scaled(-1.0),
    "aten.div.Tensor_mode": _divided, "aten.div.Scalar_mode": _divided,
    "aten.remainder.Tensor": _remainder, "aten.remainder.Scalar": _remainder,
    "aten.pow.Tensor_Scalar": _power, "aten.pow.Tensor_Tensor": _power_of,
    "aten.clamp.default": _clip, "aten.hardtanh.default": _clip,
    "aten.clamp_min.default": _clip, "aten.clamp_max.default": _clip,
    "aten.where.self": _where, "aten.masked_fill.Scalar": _masked_fill,
    "aten.elu.default": _elu, "aten.threshold.default": _threshold,
    "aten.leaky_relu.default": _with("leaky_relu", lambda call: {"alpha": float(call.number("negative_slope"))}),
    "aten.gelu.default": _with("gelu", lambda call: {"approximate": call.args["approximate"] == "tanh"}),
    "aten.softplus.default": _with("softplus", lambda call: {
        "beta": float(call.number("beta")), "threshold": float(call.number("threshold")),
    }),
    "aten.hardshrink.default": _with("hard_shrink", lambda call: {"threshold": float(call.number("lambd"))}),
    "aten.softshrink.default": _with("softshrink", lambda call: {"lambda": float(call.number("lambd"))}),
    "aten.hardsigmoid.default": _with("hard_sigmoid", lambda _: {"slope": 1.0 / 6.0, "offset": 0.5}),
    "aten.hardswish.default": _with("hard_swish", lambda _: {"threshold": 6.0, "scale": 6.0, "offset": 3.0}),
    "aten.mish.default": _with("mish", lambda _: {"threshold": 20.0}),
    "aten.log_sigmoid_forward.default": lambda call: [call.add("logsigmoid", {"X": call.x}), None],
    "aten._to_copy.default": _cast,
    **{f"aten.{name}.default": _same for name in ("clone", "detach", "alias", "contiguous", "lift_fresh")},
}  # fmt: skip
