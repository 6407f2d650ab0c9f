"""Prefetch of rows of tables on parameter servers: the lookups of the next batch start while a step runs.

Started are the lookups whose ids are views and joins of inputs. The step's own lookup then takes the answer, which may
lack what was pushed meanwhile, as any read in async and half-async. In sync the rows are made by the round that is
under way, so they are looked up when that is over, which changes no bit; this is for steps that are pushed by fused
operators: of a `CompiledProgram` or `train_from_dataset`. In GEO tables are local. At most one batch is prefetched, so
an answer is older than the step that takes it by the step before, no more. The path of this module is documented: a
loop of `exe.run` prefetches by `RowsAhead`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.exec.feeding import has_batch, split
from penstock.program.ir import Operator
from penstock.program.kernels import bind_symbols
from penstock.program.program import Program
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import remotes
from penstock.ps.remote import PREFETCH, Descriptor
from penstock.serving.blocks import PreparedBlock


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What a prefetch operator asks for: the variable of its ids, and which of them are no ids."""

    remote: str
    table: str
    ids: str
    padding_idx: int | None


class RowsAhead:
    """The lookups of a program whose ids are made of its inputs alone. `inputs`: the names of these; false: none.

    In sync mode steps take rows only if a `CompiledProgram` runs them: a program that is not compiled pushes gradient
    by gradient, and its steps look up their rows themselves. `close` it after the last step.

    `num_replicas`: which share each batch, by rows. Then only lookups in sync mode, which take no thread of Python.
    """

    def __init__(self, program: Program, num_replicas: int = 1) -> None:
        self._program, self._num_replicas = program, num_replicas
        self._lookups: list[_Lookup] = []
        self.inputs: set[str] = set()
        makers = {name: op for op in program.operators for name in (*op.output_names(), *op.writes)}
        needed: set[str] = set()
        for op in program.operators:
            if op.type != PREFETCH:
                continue
            ids = op.input_names()[0]
            inputs, names = _from_inputs(program, makers, ids)
            if inputs and (num_replicas == 1 or _are_shared(program, str(op.args[1]), inputs)):
                padding: Any = op.args[8]
                self._lookups.append(_Lookup(str(op.args[1]), str(op.args[2]), ids, padding))
                self.inputs |= inputs
                needed |= names
        self._block = PreparedBlock(program, [op for op in program.operators if op.name in needed], {})

    def __bool__(self) -> bool:
        return bool(self._lookups)

    def start(self, feed: Mapping[str, Any]) -> None:
        """Start the lookups of the step that will be fed with `feed`: arrays or tensors, of the `inputs` at least.

        It is the step after the one that ends next; in sync mode its rows are looked up when that has ended, and a
        second call before replaces the first. Nothing is started before the first step, as nothing is known of servers
        then, nor in sync mode without channels.
        """
        for client in self._clients():
            client.rows.begin_ahead()
        given = {name: torch.as_tensor(feed[name]) for name in self.inputs}
        shares = [given] if self._num_replicas == 1 else split(self._program, given, self._num_replicas)
        for share in shares:
            self._start(share)

    def _start(self, given: Mapping[str, torch.Tensor]) -> None:
        values = self._block.run(given, bind_symbols(self._program, given))
        for lookup in self._lookups:
            ids = values[lookup.ids].reshape(-1)
            live = ids if lookup.padding_idx is None else ids[ids != lookup.padding_idx]
            client = remotes.find_client(lookup.remote)
            if client is not None:
                client.rows.prefetch_ahead(lookup.table, live)

    def close(self) -> None:
        """Forget what was started and no step has taken: the next pass may be of another position, or other values."""
        for client in self._clients():
            client.rows.forget_ahead()

    def _clients(self) -> list[TrainerClient]:
        found = map(remotes.find_client, sorted({lookup.remote for lookup in self._lookups}))
        return [client for client in found if client is not None]


def _are_shared(program: Program, remote: str, inputs: set[str]) -> bool:
    return Descriptor.parse(remote).mode == "sync" and all(has_batch(program, name) for name in inputs)


def _from_inputs(program: Program, makers: Mapping[str, Operator], variable: str) -> tuple[set[str], set[str]]:
    """Return the inputs that a variable is made of and the operators that make it, by name; none if of other things."""
    inputs, names, todo = set[str](), set[str](), [variable]
    while todo:
        name = todo.pop()
        op = makers.get(name)
        described = program.variables.get(name)  # the state of random operators has none
        if op is None and described is not None and described.feed:
            inputs.add(name)
            continue
        if op is None or op.writes or not all(isinstance(o, str) for o in op.outputs) or not op.input_names():
            return set(), set()
        if op.name not in names:
            names.add(op.name)
            todo += op.input_names()
    return inputs, names
