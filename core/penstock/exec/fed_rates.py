"""Inputs that learning rates are computed of: one number for all replicas.

Each replica updates its own copies of the parameters, with the same gradients. Were it fed a rate of its own, as it is
its own rows of other inputs, the copies would drift apart, and nothing compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from penstock.errors import FeedError
from penstock.program.ir import Role, VarDesc
from penstock.program.program import Program


def rate_inputs(program: Program) -> list[VarDesc]:
    """Return the inputs of fixed size, fed each time or persistable, that schedules or updates read or are computed of.

    Those with a batch are left out: replicas have rows of their own. Cost: a few walks over the Program.
    """
    storage = {name: var.storage for name, var in program.variables.items()}
    inputs = {name for name, var in program.variables.items() if _is_fixed_input(var)}
    if not inputs:
        return []
    names = [n for op in program.operators if op.role & Role.LR_SCHED for n in op.input_names()]
    names += [
        n for op in program.operators if op.role & Role.OPTIMIZE for n in op.input_names() if _is_rate(program, n)
    ]
    reached = {storage[n] for n in names}
    known = -1
    while known != len(reached):
        known = len(reached)
        for op in reversed(program.operators):
            if op.role & Role.FORWARD and reached & {storage[n] for n in op.output_arg_names}:
                reached |= {storage[n] for n in op.input_names()}
    return [program.variables[name] for name in program.variables if name in inputs & reached]


def check_rates(inputs: Iterable[VarDesc], shares: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raise FeedError if replicas are fed different values of an input that learning rates are computed of."""
    for var in inputs:
        fed = [share[var.name] for share in shares if var.name in share]
        if all(value is fed[0] for value in fed):
            continue
        found = [value.flatten().tolist() for value in fed]
        if any(one != found[0] for one in found):
            raise FeedError(
                f"input {var.name!r} (declared at {var.source}), which a learning rate is computed of, is fed "
                f"{', '.join(str(one[0] if len(one) == 1 else one) for one in found)} for {len(found)} replicas, whose "
                "parameters would become different ones. Feed the same number to all",
                variable=var.name, got=found, expected=found[0],
            )  # fmt: skip


def _is_rate(program: Program, name: str) -> bool:
    """Whether an update reads an input, or a persistable number, which a script may have assigned."""
    var = program.variables[name]
    return var.feed or (var.persistable and not var.parameter and all(size == 1 for size in var.shape))


def _is_fixed_input(var: VarDesc) -> bool:
    is_input = var.feed or (var.persistable and var.buffer and not var.parameter)
    return is_input and not var.distributed and all(isinstance(size, int) for size in var.shape)
