"""Where an operator that was recorded without devices makes its results. Pure functions over schemas.

A Program knows one device, the one it was recorded on (CPU). On another device every `device` argument names that one:
those that the recording has set, and those of operators that take no tensor and would make their result on CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from penstock.compat.torch import has_kernel, schema_of
from penstock.errors import SpecError
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.kernels import CAPTURED, resolve


def _device_position(schema: Any) -> int | None:
    return next((i for i, a in enumerate(schema.arguments) if a.name == "device" and "Device" in str(a.type)), None)


def takes_tensors(schema: Any) -> bool:
    """Whether an operator has operands that say where it runs."""
    return any("Tensor" in str(a.type) for a in schema.arguments)


def put_on_device(schema: Any, arguments: list[tuple[str, object]], device: torch.device) -> None:
    """Set the device among the arguments of a call, which are all there, in the order of the schema."""
    position = _device_position(schema)
    if position is not None and (arguments[position][1] is not None or not takes_tensors(schema)):
        arguments[position] = ("const", device)


def on_device(schema: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Set the device among the arguments of a Python call: those that were given, by position and by name."""
    position = _device_position(schema)
    if position is None:
        return
    if position < len(args):
        args[position] = device
    elif kwargs.get("device") is not None or not takes_tensors(schema):
        kwargs["device"] = device


def moved(value: Any, device: torch.device) -> Any:
    """Return a result on the device; what a random operator without operands has made comes from the processor."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(v, device) for v in value] if isinstance(value, list) else value


def refuse_without_kernel(graph: Graph, key: str = "CUDA") -> None:
    """Raise SpecError naming the first operator that a device of this kind cannot run."""
    for handle in first_of_each_type(graph.handles):
        name = handle.op.type.rsplit(".", 1)[0].replace(".", "::", 1)
        if not name.startswith("penstock::"):
            continue  # torch's own: it says itself what it cannot do, and knows ways round that cannot be asked for
        if not takes_tensors(schema_of(resolve(handle.op))) or not _has_kernel(name, key):
            raise SpecError(
                f"operator {handle.op.name!r} ({handle.op.type}, {handle.op.source or 'no line'}) has no kernel for "
                f"{key}; run this program with use_cuda=False",
                operator=handle.op.name,
            )


def first_of_each_type(handles: Iterable[OpHandle]) -> list[OpHandle]:
    """Return the first handle of each type of operator."""
    found: dict[str, OpHandle] = {}
    for handle in handles:
        if handle.op.type != CAPTURED:
            found.setdefault(handle.op.type, handle)
    return list(found.values())


def _has_kernel(name: str, key: str) -> bool:
    return any(has_kernel(name, k) for k in (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd"))
