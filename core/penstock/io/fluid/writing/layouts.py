"""Rules for calls that lay variables out anew, take parts of them, put them together, or make them of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.io.fluid.writing.call import Call, Rule
from penstock.io.fluid.writing.description import Attribute, Float64s, Longs, Value
from penstock.io.fluid.writing.recurrent import recurrent_rows
from penstock.io.fluid.writing.sequences import expanded_rows
from penstock.io.fluid.writing.writer import Unsupported, dtype_number

_END = 2**31 - 1  # Fluid's attributes have 32 bits; beyond it torch means the end
_MOST_NUMBERS = 2**20


def _view(call: Call) -> Value:
    return call.writer.reshaped(call.x, call.shape())


def _squeeze(call: Call) -> Value:
    x, shape = call.x, call.shape()
    axes = [axis for axis in (call.axes("dim") if "dim" in call.args else range(len(x.shape))) if x.shape[axis] == 1]
    return call.writer.add("squeeze2", {"X": x}, {"axes": axes}, shape=shape) if axes else x


def _unsqueeze(call: Call) -> Value:
    return call.writer.unsqueezed(call.x, [call.axis("dim", len(call.x.shape) + 1)])


def _permuted(call: Call, order: Sequence[int]) -> Value:
    return call.add("transpose2", {"X": call.x}, {"axis": list(order)})


def _transpose(call: Call) -> Value:
    order = list(range(len(call.x.shape)))
    first, second = call.axis("dim0"), call.axis("dim1")
    order[first], order[second] = second, first
    return _permuted(call, order)


def _permute(call: Call) -> Value:
    return _permuted(call, call.axes("dims"))


def _expand(call: Call) -> Value:
    x, shape = call.x, call.shape()
    if len(x.shape) < len(shape):
        x = call.writer.unsqueezed(x, range(len(shape) - len(x.shape)))
    if x.shape == shape:
        return x
    pairs = list(zip(x.shape, shape, strict=True))
    times = [1 if have == want else want for have, want in pairs]
    if all(isinstance(one, int) for one in times):
        return call.writer.add("expand", {"X": x}, {"expand_times": [int(str(one)) for one in times]}, shape=shape)
    return call.writer.spread(x, shape)


def _repeat(call: Call) -> Value:
    x, times = call.x, call.ints("repeats")
    if len(x.shape) < len(times):
        x = call.writer.unsqueezed(x, range(len(times) - len(x.shape)))
    return call.add("expand", {"X": x}, {"expand_times": times})


def _slice(call: Call) -> Value:
    axis, x = call.axis("dim"), call.x
    start, end, step = (call.args[key] for key in ("start", "end", "step"))
    start, end = (0 if start is None else start), (_END if end is None or end == x.shape[axis] else end)
    if not all(isinstance(one, int) for one in (start, end, step)):
        raise Unsupported(f"its bounds [{start}, {end}] are sizes that a feed determines")
    bounds: dict[str, Attribute] = {
        "axes": [axis], "starts": [start], "ends": [min(end, _END)], "infer_flags": [1], "decrease_axis": [],
    }  # fmt: skip
    if step != 1:
        return call.add("strided_slice", {"Input": x}, {**bounds, "strides": [step]})
    return x if start == 0 and end >= _END else call.add("slice", {"Input": x}, bounds)


def _select(call: Call) -> Value:
    axis, index = call.axis("dim"), call.ints("index")[0]
    end = _END if index == -1 else index + 1
    attrs: dict[str, Attribute] = {
        "axes": [axis], "starts": [index], "ends": [end], "infer_flags": [1], "decrease_axis": [axis],
    }  # fmt: skip
    return call.add("slice", {"Input": call.x}, attrs)


def _concat(call: Call) -> Value:
    parts = [call.writer.cast(part, call.dtype()) for part in call.values("tensors")]
    return call.add("concat", {"X": parts}, {"axis": call.axis("dim", len(parts[0].shape))})


def _stack(call: Call) -> Value:
    parts = [call.writer.cast(part, call.dtype()) for part in call.values("tensors")]
    return call.add("stack", {"X": parts}, {"axis": call.axis("dim", len(call.shape()))}, out="Y")


def _parts(call: Call, kind: str, slot: str, attrs: dict[str, Attribute], out: str) -> list[Value]:
    made = [Value(call.shape(i), call.dtype(i)) for i in range(len(call.op.output_names()))]
    call.writer.append(kind, {slot: call.x}, {out: made}, attrs)
    return made


def _split(call: Call) -> list[Value]:
    axis = call.axis("dim")
    sections = [call.shape(i)[axis] for i in range(len(call.op.output_names()))]
    if not all(isinstance(one, int) for one in sections):
        raise Unsupported("it splits a size that a feed determines")
    attrs: dict[str, Attribute] = {"sections": [int(str(one)) for one in sections], "num": 0, "axis": axis}
    return _parts(call, "split", "X", attrs, "Out")


def _unbind(call: Call) -> list[Value]:
    axis = call.axis("dim")
    return _parts(call, "unstack", "X", {"axis": axis, "num": len(call.op.output_names())}, "Y")


def _index_select(call: Call) -> Value:
    axis = call.axis("dim")
    rows = (expanded_rows(call) or recurrent_rows(call)) if axis == 0 else None
    if rows is not None:
        return rows
    given = {"X": call.x, "Index": call.value("index")}
    return call.add("gather", given) if axis == 0 else call.add("index_select", given, {"dim": axis})


def _triangle(kind: str) -> Rule:
    return lambda call: call.add(
        "tril_triu", {"X": call.x}, {"diagonal": call.ints("diagonal")[0], "lower": kind == "tril"}
    )


def _flip(call: Call) -> Value:
    return call.add("reverse", {"X": call.x}, {"axis": call.axes("dims")})


def _pad(call: Call) -> Value:
    sides = call.ints("pad")
    pairs = [sides[i : i + 2] for i in range(0, len(sides), 2)][::-1]
    before = [[0, 0]] * (len(call.x.shape) - len(pairs))
    if any(side < 0 for pair in pairs for side in pair):
        raise Unsupported(f"it cuts off {sides}, which Fluid's pad does not do")
    paddings = [side for pair in (*before, *pairs) for side in pair]
    return call.add("pad", {"X": call.x}, {"paddings": paddings, "pad_value": float(call.number("value"))})


def _filled(number: float | None, key: str = "fill_value") -> Rule:
    def rule(call: Call) -> Value:
        value = call.number(key) if number is None else number
        return call.writer.filled(call.shape(), call.dtype(), value)

    return rule


def _filled_like(number: float | None) -> Rule:
    def rule(call: Call) -> Value:
        value = call.number("fill_value") if number is None else number
        return call.writer.filled_like(call.x, call.dtype(), value)

    return rule


def _arange(call: Call) -> Value:
    start, step = (call.number(key) if key in call.args else default for key, default in (("start", 0), ("step", 1)))
    count = math.ceil((call.number("end") - start) / step)
    if count > _MOST_NUMBERS:
        raise Unsupported(f"it makes {count} numbers; a model holds up to {_MOST_NUMBERS} in an operator")
    return _numbers(call, [start + step * i for i in range(count)])


def _numbers(call: Call, numbers: Sequence[float]) -> Value:
    """Numbers that the model holds itself."""
    dtype, whole, exact = call.dtype(), [int(one) for one in numbers], [float(one) for one in numbers]
    of_dtypes: dict[str, dict[str, Attribute]] = {
        "int64": {"int64_values": Longs(whole)}, "int32": {"int32_values": whole},
        "float32": {"fp32_values": exact}, "float64": {"fp64_values": Float64s(exact)},
    }  # fmt: skip
    values = of_dtypes.get(dtype)
    if values is None:
        raise Unsupported(f"it makes numbers of {dtype}; Fluid's assign_value has float32, float64, int32 and int64")
    return call.add("assign_value", {}, {"shape": [len(whole)], "dtype": dtype_number(dtype), **values})


LAYOUTS: dict[str, Rule] = {
    **{f"aten.{name}.default": _view for name in ("view", "_unsafe_view", "reshape", "_reshape_alias")},
    **{f"aten.squeeze.{overload}": _squeeze for overload in ("default", "dim", "dims")},
    "aten.unsqueeze.default": _unsqueeze,
    "aten.transpose.int": _transpose, "aten.permute.default": _permute,
    "aten.t.default": lambda call: _permuted(call, range(len(call.x.shape))[::-1]),
    "aten.expand.default": _expand, "aten.repeat.default": _repeat,
    "aten.slice.Tensor": _slice, "aten.select.int": _select,
    "aten.cat.default": _concat, "aten.stack.default": _stack,
    "aten.split_with_sizes.default": _split, "aten.split.Tensor": _split, "aten.unbind.int": _unbind,
    "aten.index_select.default": _index_select, "aten.constant_pad_nd.default": _pad,
    "aten.tril.default": _triangle("tril"), "aten.triu.default": _triangle("triu"), "aten.flip.default": _flip,
    "aten.full.default": _filled(None), "aten.zeros.default": _filled(0.0), "aten.ones.default": _filled(1.0),
    "aten.new_full.default": _filled(None), "aten.new_zeros.default": _filled(0.0),
    "aten.new_ones.default": _filled(1.0), "aten.scalar_tensor.default": _filled(None, "s"),
    "aten.full_like.default": _filled_like(None), "aten.zeros_like.default": _filled_like(0.0),
    "aten.ones_like.default": _filled_like(1.0),
    **{f"aten.arange.{overload}": _arange for overload in ("default", "start", "start_step")},
}  # fmt: skip
