"""The stages of a graph: as it was built, and after each pass that changed it; derived from its document, backwards.

Operators of a stage are named by ids: below `len(document.ops)` those of the graph that runs, from there on those that
passes removed, in the order in which they did (`graphdoc.Passes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.protocol.graphdoc import Forms, GraphDocument, Pass, Passes
from penstock.protocol.runs import unpacked, unpacked_rows


@dataclass(frozen=True, slots=True)
class StageOp:
    """An operator of a stage, without operands: those of what no longer runs are not stored."""

    name: str
    replica: int
    type: str
    kind: str
    role: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A graph between two passes: operators by id, and edges between ids."""

    ops: dict[int, StageOp]
    edges: frozenset[tuple[int, ...]]


def stages(document: GraphDocument) -> list[Stage]:
    """Return the graph before the first of `document.passes.ran` and after each: one stage without passes."""
    ops = {
        index: StageOp(op.name, op.replica, op.type, op.kind, op.role, op.module, op.source)
        for index, op in enumerate(document.ops)
    }
    found = [Stage(ops, frozenset(document.edges))]
    passes = document.passes
    if passes is None:
        return found
    removed = _removed(passes)
    was = list(_forms(passes.was, passes.texts))
    end, changed = len(removed), len(was)
    for one in reversed(passes.ran):
        earlier = {len(document.ops) + n: removed[n] for n in range(end - one.removed, end)}
        ids = unpacked(one.changed)
        forms = was[changed - len(ids) : changed]
        found.append(_before(one, found[-1], earlier, dict(zip(ids, forms, strict=True))))
        end, changed = end - one.removed, changed - len(ids)
    return found[::-1]


def _before(one: Pass, after: Stage, removed: dict[int, StageOp], was: dict[int, StageOp]) -> Stage:
    added = frozenset(unpacked(one.added))
    ops = {index: op for index, op in after.ops.items() if index not in added} | removed
    for index, form in was.items():
        ops[index] = replace(form, name=ops[index].name, replica=ops[index].replica)
    edges = after.edges - frozenset(unpacked_rows(one.edges_added, 2))
    return Stage(ops, edges | frozenset(unpacked_rows(one.edges_removed, 2)))


def _removed(passes: Passes) -> list[StageOp]:
    rows = passes.removed
    columns = (_joined(rows.name, rows.name_number, passes.texts), unpacked(rows.first), unpacked(rows.count))
    return [
        replace(form, name=name, replica=first + n)
        for form, name, first, count in zip(_forms(rows, passes.texts), *columns, strict=True)
        for n in range(count)
    ]


def _forms(forms: Forms, texts: Sequence[str]) -> Iterator[StageOp]:
    types, kinds, roles, sources = (
        [texts[n] for n in unpacked(column)] for column in (forms.type, forms.kind, forms.role, forms.source)
    )
    modules = _joined(forms.module, forms.module_number, texts)
    for of_op in zip(types, kinds, roles, modules, sources, strict=True):
        yield StageOp("", 0, *of_op)


def _joined(column: Sequence[int], numbers: Sequence[int], texts: Sequence[str]) -> list[str]:
    pairs = zip(unpacked(column), unpacked(numbers), strict=True)
    return [texts[text] if number < 0 else f"{texts[text]}{number}" for text, number in pairs]


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What a pass did, in numbers: of operators by type, the most frequent first. Of a changed one "old -> new"."""

    name: str
    title: str
    before: int
    after: int
    removed: dict[str, int]
    added: dict[str, int]
    changed: dict[str, int]


def facts(document: GraphDocument) -> list[PassFacts]:
    """Return what each pass that changed the graph did, in order; nothing for a document without passes."""
    ran = [] if document.passes is None else document.passes.ran
    found = stages(document)
    return [_facts(one, before, after) for one, before, after in zip(ran, found[:-1], found[1:], strict=True)]


def _facts(one: Pass, before: Stage, after: Stage) -> PassFacts:
    removed, added = before.ops.keys() - after.ops.keys(), after.ops.keys() - before.ops.keys()
    changes = ((before.ops[index].type, after.ops[index].type) for index in unpacked(one.changed))
    return PassFacts(
        one.name, one.title, len(before.ops), len(after.ops),
        removed=_counted(before.ops[index].type for index in removed),
        added=_counted(after.ops[index].type for index in added),
        changed=_counted(old if old == new else f"{old} -> {new}" for old, new in changes),
    )  # fmt: skip


def _counted(types: Iterable[str]) -> dict[str, int]:
    return dict(Counter(types).most_common())
