"""Rules for sequences: Fluid's operators take their lengths from the LoD of a variable.

A variable gets the LoD of a ragged input with `lod_reset`, where the operators between have not passed it on.
"""

from __future__ import annotations

from penstock.io.fluid.writing.call import Call, Result, Rule
from penstock.io.fluid.writing.description import Attribute, Value
from penstock.io.fluid.writing.writer import Unsupported
from penstock.program.ir import Ref


def _pool(call: Call) -> Result:
    writer, owner = call.writer, call.writer.owner_of(_name(call.args["lengths"]))
    x = writer.with_lod(call.value("x"), owner)
    attrs: dict[str, Attribute] = {
        "pooltype": str(call.args["kind"]).upper(), "pad_value": float(call.number("pad_value")), "is_test": True,
    }  # fmt: skip
    pooled = call.add("sequence_pool", {"X": x}, attrs)
    pooled.owner = writer.outer(owner)
    return [pooled, None]


def _name(given: object) -> str:
    if isinstance(given, Ref):
        return given.name
    raise Unsupported(f"its lengths are {given}; expected those of a ragged input")


def expanded_rows(call: Call) -> Value | None:
    """Return what `index_select` gives where each sequence takes its row for each of its own; None for another one."""
    maker = call.maker("index")
    if maker is None or maker.type != "penstock.sequence_rows.default" or maker.args[2] != "sequence":
        return None
    writer, owner = call.writer, call.writer.owner_of(_name(maker.args[0]))
    if not writer.program.variables[owner].is_data:
        raise Unsupported(f"the LoD of {owner!r} is at hand as that of a result only")
    made = call.add("sequence_expand_as", {"X": call.x, "Y": writer.value(owner)})
    made.owner = owner
    return made


def convolved(call: Call, at: int, weight: Value) -> Value | None:
    """Return the product of a weight and the windows over each row of sequences; None for another operand.

    The windows have zeros beyond the ends of their sequence, as sequence_conv does without trained padding.
    """
    masked = call.behind(call.op, (at, "view.default"), (0, "masked_fill.Scalar"))
    found = call.behind(masked, (0, "view.default"), (0, "index_select.default"))
    chosen = call.behind(found, (2, "view.default"), (0, "where.self"))
    offsets = call.behind(chosen, (1, "add.Tensor"), (1, "add.Tensor"))
    ones = call.behind(offsets, (0, "cumsum.default"), (0, "new_ones.default"))
    inside = call.behind(chosen, (0, "logical_and.default"), (0, "ge.Scalar"), (0, "add.Tensor"))
    rows = call.behind(inside, (0, "unsqueeze.default"), (0, "sequence_rows.default"))
    if masked is None or found is None or offsets is None or ones is None or rows is None or masked.args[2] != 0:
        return None
    sizes, first = ones.args[1], offsets.args[1]
    if not isinstance(sizes, tuple) or not isinstance(sizes[-1], int) or not isinstance(first, int):
        return None
    x = call.writer.with_lod(call.writer.value(_name(found.args[0])), call.writer.owner_of(_name(rows.args[0])))
    attrs: dict[str, Attribute] = {
        "contextStart": first + 1, "contextLength": sizes[-1], "contextStride": 1, "paddingTrainable": False,
    }  # fmt: skip
    shape = (x.shape[0], weight.shape[1])
    made = call.writer.add("sequence_conv", {"X": x, "Filter": weight}, attrs, shape=shape)
    made.owner = x.owner
    return made


SEQUENCES: dict[str, Rule] = {"penstock.sequence_pool.default": _pool}
