"""From a Program to the SSA graph over its replicas.

Where tensors are:
- `reduce`: every persistable that the forward pass does not write is shared by all replicas; each
  parameter's update runs once, on its owner. No broadcast is needed on CPU.
- `all_reduce`: what the optimizer writes has one copy a replica, and each replica updates its own.
- Buffers that the forward pass writes (running statistics, counters) are per replica in every mode.
- A replica without rows runs no forward and no backward but counters of runs and what follows from them alone; its
  copies are still updated, from the exchanged gradient of the first replica.

Source: multi_devices_graph_pass.cc (Fluid 1.8), DESIGN section 2 rules 7 and 8.

In Reduce mode each update has an owner: in the order in which gradients are made, each goes to the replica with the
fewest elements so far (the first of equals). Source: GetAppropriateDeviceID, multi_devices_graph_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.distributed.collective import COLLECTIVE
from penstock.errors import ProgramError
from penstock.graph.across import Across, begin_step, exchange_rows, exchange_sums
from penstock.graph.ssa import SHARED, Graph, GraphBuilder, Mode, OpHandle, Physical, SyncPlan, reduce_edges
from penstock.graph.state_of_runs import state_of_runs
from penstock.program.ir import Arg, Operator, Output, Ref, Role, VarDesc
from penstock.program.program import Program
from penstock.program.sequences import levels_of, ragged_feeds
from penstock.program.training.recomputation import DELAYED

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED


def place_updates(sizes: Iterable[tuple[str, int]], num_replicas: int) -> dict[str, int]:
    """Return the owner of each (parameter, elements), in order. Deterministic."""
    loads = [0] * num_replicas
    owners: dict[str, int] = {}
    for name, elements in sizes:
        owner = loads.index(min(loads))
        loads[owner] += elements
        owners[name] = owner
    return owners


def build_graph(program: Program, *, mode: Mode, num_replicas: int, active: int, across: Across | None = None) -> Graph:
    """Build the graph of `program` for `num_replicas` replicas of which the first `active` have rows.

    `across`: the replicas of other processes, with whom gradients are exchanged too.
    Raises ProgramError if a gradient is used before it is made, and for a program that no graph can run.
    """
    if not 1 <= active <= num_replicas:
        raise ProgramError(f"{active} of {num_replicas} replicas have rows; expected between 1 and {num_replicas}")
    check_runs_as_graph(program, mode, num_replicas)
    return Build(program, "local" if num_replicas == 1 else mode, num_replicas, active, across).run()


def check_runs_as_graph(program: Program, mode: Mode, num_replicas: int) -> None:
    """Raise ProgramError for a server's program, and for one that sends from every replica instead of the owner."""
    inner = next((op for op in program.operators if op.block), None)
    if inner is not None:
        raise ProgramError(
            f"operator {inner.name!r} is in block {inner.block}: a program with several blocks is one that serves; run "
            "it with fluid.Executor",
            operator=inner.name,
        )
    sends = next((op for op in program.operators if op.role & Role.RPC), None)
    if sends is not None and mode == "all_reduce" and num_replicas > 1:
        raise ProgramError(
            f"operator {sends.name!r} ({sends.source}) sends to parameter servers, on each of {num_replicas} replicas "
            "in AllReduce mode. Use BuildStrategy.ReduceStrategy.Reduce: one replica sends what all have summed",
            operator=sends.name,
        )


