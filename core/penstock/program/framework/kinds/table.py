"""The table of Fluid's types, and how one of them is recorded."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import ProgramError
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind
from penstock.program.framework.kinds.detections import DETECTIONS
from penstock.program.framework.kinds.elements import ELEMENTS
from penstock.program.framework.kinds.losses import LOSSES
from penstock.program.framework.kinds.products import PRODUCTS
from penstock.program.framework.kinds.sequences import SEQUENCES
from penstock.program.framework.kinds.shapes import SHAPES
from penstock.program.framework.kinds.updates import UPDATES
from penstock.program.record.source import user_line

KINDS: Mapping[str, Kind] = {
    **ELEMENTS, **SHAPES, **PRODUCTS, **LOSSES, **SEQUENCES, **DETECTIONS, **UPDATES,
}  # fmt: skip
Slots = Mapping[str, Sequence[Any]]


def similar(type_: str, most: int = 5) -> list[str]:
    """Return the types of the table whose names are like an unknown one, the most alike first."""
    begun = [name for name in KINDS if name.startswith(type_) or type_.startswith(name)]
    return list(dict.fromkeys([*difflib.get_close_matches(type_, KINDS, most), *sorted(begun)]))[:most]


def asked(type_: str, inputs: Slots, attrs: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over what a call of a type in the table asks for and is not done."""
    return KINDS[type_].asks(inputs, attrs)


def recorded(type_: str, inputs: Slots, outputs: Slots, attrs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Record an operator of a type in the table into the current Program; return its results by slot.

    Raises ProgramError for what is missing, and for an input, an output or an attribute that is not honoured.
    """
    kind = KINDS[type_]
    unknown = sorted(set(outputs) - set(kind.output_slots))
    if wrong := [*kind.asks(inputs, attrs), *(f"output {slot!r}" for slot in unknown)]:
        what = f"{user_line()}: operator {type_!r} has {', '.join(wrong)}; that is not supported"
        raise ProgramError(f"{what}. It takes {signature(type_)}")
    honoured = {**kind.attrs, **{name: value for name, value in attrs.items() if name in kind.attrs}}
    made = kind.make(Call(type_, inputs, honoured, outputs))
    if isinstance(made, dict):
        return made
    if isinstance(made, list):
        return {kind.made[0]: made}
    results = made if isinstance(made, tuple) else (made,)
    return {slot: [value] for slot, value in zip(kind.made, results, strict=True) if value is not None}


def signature(type_: str) -> str:
    """Return a type's slots and attributes in words: "inputs X, Y; attributes axis=-1; outputs Out"."""
    kind = KINDS[type_]
    attrs = [name if value is REQUIRED else f"{name}={value!r}" for name, value in kind.attrs.items()]
    parts = [
        f"inputs {', '.join(kind.inputs.split())}" if kind.inputs else "no inputs",
        f"attributes {', '.join(attrs)}" if attrs else "no attributes",
        f"outputs {', '.join(slot.rstrip('-') for slot in kind.outputs.split())}",
    ]
    return "; ".join(parts)
