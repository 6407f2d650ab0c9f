"""What Fluid saved, put into a Program's variables: found under Fluid's names, checked, then set all at once.

Parameters, statistics of batch-norm and state of optimizers must be there. Other state has no counterpart in Fluid
(counts of a metric, the rate that a schedule computes); it keeps its value, and a warning names it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.fluid import folders
from penstock.io.fluid.names import (
    accumulator,
    learning_rates,
    powers,
    powers_kept,
    state_of,
    statistic,
    to_fluid,
    updates_of,
)
from penstock.io.fluid.tensors import FluidTensor
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.scope import Scope

_log = logging.getLogger(__name__)
_BETA_UPDATES = ("penstock.adam_.default", "penstock.sparse_adam_.default")


@dataclass(frozen=True, slots=True)
class Saved:
    """Variables by Fluid's names. `names`: which there are; `read`: their values; `place`: what an error names."""

    place: str
    names: Sequence[str]
    read: Callable[[Sequence[str]], Mapping[str, FluidTensor]]


def saved_in(dirname: Path, filename: str | None, program: Program, variables: Sequence[VarDesc]) -> Saved | None:
    """Return what Fluid saved in a folder, or in one file of it; None if there is nothing of that kind."""
    if filename is not None:
        path = dirname / filename
        return _combined(path, program, variables) if path.is_file() else None
    if not dirname.is_dir():
        return None
    names = folders.names_in(dirname)
    if variables and not set(names) & {v.name for v in variables}:
        _check_combined(dirname, names)
        return None
    return Saved(str(dirname), names, lambda wanted: folders.read_separate(dirname, wanted))


def _check_combined(dirname: Path, names: Sequence[str]) -> None:
    """Raise UserError for a folder without a save of Penstock whose files are no variables of the program."""
    if names and not any(dirname.glob("*.json")):
        shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
        raise UserError(
            f"{dirname} has no file for any variable of the program; its files are {shown}. If one of them holds all "
            f"variables, name it: filename={names[0]!r}",
            file=str(dirname),
        )


def _combined(path: Path, program: Program, variables: Sequence[VarDesc]) -> Saved:
    """One file: its names are those that Fluid gives to the same variables."""
    names = sorted(in_fluid(program, variables))
    whole: dict[str, FluidTensor] = {}

    def read(wanted: Sequence[str]) -> Mapping[str, FluidTensor]:
        if not whole:
            whole.update(folders.read_combined(path, names))
        return {name: whole[name] for name in wanted}

    return Saved(str(path), names, read)


def parameters_in_fluid(program: Program) -> list[VarDesc]:
    """Return what Fluid counts as parameters: statistics of batch-norm are."""
    names = [v.name for v in program.variables.values() if v.persistable]
    return [v for v in program.variables.values() if v.parameter or (v.persistable and statistic(v.name, names))]


def in_fluid(program: Program, variables: Sequence[VarDesc]) -> list[str]:
    """Return Fluid's names of variables: those that a Program of Fluid would have saved for them."""
    whole = to_fluid([v.name for v in program.variables.values() if v.persistable])
    return [whole[v.name] for v in variables if v.name in whole] + [
        f"{parameter}_{power}_0"
        for step in (v.name for v in variables if v.name.endswith(".step"))
        for parameter in _updated(program, step)
        for power in powers_kept(step.removesuffix(".step"), list(program.variables))
    ]


def _updated(program: Program, step: str) -> list[str]:
    """Parameters of the optimizer that counts its updates in `step`."""
    states = (state_of(name, _parameters(program)) for name in program.variables)
    optimizer = step.removesuffix(".step")
    return list(dict.fromkeys(s.parameter for s in states if s is not None and s.optimizer == optimizer))


def saved_by_pickle(prefix: Path) -> Saved | None:
    """Return what `fluid.save(program, prefix)` of Fluid wrote; None if there is nothing of that kind."""
    if not prefix.with_name(prefix.name + folders.PARAMS).is_file():
        return None
    found = folders.read_pickles(prefix)
    return Saved(str(prefix) + folders.PARAMS, list(found), lambda wanted: {name: found[name] for name in wanted})


def load_saved(saved: Saved, program: Program, variables: Sequence[VarDesc], scope: Scope) -> None:
    """Set variables of `scope`. Raises UserError for one that is absent or does not fit; then none has changed."""
    where = {var.name: _found(var.name, program, saved) for var in variables}
    steps = {name: pair for name in where if (pair := _powers(name, program, saved.names)) is not None}
    needed = [name for name in where.values() if name is not None]
    values = saved.read([*needed, *(one for pair in steps.values() for one in pair if one is not None)])
    made: dict[str, torch.Tensor] = {}
    for var in variables:
        theirs = where[var.name]
        if theirs is not None:
            made[var.name] = fitted(var, theirs, values[theirs], saved.place)
        elif var.name in steps:
            powered = [power_in(values[one], one, saved.place) for one in steps[var.name] if one is not None]
            made[var.name] = _updates(program, var, powered)
    _check_absent([v for v in variables if v.name not in made], program, saved)
    for name, tensor in made.items():
        scope.set(name, tensor)


