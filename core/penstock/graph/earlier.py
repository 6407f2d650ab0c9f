"""From the passes that a graph records to the part of its document that tells of them.

What passes remove comes in rows of alike operators: one for each slot, layer and replica. Rows are sorted so that ids,
names and edges of alike ones are arithmetic sequences, and are stored as such (`protocol.runs`): 300 slots take little
more than 3.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from penstock.graph.applied import AppliedPass, Edges, Form, Key
from penstock.graph.ssa import Graph, keys_of
from penstock.logger import warn_once
from penstock.protocol.graphdoc import Forms, Pass, Passes, Removed
from penstock.protocol.runs import packed, packed_rows

MOST_REMOVED = 200_000
"""Operators that passes may have removed for a document to tell of them."""
_LOG = logging.getLogger(__name__)
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})$")
_Row = tuple[Form, list[Key]]
_Ids = Mapping[Key, int]


def passes_of(graph: Graph) -> Passes | None:
    """Return what is known of the passes that made a graph; None if nothing is, or too much (then with a warning).

    Ids: of a handle of `graph` its index, of a removed one the number of handles and its place among the removed.
    """
    if not graph.applied:
        return None
    removed = sum(len(one.removed) for one in graph.applied)
    if removed > MOST_REMOVED:
        warn_once(
            _LOG,
            f"graph passes removed {removed} operators of a graph; its document has room for {MOST_REMOVED}, so the "
            "dashboard shows no stages of it",
            about="graph passes",
        )
        return None
    rows = [_rows(one) for one in graph.applied]
    ids = _ids(graph, rows)
    texts = _Texts()
    ran = [_encoded(one, *of_pass) for one, of_pass in zip(graph.applied, ids, strict=True) if _has_effect(one)]
    was = [form for one, (_, after) in zip(graph.applied, ids, strict=True) for _, form in _changed(one, after)]
    return Passes(
        ran=ran,
        unchanged=[one.title for one in graph.applied if not _has_effect(one)],
        removed=_removed([row for of_pass in rows for row in of_pass], texts),
        was=Forms(**_forms(was, texts)),
        texts=texts.found,
    )


def _has_effect(one: AppliedPass) -> bool:
    return bool(one.removed or one.added or one.changed or one.edges_removed or one.edges_added)


class _Texts:
    """Texts by their place among the distinct ones."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.found)
            self.found.append(text)
        return self._index[text]

    def column(self, texts: Iterable[str]) -> list[int]:
        return packed(self.index(text) for text in texts)


def _numbered(text: str) -> tuple[str, int]:
    """A text without the number at its end, and the number; -1 if it has none."""
    found = _NUMBER.search(text)
    return (text, -1) if found is None else (text[: found.start()], int(found[0]))


def _rows(one: AppliedPass) -> list[_Row]:
    """What a pass removed: operators on consecutive replicas together, alike ones one after another."""
    alike: dict[tuple[str, int, Form], list[Key]] = {}
    for key, form in one.removed:
        alike.setdefault((key.name, key.nth, form), []).append(key)
    rows = [(form, keys) for (_, _, form), found in alike.items() for keys in _neighbours(sorted(found))]
    return sorted(rows, key=lambda row: (row[0].type, row[0].role, *_numbered(row[1][0].name), row[1][0]))


def _neighbours(keys: list[Key]) -> Iterator[list[Key]]:
    begin = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end].replica != keys[end - 1].replica + 1 or keys[end - 1].replica < 0:
            yield keys[begin:end]
            begin = end


def _ids(graph: Graph, rows: Sequence[Sequence[_Row]]) -> list[tuple[_Ids, _Ids]]:
    """The ids of all handles before and after each pass. Walks back: a name that was removed may come again."""
    sizes = [sum(len(keys) for _, keys in of_pass) for of_pass in rows]
    starts = list(accumulate(sizes, initial=len(graph.handles)))[:-1]
    after: _Ids = {key: index for index, key in enumerate(keys_of(graph))}
    found: list[tuple[_Ids, _Ids]] = []
    for one, of_pass, start in reversed(list(zip(graph.applied, rows, starts, strict=True))):
        before = after
        if one.added or of_pass:
            gone = frozenset(one.added)
            kept = {key: index for key, index in after.items() if key not in gone}
            before = kept | {key: start + n for n, key in enumerate(k for _, keys in of_pass for k in keys)}
        found.append((before, after))
        after = before
    return found[::-1]


def _encoded(one: AppliedPass, before: _Ids, after: _Ids) -> Pass:
    return Pass(
        name=one.name,
        title=one.title,
        removed=len(one.removed),
        added=packed(sorted(after[key] for key in one.added)),
        changed=packed(index for index, _ in _changed(one, after)),
        edges_removed=_edges(one.edges_removed, before),
        edges_added=_edges(one.edges_added, after),
    )


def _changed(one: AppliedPass, after: _Ids) -> list[tuple[int, Form]]:
    return sorted(((after[key], form) for key, form in one.changed), key=lambda pair: (*pair[1][:3], pair[0]))


def _removed(rows: Sequence[_Row], texts: _Texts) -> Removed:
    names = [_numbered(keys[0].name) for _, keys in rows]
    return Removed(
        **_forms([form for form, _ in rows], texts),
        name=texts.column(name for name, _ in names),
        name_number=packed(number for _, number in names),
        first=packed(keys[0].replica for _, keys in rows),
        count=packed(len(keys) for _, keys in rows),
    )


def _forms(forms: Sequence[Form], texts: _Texts) -> dict[str, list[int]]:
    modules = [_numbered(form.module) for form in forms]
    return {
        "type": texts.column(form.type for form in forms),
        "kind": texts.column(form.kind for form in forms),
        "role": texts.column(form.role for form in forms),
        "module": texts.column(module for module, _ in modules),
        "module_number": packed(number for _, number in modules),
        "source": texts.column(form.source for form in forms),
    }


def _edges(edges: Edges, ids: _Ids) -> list[int]:
    """Pairs of ids, those between alike operators one after another."""

    def place(edge: tuple[Key, Key]) -> tuple[object, ...]:
        a, b = edge
        return _numbered(a.name)[0], _numbered(b.name)[0], a.replica, b.replica, ids[a], ids[b]

    return packed_rows((ids[a], ids[b]) for a, b in sorted(edges, key=place))
