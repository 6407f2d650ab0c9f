"""Rules for recurrent layers over ragged rows, which are recorded as padding, a loop over steps, and rows again.

Fluid has one operator for all of it. What is recorded is known by its calls, from the last one backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.io.fluid.writing.call import Call, results_of
from penstock.io.fluid.writing.description import Attribute, Value
from penstock.io.fluid.writing.writer import Unsupported
from penstock.program.ir import Operator, Ref

_LSTM, _GRU = "lstm_sequence.default", "gru_sequence.default"


@dataclass(frozen=True, slots=True)
class _Loop:
    """The recorded loop with the rows that it is given, their bias, and whether it runs backwards."""

    op: Operator
    rows: Value
    bias: Value | None
    is_reverse: bool


def recurrent_rows(call: Call) -> Value | None:
    """Return what `index_select` gives where it takes the rows of sequences out of a loop; None for another one."""
    padded = call.behind(call.op, (0, "view.default"), (0, "masked_fill.Scalar"))
    turned = call.behind(padded, (0, "gather.default"))
    last = call.behind(turned or padded, (0, "transpose.int"))
    loop = call.behind(last, (0, _LSTM)) or call.behind(last, (0, _GRU))
    lengths = call.behind(call.op, (2, "add.Tensor"), (1, "sequence_rows.default"))
    if last is None or loop is None or lengths is None:
        return None
    results = results_of(loop)
    made = call.writer.shared.get(loop.name)
    if made is None:
        found = _loop(call, loop, _name(lengths.args[0]), turned is not None)
        made = call.writer.shared[loop.name] = _lstm(call, found) if loop.type.endswith(_LSTM) else _gru(call, found)
    return made[results.index(_name(last.args[0]))]


def _name(given: object) -> str:
    if isinstance(given, Ref):
        return given.name
    raise Unsupported(f"its operand is {given}; expected a variable")


def _loop(call: Call, op: Operator, lengths: str, is_reverse: bool) -> _Loop:
    first = call.behind(op, (0, "transpose.int"))
    turned = call.behind(first, (0, "gather.default"))
    if (turned is not None) != is_reverse:
        raise Unsupported("it is turned round on one side alone")
    biased = call.behind(turned or first, (0, "add.Tensor"))
    packed = call.behind(
        biased or turned or first, (0, "view.default"), (0, "index_select.default"), (0, "cat.default")
    )
    parts = packed.args[0] if packed is not None else ()
    if not isinstance(parts, tuple) or len(parts) != 2:
        raise Unsupported("its steps are no rows of sequences")
    rows = call.writer.with_lod(call.writer.value(_name(parts[1])), call.writer.owner_of(lengths))
    return _Loop(op, rows, None if biased is None else _bias(call, biased), is_reverse)


def _bias(call: Call, biased: Operator) -> Value:
    """The whole parameter: with peepholes, the gates have a part of it."""
    at, operand = biased, 1
    while (part := call.behind(at, (operand, "slice.Tensor"))) is not None:
        at, operand = part, 0
    return call.writer.value(_name(at.args[operand]))


def _state(call: Call, loop: Operator, at: int) -> list[Value]:
    """A first state that is given; none for zeros."""
    given = call.behind(loop, (at, "new_zeros.default")) is None
    return [call.writer.value(_name(loop.args[at]))] if given else []


def _activations(op: Operator, first: int, defaults: tuple[str, ...]) -> list[str]:
    given = [str(one) for one in op.args[first:]]
    return [*given, *defaults[len(given) :]]


def _lstm(call: Call, loop: _Loop) -> list[Value]:
    """Source: lstm_op.cc. Operands of the loop: gates, h0, c0, weight, peepholes, reverse, keep, activations."""
    op, writer = loop.op, call.writer
    weight, peepholes = writer.value(_name(op.args[3])), isinstance(op.args[4], Ref)
    hidden = int(str(weight.shape[0]))
    bias = loop.bias or writer.constant(0.0, weight.dtype, [1, 4 * hidden])
    if op.args[5] or bias.shape != (1, (7 if peepholes else 4) * hidden):
        raise Unsupported(f"its bias has the sizes {list(bias.shape)}, or all steps are turned round at once")
    gate, cell, candidate = _activations(op, 7, ("sigmoid", "tanh", "tanh"))
    attrs: dict[str, Attribute] = {
        "use_peepholes": peepholes, "is_reverse": loop.is_reverse, "gate_activation": gate, "cell_activation": cell,
        "candidate_activation": candidate,
    }  # fmt: skip
    inputs = {"Input": [loop.rows], "H0": _state(call, op, 1), "C0": _state(call, op, 2), "Weight": [weight],
              "Bias": [bias]}  # fmt: skip
    made = [Value((loop.rows.shape[0], hidden), weight.dtype, loop.rows.owner) for _ in range(2)]
    given = {slot: values for slot, values in inputs.items() if values}
    writer.append("lstm", given, {"Hidden": made[0], "Cell": made[1]}, attrs)
    return made


def _gru(call: Call, loop: _Loop) -> list[Value]:
    """Source: gru_op.cc. Operands of the loop: gates, h0, weight, reverse, origin mode, keep, activations."""
    op, writer = loop.op, call.writer
    weight = writer.value(_name(op.args[2]))
    if op.args[3]:
        raise Unsupported("all its steps are turned round at once")
    gate, candidate = _activations(op, 6, ("sigmoid", "tanh"))
    attrs: dict[str, Attribute] = {
        "is_reverse": loop.is_reverse, "gate_activation": gate, "activation": candidate,
        "origin_mode": bool(op.args[4]),
    }  # fmt: skip
    inputs = {"Input": [loop.rows], "H0": _state(call, op, 1), "Weight": [weight],
              "Bias": [loop.bias] if loop.bias is not None else []}  # fmt: skip
    made = Value((loop.rows.shape[0], weight.shape[0]), weight.dtype, loop.rows.owner)
    writer.append("gru", {slot: values for slot, values in inputs.items() if values}, {"Hidden": made}, attrs)
    return [made]
