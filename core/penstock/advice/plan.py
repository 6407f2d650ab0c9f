"""From a recorded graph to the tasks of another setting: replicas, exchanges, updates and the edges between them. Pure.

A *part* is an operator of the program with all its handles: of replicas (forward, backward), an update, or what runs
once. The rules are those of `penstock.graph.build` and its passes (docs/graph.md): parts of replicas run on each, an
exchange follows the last operator that makes a gradient, an update runs on every replica (AllReduce) or on the owner
(Reduce). Edges come from the recorded graph; those of exchanges are made anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from penstock.advice.costs import Costs
from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting
from penstock.advice.simulate import Task
from penstock.protocol.graphdoc import GraphDocument, Op

Where = Literal["replica", "update", "once", "exchange"]

LARGE_BYTES, PART_BYTES = 1 << 20, 1 << 18
"""penstock.graph.passes.exchanges: a larger gradient is exchanged in parts, of so many bytes at least."""
_IN_PROCESS = ("all_reduce", "reduce", "broadcast")
_SPARSE = ("@GRAD@ROWS", "@GRAD@VALUES")


@dataclass(slots=True)
class Part:
    """An operator of the program. `handles`: indices of the graph; `before`: names of parts that come before it."""

    op: Op
    where: Where
    handles: list[int] = field(default_factory=list)
    before: dict[str, None] = field(default_factory=dict)

    @property
    def reads_every_replica(self) -> bool:
        """Whether an update reads rows and values of all replicas, without an exchange before it."""
        return self.op.type.startswith("penstock.fused_sparse_") or any(
            value.name.endswith(_SPARSE) for value in self.op.inputs
        )


@dataclass(frozen=True, slots=True)
class Gradient:
    """A dense gradient. `makers`, `readers`: names of the parts that make it, and of those that read its sum."""

    name: str
    parameter: str
    num_bytes: int
    makers: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The recorded graph without its exchanges, once for all replicas; `parts` in the graph's order."""

    parts: dict[str, Part]
    gradients: tuple[Gradient, ...]


def where_of(op: Op) -> Where:
    """Say on which replicas an operator runs."""
    if op.kind in _IN_PROCESS:
        return "exchange"
    if op.kind in ("gather", "rpc"):
        return "once"
    return "update" if op.role in ("optimize", "lr_sched") else "replica"


def template_of(graph: GraphDocument) -> Template:
    """Return the parts of a graph, and its dense gradients in the order in which they are complete."""
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for first, second in graph.edges:
        before[second].append(first)
        after[first].append(second)
    parts: dict[str, Part] = {}
    for index, op in enumerate(graph.ops):
        part = parts.setdefault(op.name, Part(op, where_of(op)))
        part.handles.append(index)
        part.before.update(
            dict.fromkeys(graph.ops[one].name for one in before[index] if graph.ops[one].name != op.name)
        )
    found = list(_synced(graph, before, after) if graph.syncs else _direct(parts))
    computing = {name: part for name, part in parts.items() if part.where != "exchange"}
    for part in computing.values():
        part.before = {name: None for name in part.before if name in computing}
    for gradient in found:  # in place of the exchange: an update waits for its own gradients, not for all of a bucket
        for reader in gradient.readers:
            computing[reader].before.update(dict.fromkeys(gradient.makers))
    return Template(computing, tuple(sorted(found, key=lambda g: max(parts[m].handles[0] for m in g.makers))))


def _synced(graph: GraphDocument, before: dict[int, list[int]], after: dict[int, list[int]]) -> Iterator[Gradient]:
    by_name = {op.name: op for op in graph.ops}
    for sync in graph.syncs:
        if sync.sparse:
            continue
        made = dict.fromkeys(graph.ops[one].name for index in sync.ops for one in before[index])
        read = dict.fromkeys(graph.ops[one].name for index in sync.ops for one in after[index])
        makers = [n for n in made if any(v.name == sync.gradient for v in by_name[n].outputs)] or list(made)
        readers = [n for n in read if any(v.name == sync.gradient for v in by_name[n].inputs)] or list(read)
        if makers:
            yield Gradient(sync.gradient, sync.parameter, sync.bytes, tuple(makers), tuple(readers))


def _direct(parts: dict[str, Part]) -> Iterator[Gradient]:
    """Find the gradients of a graph of one replica, which exchanges none: what an update reads and the pass made."""
    for name, part in parts.items():
        if part.where != "update":
            continue
        for value in part.op.inputs:
            makers = tuple(
                one for one in part.before
                if parts[one].where == "replica" and any(made.name == value.name for made in parts[one].op.outputs)
            )  # fmt: skip
            if makers and value.name.endswith("@GRAD"):
                num_bytes = value.num_bytes
                yield Gradient(value.name, value.name.removesuffix("@GRAD"), num_bytes, makers, (name,))


def owners_of(gradients: tuple[Gradient, ...], replicas: int) -> dict[str, int]:
    """Return the owner of each parameter: the replica with the fewest bytes so far. As penstock.graph.build."""
    loads, owners = [0] * replicas, {}
    for gradient in gradients:
        owner = min(range(len(loads)), key=loads.__getitem__)
        loads[owner] += gradient.num_bytes
        owners[gradient.parameter] = owner
    return owners


