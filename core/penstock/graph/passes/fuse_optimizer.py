"""Dense updates of one kind on one replica become one operator: the same hyper-parameters, rate, step and dtype.

What an update is, is read off its operators (`_RULES`): a kernel of its own, or a chain of torch's operators with the
role of one parameter. An update moves later only, to the last one of its group, and never past a handle that reads what
it writes or writes what it reads. A group waits for all its gradients, so updates overlap the backward pass less: that
is why it is off unless asked for. Sparse updates, kinds that no rule knows, and updates whose temporaries are fetched
stay as they are.

SGD and Adam give the same bits (the same kernel); Momentum and Adagrad use torch's fused kernels: within 1e-6 in
float32, 1e-12 in float64. Works on graphs of every mode, also where the owners of Reduce mode update (Fluid forces it
off there, because it has no memory of a parameter's own on each device).

Source: fuse_optimizer_op_pass.cc, fuse_{sgd,momentum,adam}_op_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import Readers
from penstock.graph.analysis.movement import collides, grouped, touched
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Ref, Role
from penstock.program.program import Program


@dataclass(frozen=True, slots=True)
class _Rule:
    """`steps`: type and operands of each operator, then its result; a name stands for one value throughout.

    `fused`: type, then operands: `p*` is the list of what `p` was in each update; other names are equal in all.
    """

    steps: tuple[tuple[str, str, str], ...]
    fused: tuple[str, str]
    constants: tuple[Arg, ...] = ()


_RULES = (
    _Rule((("penstock.sgd_.default", "p g lr", ""),), ("penstock.fused_sgd_.default", "p* g* lr")),
    _Rule(
        (("penstock.adam_.default", "p m s step g lr beta1 beta2 epsilon decay", ""),),
        ("penstock.fused_adam_.default", "p* m* s* step g* lr beta1 beta2 epsilon decay"),
    ),
    _Rule(
        (("penstock.adam_.default", "p m s step g lr beta1 beta2 epsilon decay hat", ""),),
        ("penstock.fused_adam_.default", "p* m* s* step g* lr beta1 beta2 epsilon decay hat"),
    ),
    _Rule(
        (
            ("aten.mul_.Tensor", "v mu", ""),
            ("aten.add_.Tensor", "v g", ""),
            ("aten.mul.Tensor", "v lr", "change"),
            ("aten.sub_.Tensor", "p change", ""),
        ),
        ("penstock.fused_momentum_.default", "p* v* g* lr mu"),
        (False,),
    ),
    _Rule(
        (
            ("aten.mul_.Tensor", "v mu", ""),
            ("aten.add_.Tensor", "v g", ""),
            ("aten.mul.Tensor", "v mu", "ahead"),
            ("aten.add.Tensor", "g ahead", "sum"),
            ("aten.mul.Tensor", "sum lr", "change"),
            ("aten.sub_.Tensor", "p change", ""),
        ),
        ("penstock.fused_momentum_.default", "p* v* g* lr mu"),
        (True,),
    ),
    _Rule(
        (
            ("aten.addcmul_.default", "m g g", ""),
            ("aten.mul.Tensor", "g lr", "top"),
            ("aten.sqrt.default", "m", "root"),
            ("aten.add.Tensor", "root epsilon", "bottom"),
            ("aten.div.Tensor", "top bottom", "change"),
            ("aten.sub_.Tensor", "p change", ""),
        ),
        ("penstock.fused_adagrad_.default", "p* m* g* lr epsilon"),
    ),
)


@dataclass(frozen=True, slots=True)
class _Update:
    """One update in the graph, its values by the names of `rule`, and the storages that it touches."""

    rule: _Rule
    handles: tuple[OpHandle, ...]
    values: dict[str, Arg]
    key: tuple[object, ...]
    reads: frozenset[str]
    writes: frozenset[str]


def fuse_updates(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Merge the dense updates of each replica; `kept` is still made. O(handles x updates) in the worst case."""
    updates = {u.handles[-1].index: u for u in _find(graph, program, kept)}
    groups = [group for group in grouped(graph, updates) if len(group) > 1]
    if not groups:
        return graph
    members = {h.index for group in groups for u in group for h in u.handles}
    last = {group[-1].handles[-1].index: group for group in groups}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index in last:
            _put(rewriter, last[handle.index])
        elif handle.index not in members:
            rewriter.keep(handle)
    return rewriter.finish()


