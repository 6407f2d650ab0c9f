"""A feed on its way into a plan: rows, sizes and tensors of each replica.

Two ways give the same: `Inputs` checks, converts and splits in Python and words every error; the native reader takes a
dict of arrays and tensors that fit as they are, at a fraction of a microsecond an input, and leaves the rest to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.exec.fed_rates import check_rates, rate_inputs
from penstock.exec.fed_state import check_number, set_own, set_state, state_in
from penstock.exec.feeding import Feed, Inputs, Share, check_guards, has_batch, has_rows_of_its_own, is_computed
from penstock.exec.lowering import Lowered
from penstock.exec.memory import ReplicaMemory
from penstock.lod_tensor import LoDTensor
from penstock.native.engine import FedShares, FeedReader
from penstock.program.expr import Expr
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.sequences import LENGTHS, is_ragged, steps_of
from penstock.scope import Scope


class Fed(Protocol):
    """`rows` and `bindings` (the value of each size symbol) of each active replica."""

    @property
    def rows(self) -> list[int]: ...
    @property
    def bindings(self) -> list[dict[str, int]]: ...
    def put(self, lowered: Lowered, memory: ReplicaMemory) -> None:
        """Put the tensors into the slots of a plan for these sizes."""
        ...


@dataclass(frozen=True, slots=True)
class _Listed:
    """A feed that was split in Python. `states`: the values of persistable inputs, see `state_in`."""

    program: Program
    shares: list[Share]
    rows: list[int]
    bindings: list[dict[str, int]]
    states: list[Share]

    def put(self, lowered: Lowered, memory: ReplicaMemory) -> None:
        for slots, share in zip(lowered.feed_slots, self.shares, strict=True):
            fed = [name for name in slots if name in share]  # what no operator reads need not be fed
            lowered.plan.set_all([slots[name] for name in fed], [share[name] for name in fed])
        set_own(self.states, lowered, self.program, memory)


@dataclass(frozen=True, slots=True)
class _Read:
    """A feed that was read natively. `names`: of the inputs, in the reader's order."""

    shares: FedShares
    names: Sequence[str]
    rows: list[int]
    bindings: list[dict[str, int]]

    def put(self, lowered: Lowered, memory: ReplicaMemory) -> None:
        for replica, slots in enumerate(lowered.slots_in_order(self.names)):
            self.shares.put(lowered.plan, replica, slots)


class Feeds:
    """What a program is fed, on `num_replicas` replicas. `fed_loss_gradient`: the user feeds the loss's gradient.

    `scope`: where persistable variables are set that are fed.
    """

    def __init__(self, program: Program, num_replicas: int, *, fed_loss_gradient: bool, scope: Scope) -> None:
        self._program, self._scope = program, scope
        self._inputs = Inputs(program, num_replicas, fed_loss_gradient=fed_loss_gradient)
        self._num_replicas = num_replicas
        self._rates = rate_inputs(program) if num_replicas > 1 else []
        variables = list(program.feeds())
        self._names = [v.name for v in variables]
        self._symbols = list(dict.fromkeys(s for v in variables for _, s in _symbols(v)))
        plain = not fed_loss_gradient and not any(v.buffer for v in variables)
        plain = plain and (num_replicas == 1 or not any(map(has_rows_of_its_own, variables)))
        plain = plain and not steps_of(program)  # made of the lengths, in Python
        plain = plain and not any(is_computed(d) for v in variables for d in v.shape)
        self._reader = _reader(program, variables, self._symbols) if plain and variables else None

    def read(self, feed: Feed) -> Fed:
        """Check and split a feed. Raises FeedError, TypeError."""
        if self._reader is not None and type(feed) is dict:
            feed = _plain(feed)
            shares = self._reader.read(feed, self._num_replicas)
            if shares is not None:
                sizes = shares.sizes
                bindings = [{s: n for s, n in zip(self._symbols, own, strict=True) if n >= 0} for own in sizes]
                return _Read(shares, self._names, shares.rows, bindings)
        states, rest = state_in(self._program, feed, self._scope, self._num_replicas)
        listed = self._inputs.shares(rest)
        check_rates(self._rates, listed)
        check_rates(self._rates, states)
        rows = [self._inputs.rows(s) for s in listed]
        found = _Listed(self._program, listed, rows, [self._inputs.bindings(s) for s in listed], states)
        if states:
            if isinstance(feed, Mapping) or len(feed or ()) == 1:
                check_number(states, len(listed))
            for own_sizes in found.bindings:
                check_guards(self._program.guards, own_sizes)
            set_state(self._scope, states[0])
        return found


def _plain(feed: dict[str, Any]) -> dict[str, Any]:
    """Return a feed with the rows of what has no lengths, as loaders and feeders give it."""
    if not any(type(value) is LoDTensor for value in feed.values()):
        return feed
    return {n: v.rows if type(v) is LoDTensor and not v.lengths else v for n, v in feed.items()}


def _symbols(var: VarDesc) -> list[tuple[int, str]]:
    return [(axis, str(d.args[0])) for axis, d in enumerate(var.shape) if isinstance(d, Expr) and d.op == "sym"]


def _reader(program: Program, variables: Sequence[VarDesc], symbols: Sequence[str]) -> FeedReader:
    number: Mapping[str, int] = {symbol: i for i, symbol in enumerate(symbols)}
    inputs: list[Any] = []
    place = {var.name: i for i, var in enumerate(variables)}
    for var in variables:
        dtype: torch.dtype = getattr(torch, var.dtype)
        fixed = [(axis, d) for axis, d in enumerate(var.shape) if isinstance(d, int)]
        named = [(axis, number[symbol]) for axis, symbol in _symbols(var)]
        lengths = place[var.name + LENGTHS] if is_ragged(program, var.name) else -1
        inputs.append((var.name, dtype, len(var.shape), fixed, named, has_batch(program, var.name), lengths))
    return FeedReader(inputs, len(symbols))