def those_in(saved: Saved, program: Program, variables: Sequence[VarDesc]) -> dict[str, list[str]]:
    """Return the variables that a save has, with Fluid's names of what they are made from."""
    found: dict[str, list[str]] = {}
    for var in variables:
        one, pair = _found(var.name, program, saved), _powers(var.name, program, saved.names)
        if one is not None:
            found[var.name] = [one]
        elif pair is not None:
            found[var.name] = [name for name in saved.names if re.search(r"_beta[12]_pow_acc_\d+\Z", name)]
    return found


def _found(name: str, program: Program, saved: Saved) -> str | None:
    stored = saved.names
    if name in stored:
        return name
    state = state_of(name, _parameters(program))
    if state is not None:
        return accumulator(state, stored)
    if name.endswith(".learning_rate"):
        return _rate(name, program, saved)
    renamed = statistic(name, program.variables)
    return renamed if renamed in stored else None


def _rate(name: str, program: Program, saved: Saved) -> str | None:
    """The learning rate of the same optimizer: they are numbered in the order of `minimize`."""
    theirs = learning_rates(saved.names)
    ours = [v.name for v in program.variables.values() if v.persistable and v.name.endswith(".learning_rate")]
    if theirs and len(theirs) != len(ours):
        raise UserError(
            f"{saved.place} has {len(theirs)} learning rates, {theirs}, but the program has {len(ours)}, {ours}: "
            "nothing says which belong together. Load it into the program that it was saved from",
            file=saved.place, variable=name, got=len(theirs), expected=len(ours),
        )  # fmt: skip
    return theirs[ours.index(name)] if theirs else None


def _parameters(program: Program) -> list[str]:
    return [v.name for v in program.variables.values() if v.parameter]


def _powers(name: str, program: Program, stored: Sequence[str]) -> tuple[str, str | None] | None:
    return powers(_updated(program, name), stored) if name.endswith(".step") else None


def power_in(saved: FluidTensor, name: str, place: str) -> float:
    """Return the power of a beta. Raises UserError for anything but one number from 0 to 1."""
    value = float(saved.values) if saved.values.numel() == 1 else math.nan
    if not 0.0 <= value <= 1.0:
        raise UserError(
            f"{place}: {name!r} is {saved.values.reshape(-1)[:4].tolist()}; expected one number from 0 to 1, the power "
            "of a beta. The training that wrote it had failed, or the file is another variable's",
            file=place, variable=name, got=value,
        )  # fmt: skip
    return value


def _updates(program: Program, var: VarDesc, found: Sequence[float]) -> torch.Tensor:
    first, second = (*found, None)[:2]
    assert first is not None  # `powers` has found it
    count = updates_of(first, second, _betas(program, var.name))
    return torch.tensor(float(count), dtype=getattr(torch, var.dtype))


def _betas(program: Program, step: str) -> Sequence[float]:
    """The betas of the optimizer that counts in `step`, as its updates have them."""
    for op in program.operators:
        if op.type in _BETA_UPDATES and step in op.input_names():
            return [arg for arg in op.args if isinstance(arg, float)][:2]
    counts = {step}
    for op in program.operators:
        if op.type == "aten._to_copy.default" and step in op.input_names():
            counts.update(op.output_names())
    bases = {
        float(op.args[0])
        for op in program.operators
        if op.type == "aten.pow.Scalar" and not counts.isdisjoint(op.input_names())
        if isinstance(op.args[0], (int, float))
    }
    return (*sorted(bases), 0.0, 0.0)[:2]


def fitted(var: VarDesc, name: str, saved: FluidTensor, place: str) -> torch.Tensor:
    """Return the value of a variable. Raises UserError for another dtype or shape than the Program has."""
    shape = tuple(int(str(d)) for d in var.shape)
    tensor = saved.values if saved.rows is None else _dense(saved, shape)
    if shape == () and tensor.numel() == 1:
        tensor = tensor.reshape(())
    got, expected = (f"{dtype}{list(sizes)}" for dtype, sizes in (
        (str(tensor.dtype).removeprefix("torch."), tensor.shape), (var.dtype, shape),
    ))  # fmt: skip
    if got != expected:
        raise UserError(
            f"{place}: Fluid's variable {name!r} is {got}, but {var.name!r} (created at "
            f"{var.source or 'an unknown line'}) is {expected}. Load it into the program that it was saved from",
            file=place, variable=var.name, got=got, expected=expected,
        )  # fmt: skip
    return tensor


def _dense(saved: FluidTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Selected rows as a table; rows that were not saved are zeros. Another height is left for the check of sizes."""
    if not shape or saved.height != shape[0] or saved.values.shape[1:] != shape[1:]:
        return saved.values
    return torch.zeros(shape, dtype=saved.values.dtype).index_copy_(0, torch.as_tensor(saved.rows), saved.values)


def _check_absent(absent: Sequence[VarDesc], program: Program, saved: Saved) -> None:
    kept = []
    for var in absent:
        if (
            not var.parameter
            and state_of(var.name, _parameters(program)) is None
            and statistic(var.name, program.variables) is None
        ):
            kept.append(var.name)
            continue
        names = to_fluid([v.name for v in program.variables.values() if v.persistable])
        raise UserError(
            f"{saved.place} has no variable of Fluid {names.get(var.name, var.name)!r} for {var.name!r} (created at "
            f"{var.source or 'an unknown line'}). Was it saved from another program, or by save_params while "
            "this loads all persistables?",
            file=saved.place, variable=var.name, got="nothing",
        )  # fmt: skip
    if kept:
        _log.warning("%s: Fluid saved nothing for %s; they keep their values", saved.place, ", ".join(kept))
