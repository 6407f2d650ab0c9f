"""Which values of a training a checkpoint holds, and how they come back into a scope."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import UserError
from penstock.io.checkpoints.record import Kind
from penstock.io.saves.variables import persistables, value_of
from penstock.program.ir import Role, VarDesc
from penstock.program.program import Program
from penstock.scope import Scope
from penstock.transpile.remote_variables import remote_variables


def saved_variables(program: Program, kind: Kind) -> list[VarDesc]:
    """Return the persistable variables that are this process's: those that servers keep are in the servers' part."""
    remote = {variable.name for variable in remote_variables([program])} if kind == "pserver" else set()
    return [var for var in persistables(program) if var.name not in remote]


def of_each_rank(program: Program) -> list[str]:
    """Return what optimizers keep for themselves: ranks that each update by their own gradients differ in it."""
    variables = program.variables
    written = [
        variables[variables[name].storage] for op in program.operators if op.role & Role.OPTIMIZE for name in op.writes
    ]
    return list(dict.fromkeys(var.name for var in written if var.persistable and not var.parameter))


def values_of(program: Program, scope: Scope, kind: Kind) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint holds. Raises UserError for a variable that has none yet.

    A trainer's program has variables that only servers use, and of those there is nothing here to save.
    """
    found: dict[str, torch.Tensor] = {}
    for var in saved_variables(program, kind):
        if kind == "pserver" and scope.find(var.name) is None and var.name not in program.captured:
            continue
        found[var.name] = value_of(program, var, scope)
    return found


def wanted(program: Program, kind: Kind, stored: set[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape, by name, of what is restored. Trainers of servers take what there is."""
    variables = saved_variables(program, kind)
    if kind == "pserver":
        variables = [var for var in variables if var.name in stored]
    return {var.name: (var.dtype, tuple(int(str(d)) for d in var.shape)) for var in variables}


def empty(program: Program, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Return tensors to receive values into. Raises UserError for a dtype that torch does not have."""
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in names.items():
        made = getattr(torch, dtype, None)
        if not isinstance(made, torch.dtype):
            raise UserError(f"variable {name!r} is {dtype!r}, which is no dtype", variable=name)
        found[name] = torch.empty(shape, dtype=made)
    return found


def put(values: Mapping[str, torch.Tensor], scope: Scope) -> None:
    """Replace variables of a scope, so that holders of copies make new ones."""
    for name, tensor in values.items():
        scope.set(name, tensor)


def generator_states() -> dict[str, Any]:
    """Return the states of the process's random generators (Python, numpy, torch), which user's code may draw from.

    Operators draw from none of them: their numbers follow from the program's seed, the step and the row (ADR 11).
    """
    name, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    return {
        "python": [version, list(numbers), gauss_next],
        "numpy": [name, np.asarray(keys, "<u4").tobytes().hex(), int(at), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def put_generators(states: Mapping[str, Any]) -> None:
    """Put the generators into captured states; those that were not captured stay."""
    if not states:
        return
    version, numbers, gauss_next = states["python"]
    random.setstate((version, tuple(numbers), gauss_next))
    name, keys, at, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), "<u4"), at, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
