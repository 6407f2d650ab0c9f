"""Variables from numbers, arrays and other variables; parameters and global state by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Initializer
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes, wrap
from penstock.program.training import parameters
from penstock.program.training.parameters import ParamAttr


def create_parameter(
    shape: Sequence[int],
    dtype: str,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> Variable:
    """Create a parameter; it starts as Xavier's, or at zero if `is_bias`."""
    wanted = ParamAttr.of(attr) or ParamAttr()
    default = default_initializer or (Constant(0.0) if is_bias else None)
    prefix = default_main_program().unique("create_parameter") if name is None else name
    if name is not None and wanted.name is None:
        wanted = copy.copy(wanted)
        wanted.name = name
    return parameters.create_parameter(shape, dtype, wanted, default, prefix=prefix, suffix="w_0")


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: str,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Variable:
    """Create state that starts as `value` and lives on between runs.

    Raises ProgramError for persistable=False: what does not live on is `fill_constant`.
    """
    if not persistable:
        raise ProgramError(
            f"{user_line()}: create_global_var(persistable=False): use fill_constant for a value that a run makes anew"
        )
    return parameters.constant_state(name or default_main_program().unique("global_var"), value, dtype, shape)


def fill_constant(
    shape: Sequence[int], dtype: str, value: float, force_cpu: bool = False, out: Any = None, name: str | None = None
) -> Any:
    """Return a variable in which every element is `value`; with `out`, fill it and return it."""
    if out is not None:
        return out.fill_(value)
    recording = recording_of(default_main_program())
    with name_scope(name or default_main_program().unique("fill_constant")), recording_modes(recording):
        number = value if "float" in dtype else int(value)
        return wrap(recording, torch.full(list(shape), number, dtype=getattr(torch, dtype)))


def assign(input: Any, output: Any = None) -> Any:
    """Return a copy of a variable, or a variable that holds an array; with `output`, write there and return it."""
    if isinstance(input, Variable):
        return torch.clone(input) if output is None else output.copy_(input)  # type: ignore[arg-type]  # a Variable
    recording = recording_of(default_main_program())
    array = torch.from_numpy(np.array(input))
    with recording_modes(recording):
        value = wrap(recording, recording.capture(array).clone())
    return value if output is None else output.copy_(value)


def cast(x: Any, dtype: str) -> Any:
    """Return x as another dtype."""
    return x.to(getattr(torch, str(dtype).removeprefix("torch.")))


def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """Return float32 rows with a 1 at the id. Shapes: int64 [n, 1]; result [n, depth].

    An id outside [0, depth) gives a row of zeros, as Fluid does with allow_out_of_range=True.
    """
    with name_scope(default_main_program().unique("one_hot")):
        ids = input if input.desc.shape[-1] == 1 else input.unsqueeze(-1)
        with recording_modes(input._recording):
            columns = wrap(input._recording, torch.arange(depth))
        return (ids == columns).to(torch.float32)


def topk(input: Any, k: int, name: str | None = None) -> tuple[Any, Any]:
    """Return (values, int64 indices) of the k largest along the last dimension, largest first."""
    values, indices = torch.topk(input, k, -1)
    return values, indices


def argmax(x: Any, axis: int = 0) -> Any:
    """Return the int64 position of the largest along `axis`."""
    return torch.argmax(x, axis)
