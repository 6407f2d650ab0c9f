"""Mutation audit: a check that every operator writes what its Program declares, and nothing else.

Runs a Program by `Executor` and hashes the storage of every operand before and after each operator. Two kinds
of finding: an operand's storage changed although none of `Operator.writes` lies in it (the graph would miss an
edge), and a result shares memory with an operand although the Program describes it as a storage of its own, or
the other way round (views and storages of the Program are not those of the kernels).

A tool for tests and for adding operators: each operand is read twice more, so it is slow.
Source: DESIGN section 2, rule 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.exec.diagnostics import named_operands, named_results
from penstock.exec.executor import Executor
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.scope import Scope


@dataclass(frozen=True, slots=True)
class Omission:
    """What one operator does and its Program does not declare. `str()` names operator, variable and line."""

    kind: Literal["undeclared write", "undeclared view", "view that is a copy"]
    operator: str
    type: str
    variable: str
    source: str

    def __str__(self) -> str:
        where = f"{self.type}, {self.source or 'no line'}"
        return f"{self.kind}: operator {self.operator!r} ({where}), variable {self.variable!r}"


def audit(program: Program, feed: Mapping[str, Any], scope: Scope | None = None) -> list[Omission]:
    """Run `program` once and return what was found; an empty list is a clean Program.

    The scope is updated as by any run. Raises what `Executor.run` raises.
    """
    findings: list[Omission] = []

    def hook(op: Operator, operands: list[Any], call: Callable[[], Any]) -> Any:
        tensors = named_operands(op, operands)
        before = {_address(t): _digest(t) for _, t in tensors}
        result = call()
        findings.extend(_writes(op, tensors, before))
        findings.extend(_views(program, op, tensors, result))
        return result

    Executor().run_program(program, feed, None, scope, hook=hook)
    return findings


def _writes(op: Operator, tensors: list[tuple[str, torch.Tensor]], before: Mapping[int, bytes]) -> Iterator[Omission]:
    declared = {_address(t) for name, t in tensors if name in op.writes}
    for name, tensor in tensors:
        if _address(tensor) not in declared and _digest(tensor) != before[_address(tensor)]:
            yield Omission("undeclared write", op.name, op.type, name, op.source)


def _views(program: Program, op: Operator, tensors: list[tuple[str, torch.Tensor]], result: Any) -> Iterator[Omission]:
    storages = {program.variables[name].storage: _address(t) for name, t in tensors}
    addresses = set(storages.values()) - {0}
    for name, tensor in named_results(op, result):
        base = program.variables[name].storage
        if base == name and _address(tensor) in addresses:
            yield Omission("undeclared view", op.name, op.type, name, op.source)
        elif base != name and storages.get(base, _address(tensor)) != _address(tensor):
            yield Omission("view that is a copy", op.name, op.type, name, op.source)


def _address(tensor: torch.Tensor) -> int:
    """Where the storage lies; 0 for one without bytes."""
    return tensor.untyped_storage().data_ptr()


def _digest(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return b""
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    return hashlib.blake2b(content.numpy().tobytes(), digest_size=16).digest()
