"""Rules for lookups: ids have a last dimension of size 1 in Fluid, and the row of padding is the lookup's own."""

from __future__ import annotations

from penstock.io.fluid.writing.call import Call, Rule
from penstock.io.fluid.writing.description import Attribute, Long, Value

_LOOKUPS = ("lookup_table", "lookup_table_v2")


def _lookup(table: str, ids: str, padding: str | None) -> Rule:
    def rule(call: Call) -> Value:
        row = -1 if padding is None else call.ints(padding)[0]
        return _looked_up(call, call.value(table), call.value(ids), row)

    return rule


def _looked_up(call: Call, table: Value, ids: Value, padding: int) -> Value:
    """Rows of a table, by ids with or without a last dimension of size 1."""
    kind, squeeze = "lookup_table_v2", ids.made_by("squeeze2")
    if squeeze is not None:
        whole = squeeze.inputs["X"][0]
        if squeeze.attrs["axes"] == [len(whole.shape) - 1]:
            kind, ids = "lookup_table", whole
    attrs: dict[str, Attribute] = {"padding_idx": Long(padding), "is_sparse": False, "is_distributed": False}
    return call.add(kind, {"W": table, "Ids": ids}, attrs)


def padded_lookup(call: Call) -> Value | None:
    """Return what `masked_fill` gives where it sets the rows of one id of a lookup to 0; None for another one."""
    rows, equal = call.maker("self"), call.behind(call.op, (1, "unsqueeze.default"), (0, "eq.Scalar"))
    if rows is None or equal is None or rows.type not in LOOKUPS:
        return None
    if call.number("value") != 0 or equal.args[0] != rows.args[1] or not isinstance(equal.args[1], int):
        return None
    made = call.x.made_by(*_LOOKUPS)
    if made is None:
        return None
    return call.add(made.type, dict(made.inputs), {**made.attrs, "padding_idx": Long(equal.args[1])})


LOOKUPS: dict[str, Rule] = {
    "aten.embedding.default": _lookup("weight", "indices", None),  # torch's padding_idx is one of gradients alone
    "penstock.lookup_table.default": _lookup("table", "ids", "padding_idx"),
}
