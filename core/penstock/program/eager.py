"""Errors for eager use of Fluid's API: it records a Program, and has no eager mode of its own.

Eager code is torch's: `penstock.capture` makes a Program of a torch module. Pure.
Source: "only available in static graph mode", the note of Fluid's documents (spec/fluid.md, row 38).
"""

from __future__ import annotations

import torch

from penstock.errors import SpecError

ADVICE = (
    "there is no eager mode here: Fluid's API records a Program, which an Executor runs. Write eager code in torch "
    "itself, and let penstock.capture(module, loss, optimizer, example_inputs) make a Program of the module"
)


def words(value: object) -> str:
    """Return what was given: a tensor by dtype and shape, a module by its class, else its text and its class."""
    if isinstance(value, torch.nn.Module):
        return f"a torch module ({type(value).__name__})"
    if isinstance(value, torch.Tensor):
        return f"a tensor that torch has computed, {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def advice(value: object) -> str:
    """Return what to do instead, to be put behind an error's text; nothing unless `value` is a tensor or a module."""
    if isinstance(value, torch.nn.Module):
        return f". {ADVICE[0].upper()}{ADVICE[1:]}"
    if isinstance(value, torch.Tensor):
        return (
            ". There is no eager mode here: declare an input by fluid.data, pass what a layer returned, and give "
            "values to run(feed={name: array}). penstock.capture makes a Program of a torch module"
        )
    return ""


def in_dygraph_mode() -> bool:
    """Return False: Fluid's API always records."""
    return False


def disable_dygraph() -> None:
    """Do nothing: it is so."""


def enable_dygraph(place: object = None) -> None:
    """Raise SpecError with what to do instead."""
    raise SpecError(f"fluid.enable_dygraph: {ADVICE}", got="dygraph")