class Build:
    """One walk over a Program; `devices.py` has the one for replicas that do not share memory."""

    def __init__(
        self, program: Program, mode: Mode, num_replicas: int, active: int, across: Across | None = None
    ) -> None:
        self.across = across
        self.program, self.mode, self.num_replicas, self.active = program, mode, num_replicas, active
        self.builder = GraphBuilder()
        self.syncs: list[SyncPlan] = []
        self.gradient_of = {g: p for op in program.operators for p, g in op.role_vars}
        self.gradient_in = {program.variables[g].storage: g for g in self.gradient_of if g in program.variables}
        self.part_of = {
            p: v.name for v in program.variables.values() if v.kind == "selected_rows" for p in (v.rows, v.values)
        }
        self.written = {
            program.variables[n].storage
            for op in program.operators
            if op.role & _UPDATE
            for n in (*op.writes, *op.output_names())
        }
        self.everywhere = state_of_runs(program) if active < num_replicas else frozenset()
        self.of_rows = self._made_of_rows() if active < num_replicas else frozenset()
        self.owners = self._owners() if mode == "reduce" else {}
        self.pending: dict[str, int] = {}
        self.homes: dict[str, int] = {}
        self.made_on: dict[str, int] = {}  # temporary of an update -> the one replica that makes it

    # -- where a variable lives ------------------------------------------------------------------

    def shared(self, var: VarDesc) -> bool:
        """Whether all replicas use one copy."""
        root = self.program.variables[var.storage]
        if not root.persistable or root.buffer:
            return False
        return self.mode != "all_reduce" or root.name not in self.written

    def physical(self, name: str, replica: int) -> str:
        """Return the key of variable `name` as replica `replica` sees it; declare it at its first use."""
        var = self.program.variables[name]
        # A view is made by an operator on each replica, so it is the replica's own even if its storage is shared.
        where = SHARED if var.storage == name and self.shared(var) else replica
        key = _key(name, where)
        if key not in self.builder.variables:
            storage = key if var.storage == name else self._memory(var.storage, replica)
            self.builder.declare(Physical(key, name, where, storage, var.persistable, var.feed))
        return key

    # -- the walk --------------------------------------------------------------------------------

    def run(self) -> Graph:
        self.pending = self._producers()
        if self.across is not None:
            begin_step(self.builder, self.across)
        for name in (level for var in ragged_feeds(self.program) for level in levels_of(self.program, var.name)):
            for replica in range(self.active):  # also where no operator reads them: a fetch has a LoD
                self.physical(name, replica)
        for op in self.program.operators:
            if op.type == COLLECTIVE:  # a mark, which executors have read
                continue
            if op.role & _UPDATE:
                self._update(op)
            else:
                self._compute(op)
        self.finish()
        reduce_edges(self.builder.handles)
        return Graph(
            self.mode,
            self.num_replicas,
            self.active,
            self.builder.handles,
            self.builder.variables,
            self.syncs,
            self.owners,
            self.homes,
        )

    def finish(self) -> None:
        """Append what belongs after the last operator: nothing, where the memory is one and gradients are exchanged."""
        if self.across is None or not self.across.parameters:
            return
        for parameter in dict.fromkeys(self.gradient_of.values()):
            if self.program.variables[parameter].storage in self.written:
                made = exchange_sums(self.builder, self.across, parameter, (self.physical(parameter, 0),), 1)
                self.syncs.append(SyncPlan(parameter, parameter, SHARED, False, (made.index,)))

    def _producers(self) -> dict[str, int]:
        """How many operators make each parameter's gradient (two for a sparse one)."""
        counts: dict[str, int] = {}
        for op in self.program.operators:
            for _, gradient in op.role_vars if op.role & Role.BACKWARD else ():
                counts[gradient] = counts.get(gradient, 0) + 1
        return counts

    def _is_of_one_place(self, name: str) -> bool:
        """Whether an exchange or an update has made a variable, so that replicas have no values of their own."""
        if self.num_replicas == 1 and not self.exchanges_across:
            return False
        gradient = self.part_of.get(name, name)
        return name in self.made_on or (gradient in self.gradient_of and not self.pending.get(gradient, 1))

    def _source(self, name: str, replica: int) -> str:
        """What the forward or backward pass on `replica` reads: of an exchanged gradient the sum, wherever it is."""
        return self._operand(name, replica) if self._is_of_one_place(name) else self._own(name, replica)

    def _own(self, name: str, replica: int) -> str:
        """A replica's own copy. One without rows is fed nothing: of feeds, such as a learning rate, and of what is made
        of them, it reads the first replica's."""
        return self.physical(name, 0 if replica >= self.active and name in self.of_rows else replica)

    def _made_of_rows(self) -> frozenset[str]:
        """What replicas without rows do not have: feeds, and what operators make that they do not run."""
        variables = self.program.variables
        made = {n for op in self.program.operators if self._is_of_rows(op) for n in op.output_names()}
        made |= {name for name, var in variables.items() if var.feed}
        return frozenset(name for name in made if not variables[variables[name].storage].persistable)

    def _is_of_rows(self, op: Operator) -> bool:
        return not op.role & _UPDATE and op.name not in self.everywhere

    def _memory(self, root: str, replica: int) -> str:
        """The key of the memory that a view on `replica` is of."""
        gradient = self.gradient_in.get(root, root)
        if gradient == root or self.mode != "reduce" or not self._is_of_one_place(gradient):
            return self._source(root, replica)
        return self.physical(root, self._root(self.gradient_of[gradient]))

    def _place_of_writes(self, op: Operator) -> int | None:
        """The one replica that runs an operator which changes what only one has; None if each has its own."""
        roots = (self.program.variables[n].storage for n in op.writes)
        for name in (self.gradient_in.get(root, root) for root in roots):
            if name in self.made_on:
                return self.made_on[name]
            if self._is_of_one_place(name) and (self.mode == "reduce" or name in self.part_of):
                return self._root(self.gradient_of[self.part_of.get(name, name)]) if self.owners else 0
        return None

    def _compute(self, op: Operator) -> None:
        kind = "scale_loss_grad" if op.role == Role.BACKWARD | Role.LOSS else "computation"
        place = self._place_of_writes(op)
        if place is not None:
            self.made_on.update(dict.fromkeys(op.output_names(), place))
        everywhere = range(self.num_replicas if op.name in self.everywhere else self.active)
        for replica in everywhere if place is None else (place,):
            rows_of = replica if replica < self.active else 0
            own = self._on(op, lambda n, r=replica: self._source(n, r))  # type: ignore[misc]  # of one iteration
            self.builder.add(kind, own, replica, rows_of, self._waits_for(op, replica))  # type: ignore[arg-type]  # a literal
        for parameter, gradient in op.role_vars if op.role & Role.BACKWARD else ():
            self.pending[gradient] -= 1
            if not self.pending[gradient] and (self.active > 1 or self.exchanges_across):
                self._exchange(parameter, gradient)

    def _waits_for(self, op: Operator, replica: int) -> frozenset[int]:
        """What runs before an operator although it reads nothing of it: before activations are made again, all of the
        backward pass so far, as the activations that it has read are then gone."""
        if op.type != DELAYED:
            return frozenset()
        before = (h for h in self.builder.handles if h.replica == replica and h.kind == "computation")
        return frozenset(h.index for h in before if h.op.role & Role.BACKWARD)

    @property
    def exchanges_across(self) -> bool:
        """Whether gradients are exchanged with other processes."""
        return self.across is not None and not self.across.parameters

    def _exchange(self, parameter: str, gradient: str) -> None:
        var = self.program.variables[gradient]
        if self.across is not None:
            handles = self._exchange_across(self.across, parameter, gradient)
        elif var.kind == "selected_rows":
            handles = [self._gather(part) for part in (var.rows, var.values)]
        elif self.mode == "reduce":
            handles = [self._collective("reduce", gradient, self._root(parameter))]
        else:
            handles = [self._collective("all_reduce", gradient, SHARED)]
        owner = self.owners.get(parameter, SHARED)
        indices = tuple(h.index for h in handles)
        self.syncs.append(SyncPlan(parameter, gradient, owner, var.kind == "selected_rows", indices))

    def _exchange_across(self, across: Across, parameter: str, gradient: str) -> list[OpHandle]:
        """Exchange with other processes: all replicas of this one at once, or what their owner has summed."""
        var = self.program.variables[gradient]
        if var.kind == "selected_rows":
            own = [self._own_rows(part) for part in (var.rows, var.values)]
            return [exchange_rows(self.builder, across, (var.rows, var.values), own)]
        if self.mode == "reduce":
            summed = [self._collective("reduce", gradient, self._root(parameter))] if self.active > 1 else []
            keys: tuple[str, ...] = (self.physical(gradient, self._root(parameter)),)
            return [*summed, exchange_sums(self.builder, across, gradient, keys, 1)]
        keys = tuple(self.physical(gradient, r) for r in range(self.active))
        return [exchange_sums(self.builder, across, gradient, keys, self.active)]

    def _own_rows(self, part: str) -> str:
        """The key of one part of a sparse gradient, of all replicas of this process."""
        if self.active == 1:
            return self.physical(part, 0)
        return self._gather(part, f"{part}@OWN").op.output_names()[0]

    def _root(self, parameter: str) -> int:
        """The replica in whose buffer the sum arises: the owner, or the first one if the owner has no rows."""
        owner = self.owners[parameter]
        return owner if owner < self.active else 0

    def _collective(self, kind: str, gradient: str, root: int) -> OpHandle:
        keys = tuple(self.physical(gradient, r) for r in range(self.active))
        refs: Arg = tuple(Ref(k) for k in keys)
        args: tuple[Arg, ...] = (refs,) if kind == "all_reduce" else (refs, root)
        writes = keys if kind == "all_reduce" else (keys[root],)
        op = Operator(f"{kind}.{gradient}", f"penstock.{kind}_.default", args, (), writes=writes, role=Role.BACKWARD)
        return self.builder.add(kind, op, root, 0)  # type: ignore[arg-type]  # kind is a literal

    def _gather(self, part: str, key: str = "") -> OpHandle:
        keys = tuple(self.physical(part, r) for r in range(self.active))
        out = self.builder.declare(Physical(key or part, part, SHARED, key or part, False, False))
        op = Operator(f"gather.{part}", "aten.cat.default", (tuple(Ref(k) for k in keys),), (out,), role=Role.BACKWARD)
        return self.builder.add("gather", op, SHARED, 0)

    def _update(self, op: Operator) -> None:
        if self.mode == "all_reduce":
            replicas = list(range(self.num_replicas))
        else:
            replicas = [self.owners.get(op.role_vars[0][0], 0)] if op.role_vars else [0]
        if len(replicas) == 1:
            self.made_on.update(dict.fromkeys(op.output_names(), replicas[0]))
        kind = "rpc" if op.role & Role.RPC else "computation"
        for replica in replicas:
            self.builder.add(kind, self._on(op, lambda n, r=replica: self._operand(n, r)), replica, 0)  # type: ignore[arg-type, misc]  # kind is a literal; bound default

    def _operand(self, name: str, replica: int) -> str:
        """What an update on `replica` reads: exchanged gradients instead of its own, and what another one has made."""
        if name in self.made_on:
            return self._made(name)
        parameter = self.gradient_of.get(self.part_of.get(name, name))
        if parameter is None:
            return self._own(name, replica)
        if name in self.part_of and (self.active > 1 or self.exchanges_across):
            return name  # gathered, shared
        if self.mode == "reduce" and self.active > 1:
            return self.physical(name, self._root(parameter))
        return self.physical(name, replica if replica < self.active else 0)

    def _made(self, name: str) -> str:
        """A temporary of an update, on the replica that makes it; a view of a gradient is one of the exchanged one."""
        var, replica = self.program.variables[name], self.made_on[name]
        if var.persistable or var.storage == name:
            return self.physical(name, replica)
        key = _key(name, replica)
        if key not in self.builder.variables:
            storage = self._operand(var.storage, replica)
            self.builder.declare(Physical(key, name, replica, storage, var.persistable, var.feed))
        return key

    # -- rewriting -------------------------------------------------------------------------------

    def _on(self, op: Operator, place: Callable[[str], str]) -> Operator:
        def arg(value: Arg) -> Arg:
            if isinstance(value, Ref):
                return Ref(place(value.name))
            return tuple(arg(v) for v in value) if isinstance(value, tuple) else value

        def out(value: Output) -> Output:
            if isinstance(value, tuple):
                return tuple(place(v) for v in value)
            return None if value is None else place(value)

        return replace(
            op,
            args=tuple(arg(a) for a in op.args),
            kwargs=tuple((k, arg(v)) for k, v in op.kwargs),
            outputs=tuple(out(o) for o in op.outputs),
            writes=tuple(place(w) for w in op.writes),
        )

    def _owners(self) -> dict[str, int]:
        """Owners in the order in which gradients are complete."""
        order: dict[str, int] = {}
        for position, op in enumerate(self.program.operators):
            for parameter, _ in op.role_vars if op.role & Role.BACKWARD else ():
                order[parameter] = position
        names = sorted(order, key=lambda n: order[n])
        return place_updates([(n, _numel(self.program.variables[n])) for n in names], self.num_replicas)


def _numel(var: VarDesc) -> int:
    return math.prod(d for d in var.shape if isinstance(d, int))


def _key(name: str, replica: int) -> str:
    return name if replica == SHARED else f"{name}#{replica}"