def tasks_of(template: Template, run: Recorded, setting: Setting, costs: Costs) -> list[Task]:
    """Return the tasks of one step with `setting`, in the order of the graph that it would have."""
    return _Plan(template, run, setting, costs).tasks


class _Plan:
    def __init__(self, template: Template, run: Recorded, setting: Setting, costs: Costs) -> None:
        self.template, self.setting, self.costs = template, setting, costs
        self.replicas = setting.cpu_num
        self.workers = setting.workers(run.cores)
        self.is_reduce = setting.exchange == "reduce" or self.replicas == 1
        self.tables = {sync.parameter for sync in run.graph.syncs if sync.sparse}
        self.owners = owners_of(template.gradients, self.replicas)
        self.owner_of_reader: dict[str, int] = {}
        for gradient in template.gradients:
            for reader in gradient.readers:
                self.owner_of_reader.setdefault(reader, self.owners[gradient.parameter])
        self.tasks: list[Task] = []
        self.of: dict[tuple[str, int], int] = {}  # (part, replica) -> task
        self.sums: dict[str, list[int]] = defaultdict(list)  # part -> exchanges that it reads
        self.bucket: list[Gradient] = []
        self._build()

    def _build(self) -> None:
        completes: dict[str, list[Gradient]] = defaultdict(list)
        position = {name: index for index, name in enumerate(self.template.parts)}
        for gradient in self.template.gradients if self.replicas > 1 else ():
            completes[max(gradient.makers, key=lambda name: position[name])].append(gradient)
        last = max((position[name] for name in completes), default=-1)
        for index, (name, part) in enumerate(self.template.parts.items()):
            if part.where == "replica":
                self._on_each(name, part)
            elif part.where == "update":
                self._update(name, part)
            elif self.replicas > 1 or part.op.kind == "rpc":
                self._add(name, part, -1, 0, range(self.replicas), self._cost(part))
            for gradient in completes.get(name, ()):
                self._exchange(gradient)
            if index == last:
                self._close()

    def _on_each(self, name: str, part: Part) -> None:
        cost = self._cost(part)
        for replica in range(self.replicas):
            self._add(name, part, replica, replica, (replica,), cost)

    def _update(self, name: str, part: Part) -> None:
        every, cost = range(self.replicas), self._cost(part)
        if not self.is_reduce:
            for replica in every:
                self._add(name, part, replica, replica, every if part.reads_every_replica else (replica,), cost)
            return
        pieces = self._pieces(part)
        owner = self.owner_of_reader.get(name, 0)
        for piece in range(pieces):
            self._add(name, part, (owner + piece) % self.replicas, piece, every, cost / pieces)

    def _pieces(self, part: Part) -> int:
        """Return into how many a fused update of sparse tables falls: in Reduce mode each owner has one."""
        if not part.op.type.startswith("penstock.fused_sparse_") or self.replicas == 1:
            return 1
        alike = sum(one.op.type == part.op.type for one in self.template.parts.values())
        tables = len({value.name for value in part.op.outputs} & self.tables)
        return max(1, min(tables, round(self.replicas / alike)))

    def _add(self, name: str, part: Part, home: int, key: int, reads: range | tuple[int, ...], cost_ns: float) -> None:
        before = {
            self.of[one, replica]
            for one in self._found(part)
            for replica in (*reads, 0)
            if (one, replica) in self.of and (replica in reads or (one, reads[0]) not in self.of)
        }
        before.update(self.sums.get(name, ()))
        self.of[name, key] = len(self.tasks)
        self.tasks.append(Task(name, cost_ns, tuple(sorted(before)), home))

    def _cost(self, part: Part) -> float:
        return self.costs.of(part.op, part.handles, self.setting, has_rows=part.where == "replica")

    def _found(self, part: Part) -> Iterator[str]:
        """Names of the parts before, with those before a part that this setting does without in its place."""
        seen: set[str] = set()
        waiting = list(part.before)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if (name, 0) in self.of:
                yield name
            elif name in self.template.parts:
                waiting.extend(self.template.parts[name].before)

    # -- exchanges -------------------------------------------------------------------------------

    def _exchange(self, gradient: Gradient) -> None:
        if self.is_reduce or gradient.num_bytes > LARGE_BYTES:
            self._sum([gradient])
            return
        self.bucket.append(gradient)
        if self.setting.bucket_bytes and sum(g.num_bytes for g in self.bucket) >= self.setting.bucket_bytes:
            self._close()

    def _close(self) -> None:
        if self.bucket:
            self._sum(self.bucket)
        self.bucket = []

    def _sum(self, gradients: list[Gradient]) -> None:
        first = gradients[0]
        num_bytes = sum(g.num_bytes for g in gradients)
        is_large = len(gradients) == 1 and first.num_bytes > LARGE_BYTES
        parts = max(1, min(self.workers, num_bytes // PART_BYTES)) if is_large else 1
        home = self.owners[first.parameter] if self.is_reduce else -1
        before = {
            self.of[name, replica]
            for gradient in gradients for name in gradient.makers for replica in range(self.replicas)
            if (name, replica) in self.of
        }  # fmt: skip
        cost = self.costs.exchange(num_bytes / parts, self.setting)
        for _ in range(parts):
            for name in {name for gradient in gradients for name in gradient.readers}:
                self.sums[name].append(len(self.tasks))
            self.tasks.append(Task(f"exchange.{first.name}", cost, tuple(sorted(before)), home))
