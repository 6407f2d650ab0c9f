"""Slots, attributes and defaults of operators in paddlepaddle 2.6.2: `python -m bench.peers.paddle_protos TYPE …`.

Prints JSON: a type to its inputs ("Xs*" a list, "Y?" one that may be absent), outputs, and attributes with their
defaults, null for one that has none. Types that 2.6.2 does not have are left out. Runs in the peer's own environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from paddle.base import core, framework

_OF_EVERY_OPERATOR = {"op_role", "op_role_var", "op_namescope", "op_callstack", "op_device", "with_quant_attr"}


def main() -> None:
    """Print what the arguments ask for."""
    protos = framework.OpProtoHolder.instance().op_proto_map
    json.dump({name: _described(name, protos[name]) for name in sys.argv[1:] if name in protos}, sys.stdout)


def _described(name: str, proto: Any) -> list[Any]:
    defaults = core.get_op_attrs_default_value(name.encode())
    attrs = {a.name: _plain(defaults.get(a.name)) for a in proto.attrs if a.name not in _OF_EVERY_OPERATOR}
    return [_slots(proto.inputs), _slots(proto.outputs), attrs]


def _slots(slots: Iterable[Any]) -> list[str]:
    return [slot.name + "*" * slot.duplicable + "?" * slot.dispensable for slot in slots]


def _plain(value: Any) -> Any:
    """A value without the rounding to float32."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_plain(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