def _put(rewriter: Rewriter, group: Sequence[_Update]) -> None:
    rule, handles = group[0].rule, [h for u in group for h in u.handles]
    args: list[Arg] = []
    for name in rule.fused[1].split():
        many = tuple(u.values[name.rstrip("*")] for u in group)
        args.append(many if name.endswith("*") else many[0])
    op = replace(
        handles[0].op,
        name="fused_" + handles[0].op.name,
        type=rule.fused[0],
        args=(*args, *rule.constants),
        outputs=(),
        writes=tuple(dict.fromkeys(w for h in handles for w in h.op.writes)),
        role_vars=tuple(dict.fromkeys(pair for h in handles for pair in h.op.role_vars)),
    )
    rewriter.put("computation", op, handles[-1].replica, handles[-1].rows_of, handles)


# -- finding updates ---------------------------------------------------------------------------------


def _find(graph: Graph, program: Program, kept: Collection[str]) -> list[_Update]:
    chains: dict[tuple[int, str], list[OpHandle]] = {}
    for handle in graph.handles:
        if handle.op.role & Role.OPTIMIZE and len(handle.op.role_vars) == 1:
            chains.setdefault((handle.replica, handle.op.role_vars[0][0]), []).append(handle)
    readers = Readers(graph, kept)
    return [u for chain in chains.values() for u in _matches(graph, program, chain, readers)]


def _matches(graph: Graph, program: Program, chain: Sequence[OpHandle], readers: Readers) -> Iterator[_Update]:
    start = 0
    while start < len(chain):
        for rule in _RULES:
            handles = tuple(chain[start : start + len(rule.steps)])
            values = _unify(rule, handles)
            update = _update(graph, program, rule, handles, values) if values is not None else None
            if update is not None and _is_closed(graph, update, readers):
                yield update
                start += len(handles) - 1
                break
        start += 1


def _unify(rule: _Rule, handles: Sequence[OpHandle]) -> dict[str, Arg] | None:
    """The values of the rule's names, None if the operators are others."""
    values: dict[str, Arg] = {}
    if len(handles) != len(rule.steps):
        return None
    for (kind, operands, result), handle in zip(rule.steps, handles, strict=True):
        names = operands.split()
        if handle.op.type != kind or handle.op.kwargs or len(handle.op.args) != len(names):
            return None
        if any(values.setdefault(n, a) != a for n, a in zip(names, handle.op.args, strict=True)):
            return None
        if result:
            values[result] = Ref(str(handle.op.outputs[0]))
    return values


def _update(
    graph: Graph, program: Program, rule: _Rule, handles: tuple[OpHandle, ...], values: dict[str, Arg]
) -> _Update | None:
    """The update that was matched, None if a tensor is where a number belongs, or the other way round."""
    names = rule.fused[1].split()
    tensors = {n.rstrip("*") for n in names if n.endswith("*")} | {"lr"} | ({"step"} & set(names))
    if any(isinstance(values[n.rstrip("*")], Ref) != (n.rstrip("*") in tensors) for n in names):
        return None
    values = {**values, "lr": _number(graph, program, values["lr"])}
    parameter = values["p"]
    assert isinstance(parameter, Ref)
    dtype = program.variables[graph.variables[parameter.name].name].dtype
    same = tuple(values[n] for n in names if not n.endswith("*"))
    reads, writes = touched(graph, handles)
    return _Update(rule, handles, values, (handles[0].replica, rule.fused, rule.constants, dtype, same), reads, writes)


def _number(graph: Graph, program: Program, value: Arg) -> Arg:
    """A persistable number for a view of it: each parameter's update makes a view of its own."""
    assert isinstance(value, Ref)
    root = graph.variables[graph.variables[value.name].storage]
    shape = program.variables[root.name].shape if root.name in program.variables else ()
    return Ref(root.key) if root.persistable and all(d == 1 for d in shape) else value


def _is_closed(graph: Graph, update: _Update, readers: Readers) -> bool:
    """Whether no other operator reads what these make, nor gets in between them."""
    own = {h.index for h in update.handles}
    for name in (n for h in update.handles for n in h.makes()):
        if readers.is_fetched(name) or any(h.index not in own for h in readers.of(name)):
            return False
    between = graph.handles[update.handles[0].index + 1 : update.handles[-1].index]
    return not any(collides(update, *touched(graph, [h])) for h in between if h.index not in own)
