"""Rows of tables on parameter servers that are asked for a batch early, while a pass over a data set trains.

A thread takes the next batch while a step runs, and starts the lookups that its step will make: those whose ids are
views and joins of inputs. The step's own lookup then takes the answer, which may lack what was pushed meanwhile, as any
read in async and half-async. In sync the rows are made by the round that is under way, so nothing is asked early;
in GEO tables are here.
Invariant: one batch ahead at most, so an answer is older than the step that takes it by the step before, no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.dataset.settings import Run
from penstock.exec.feeding import bind_symbols
from penstock.exec.prepared_block import PreparedBlock
from penstock.native import _feed
from penstock.native.intra_op import use_intra_op_threads_here
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.ps.remote import PREFETCH, Descriptor


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What a prefetch operator asks for: the variable of its ids, and which of them are no ids."""

    remote: str
    table: str
    ids: str
    padding_idx: int | None


class RowsAhead:
    """The lookups of a program whose ids are made of its inputs alone. `inputs`: the names of these; false: none."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lookups: list[_Lookup] = []
        self.inputs: set[str] = set()
        makers = {name: op for op in program.operators for name in (*op.output_names(), *op.writes)}
        needed: set[str] = set()
        for op in program.operators:
            if op.type != PREFETCH or Descriptor.parse(str(op.args[1])).mode == "sync":
                continue
            ids = op.input_names()[0]
            inputs, names = _from_inputs(program, makers, ids)
            if inputs:
                padding: Any = op.args[8]
                self._lookups.append(_Lookup(str(op.args[1]), str(op.args[2]), ids, padding))
                self.inputs |= inputs
                needed |= names
        self._block = PreparedBlock(program, [op for op in program.operators if op.name in needed], {})

    def __bool__(self) -> bool:
        return bool(self._lookups)

    def start(self, feed: Mapping[str, Any]) -> None:
        """Start the lookups of the step that will be fed with `feed`: arrays or tensors, of the `inputs` at least.

        Before the first step nothing is known of servers, so nothing is started.
        """
        from penstock.ps.opening import prefetch_ahead  # which programs without servers do without

        given = {name: torch.as_tensor(feed[name]) for name in self.inputs}
        values = self._block.run(given, bind_symbols(self._program, given))
        for lookup in self._lookups:
            ids = values[lookup.ids].reshape(-1)
            live = ids if lookup.padding_idx is None else ids[ids != lookup.padding_idx]
            prefetch_ahead(lookup.table, live, lookup.remote)

    def close(self) -> None:
        """Forget what was started and no step has taken: the next pass may be of another position, or other values."""
        from penstock.ps.opening import forget_ahead  # see `start`

        for remote in {lookup.remote for lookup in self._lookups}:
            forget_ahead(remote)


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


class RunAhead(Run):
    """A pass whose next batch is taken on a thread of its own, and shown to `see`, while the one before is trained on.

    One thread trains. What `run` or `see` raises is raised by `take`.
    """

    def __init__(self, run: Run, see: Callable[[_feed.Batch], None]) -> None:
        self.slots, self._run, self._see = run.slots, run, see
        self._changed = threading.Condition()
        self._next: _feed.Batch | None = None
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._take_all, name="penstock-batch-ahead", daemon=True)
        self._thread.start()

    def take(self) -> _feed.Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._ended)
            batch, self._next = self._next, None
            self._changed.notify_all()
            if batch is None and self._error is not None:
                raise self._error
            return batch

    def used(self, batch: _feed.Batch) -> None:
        self._run.used(batch)

    def fraction(self) -> float | None:
        return self._run.fraction()

    def stop(self) -> None:
        self._run.stop()

    def close(self) -> None:
        """End the thread; the pass that it takes from is closed by whoever opened it."""
        self.stop()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _take_all(self) -> None:
        use_intra_op_threads_here(1)  # more would spin beside a step that has all cores
        try:
            while (batch := self._run.take()) is not None:
                self._see(batch)
                if not self._hand_over(batch):
                    break
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `take` raises it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _hand_over(self, batch: _feed.Batch) -> bool:
        """Return once the batch was taken, as the next one is one step ahead then; False if nobody will."""
        with self._changed:
            self._next = batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is None or self._closed)
            return not self._closed


__all__ = ["RowsAhead", "RunAhead"]
