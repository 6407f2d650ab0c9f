"""The SSA graph of a Program over devices that do not share memory: every replica holds its own copies.

- `all_reduce`: a dense gradient is summed in every replica's buffer; the rows of a sparse one are gathered on the first
  replica and copied to the others. Every replica updates its own parameters.
- `reduce`: a gradient arises on the owner, which updates its copy of the parameter; at the end of the step the owner
  broadcasts what other replicas read: the parameter, not the optimizer's state, which the owner alone has.
- Updates that belong to no parameter (schedules, counts of steps) run on every replica, with equal results; barriers of
  parameter servers, which count calls, on the first one.

Invariant: an operator on a replica reads the newest value, on that replica. `_held`: the replica with the newest
value of what an update writes; a `broadcast` handle copies what a reader lacks right before it. After the last handle
every replica's copy of every persistable variable is current. The graph runs on any device, on CPU too (tests).

Source: multi_devices_graph_pass.cc (Fluid 1.8), spec/fluid.md 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ProgramError
from penstock.graph.across import Across
from penstock.graph.build import Build, check_runs_as_graph
from penstock.graph.ssa import Graph, Mode, OpHandle, Physical
from penstock.program.ir import Operator, Ref, Role, TorchConst, VarDesc
from penstock.program.program import Program

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED
_DEVICE = TorchConst("device", "cpu")  # stands for the replica's device: lowering puts that in its place


def build_device_graph(
    program: Program, *, mode: Mode, num_replicas: int, active: int, across: Across | None = None
) -> Graph:
    """Build the graph of `program` for replicas on devices, of which the first `active` have rows.

    `across`: the replicas of other processes, each of which has one device, as this one has then.
    Raises ProgramError if a gradient is used before it is made, or if an update writes through a view on a replica
    that has no such view.
    """
    if not 1 <= active <= num_replicas:
        raise ProgramError(f"{active} of {num_replicas} replicas have rows; expected between 1 and {num_replicas}")
    if across is not None and num_replicas != 1:
        raise ProgramError(f"a trainer among several has one device; this one has {num_replicas}")
    check_runs_as_graph(program, mode, num_replicas)
    return _DeviceBuild(program, "local" if num_replicas == 1 else mode, num_replicas, active, across).run()


class _DeviceBuild(Build):
    def __init__(self, program: Program, mode: Mode, num_replicas: int, active: int, across: Across | None) -> None:
        super().__init__(program, mode, num_replicas, active, across)
        self._held: dict[str, set[int]] = {}  # variable -> replicas that have its newest value; a root stands for views
        self._num_copies = 0
        for name in sorted(self._read_everywhere()):
            for replica in range(num_replicas):
                self.physical(name, replica)

    def shared(self, var: VarDesc) -> bool:
        """No two replicas share memory."""
        return False

    def finish(self) -> None:
        """Broadcast what replicas read next time and do not have yet."""
        super().finish()
        for name, held in self._held.items():
            if self.program.variables[name].persistable:
                lacking = [r for r in range(self.num_replicas) if self._has(name, r) and r not in held]
                if lacking:
                    self._renew(name, lacking, f"broadcast.{name}")
        self.homes = self._homes()

    def _has(self, name: str, replica: int) -> bool:
        return f"{name}#{replica}" in self.builder.variables

    def _homes(self) -> dict[str, int]:
        """The replica whose copy a scope keeps, where it is not the first one: an owner that alone has the state."""
        homes: dict[str, int] = {}
        for variable in self.builder.variables.values():
            if variable.persistable and variable.storage == variable.key:
                homes[variable.name] = min(homes.get(variable.name, variable.replica), variable.replica)
        return {name: replica for name, replica in homes.items() if replica}

    def _read_everywhere(self) -> set[str]:
        """What updates write and forward passes read: each replica has it, also one that has no rows this time."""
        variables = self.program.variables
        return {
            variables[n].storage
            for op in self.program.operators
            if not op.role & _UPDATE
            for n in (*op.input_names(), *op.writes)
            if variables[variables[n].storage].persistable and variables[n].storage in self.written
        }

    # -- the walk --------------------------------------------------------------------------------

    def _compute(self, op: Operator) -> None:
        replicas = range(self.num_replicas if op.name in self.everywhere else self.active)
        place = self._place_of_writes(op)  # now: what is pending changes with the operator
        for name in op.input_names():
            root = self.program.variables[name].storage
            if self.program.variables[root].persistable:
                self._bring_root(root, replicas)
            elif self._is_of_one_place(name):
                self._bring(name, replicas if place is None else [place], written=name in op.writes)
        super()._compute(op)
        for name in op.output_names() if place is not None else ():
            self._held[name] = {self.made_on[name]}

    def _update(self, op: Operator) -> None:
        replicas: Sequence[int] = range(self.num_replicas)
        if self.mode == "reduce" and op.role_vars:
            replicas = [self.owners.get(op.role_vars[0][0], 0)]
        elif op.role & Role.RPC:
            replicas = [0]
        for name in dict.fromkeys(op.input_names()):
            self._bring(name, replicas, written=name in op.writes)
        kind = "rpc" if op.role & Role.RPC else "computation"
        for replica in replicas:
            placed = self._on(op, lambda n, r=replica: self._operand(n, r))  # type: ignore[misc]  # bound default
            self.builder.add(kind, placed, replica, 0)  # type: ignore[arg-type]  # kind is a literal
        for name in op.writes:
            root = self.program.variables[name].storage
            self._held[root if self.program.variables[root].persistable else name] = set(replicas)
        for name in op.output_names():
            self._held[name] = set(replicas)

    def _operand(self, name: str, replica: int) -> str:
        if name in self.part_of:
            return self._part(name, replica)
        return f"{name}@SUM#{replica}" if self._is_sum_elsewhere(name, replica) else self.physical(name, replica)

    def _is_sum_elsewhere(self, name: str, replica: int) -> bool:
        """Whether a replica has a sum of gradients as a copy, beside the gradient of its own."""
        if self.mode != "reduce" or name not in self.gradient_of or not self._is_of_one_place(name):
            return False
        return name not in self.made_on and replica != self._root(self.gradient_of[name])

    def _memory(self, root: str, replica: int) -> str:
        gradient = self.gradient_in.get(root, root)
        elsewhere = gradient != root and self._is_sum_elsewhere(gradient, replica)
        return self._operand(gradient if elsewhere else root, replica)

    def _part(self, name: str, replica: int) -> str:
        if self.exchanges_across:
            return name  # of all processes
        return f"{name}@ALL#{replica}" if self.active > 1 else self.physical(name, replica)

    # -- copies ----------------------------------------------------------------------------------

    def _bring(self, name: str, replicas: Sequence[int], *, written: bool) -> None:
        """Let every one of `replicas` have the newest value of `name`."""
        root = self.program.variables[name].storage
        if self.program.variables[root].persistable:
            self._bring_root(root, replicas)
            if name == root:
                return
        held = self._held.setdefault(name, set(range(self.active)))
        for replica in replicas:
            if replica in held:
                continue
            if written:
                raise ProgramError(
                    f"an update writes {name!r} on replica {replica}, but only replicas {sorted(held)} have it: an "
                    "update of one parameter may not write what an update of another has made",
                    variable=name,
                )
            self._copy(name, min(held), replica)
            held.add(replica)

    def _bring_root(self, root: str, replicas: Sequence[int]) -> None:
        held = self._held.get(root)
        lacking = [] if held is None else [r for r in replicas if r not in held]
        if lacking:
            self._num_copies += 1
            self._renew(root, lacking, f"broadcast.{root}.{self._num_copies}")

    def _renew(self, root: str, lacking: Sequence[int], label: str) -> None:
        """Write the newest value of a persistable variable into the copies of the replicas that lack it."""
        held = self._held[root]
        source = min(held)
        keys = tuple(self.physical(root, r) for r in lacking)
        args = (tuple(Ref(k) for k in keys), Ref(self.physical(root, source)))
        op = Operator(label, "penstock.broadcast_.default", args, (), writes=keys, role=Role.DIST)
        self.builder.add("broadcast", op, source, 0)
        held.update(lacking)

    def _copy(self, name: str, source: int, replica: int) -> OpHandle:
        """Make a temporary of one replica on another one too."""
        key, origin = (self._operand(name, r) for r in (replica, source))
        self.builder.declare(Physical(key, name, replica, key, False, False))
        op = Operator(
            f"broadcast.{name}.{replica}", "aten._to_copy.default", (Ref(origin),), (key,), (("device", _DEVICE),),
            role=Role.DIST,
        )  # fmt: skip
        return self.builder.add("broadcast", op, replica, 0)

    # -- gradients -------------------------------------------------------------------------------

    def _exchange(self, parameter: str, gradient: str) -> None:
        super()._exchange(parameter, gradient)
        root = self._root(parameter)
        var = self.program.variables[gradient]
        if var.kind == "selected_rows":
            self._held[var.rows] = {root}
            self._held[var.values] = {root}
        elif self.mode == "reduce":
            self._held[gradient] = {root}

    def _root(self, parameter: str) -> int:
        return super()._root(parameter) if self.mode == "reduce" else 0

    def _gather(self, part: str, key: str = "") -> OpHandle:
        root = self._root(self.gradient_of[self.part_of[part]])
        keys = tuple(self.physical(part, r) for r in range(self.active))
        out = self.builder.declare(Physical(self._part(part, root), part, root, self._part(part, root), False, False))
        args = (tuple(Ref(k) for k in keys), root)
        op = Operator(f"gather.{part}", "penstock.gather_rows.default", args, (out,), role=Role.BACKWARD)
        return self.builder.add("gather", op, root, 0)
