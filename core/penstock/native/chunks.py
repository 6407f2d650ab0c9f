"""`penstock::chunk_eval`: chunks of tagged sequences, counted: those that were found, those that are there, and both.

    chunk_eval(Tensor inference, Tensor label, Tensor lengths, str scheme, int num_types, int[] excluded) -> Tensor

Tags are int64: rows of all sequences one after another, or padded [n, t]; `lengths` int64 [n] or [n, 1]. A tag is
type * (number of kinds of tags) + kind, and `num_types` * kinds is no chunk. Result int64 [3]: found, there, both; a
chunk of an excluded type counts nowhere. Raises ValueError for a tag beyond.
Source: chunk_eval_op.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "chunk_eval(Tensor inference, Tensor label, Tensor lengths, str scheme, int num_types, int[] excluded) -> Tensor"
)

_NONE = -1


class Kinds(NamedTuple):
    """The kinds of tags of a scheme by number; -1: it has none."""

    number: int
    begin: int = _NONE
    inside: int = _NONE
    end: int = _NONE
    single: int = _NONE


SCHEMES = {
    "IOB": Kinds(2, begin=0, inside=1),
    "IOE": Kinds(2, inside=0, end=1),
    "IOBES": Kinds(4, begin=0, inside=1, end=2, single=3),
    "plain": Kinds(1),
}
Chunk = tuple[int, int, int]  # first position, last position, type
Tag = tuple[int, int]  # kind, type


def _ends(before: Tag, now: Tag, kinds: Kinds, other: int) -> bool:
    """Whether a chunk that `before` is part of ends in front of `now`."""
    (kind, type_), (next_kind, next_type) = before, now
    if type_ == other:
        return False
    if next_type != type_:
        return True
    if kind in (kinds.end, kinds.single) and kind != _NONE:
        return True
    return kind in (kinds.begin, kinds.inside) and kind != _NONE and next_kind in (kinds.begin, kinds.single)


def _begins(before: Tag, now: Tag, kinds: Kinds, other: int) -> bool:
    """Whether a chunk begins at `now`."""
    (kind, type_), (next_kind, next_type) = before, now
    if next_type == other:
        return False
    if type_ == other or next_type != type_:
        return True
    if next_kind in (kinds.begin, kinds.single):
        return True
    return next_kind in (kinds.inside, kinds.end) and kind in (kinds.end, kinds.single) and kind != _NONE


def chunks_of(tags: Sequence[int], kinds: Kinds, num_types: int) -> set[Chunk]:
    """Return the chunks of one sequence."""
    found: set[Chunk] = set()
    start, before = _NONE, (_NONE, num_types)
    for position, tag in enumerate(tags):
        now = (tag % kinds.number, tag // kinds.number)
        if start != _NONE and _ends(before, now, kinds, num_types):
            found.add((start, position - 1, before[1]))
            start = _NONE
        if _begins(before, now, kinds, num_types):
            start = position
        before = now
    if start != _NONE:
        found.add((start, len(tags) - 1, before[1]))
    return found


def _sequences(name: str, tags: Tensor, lengths: Sequence[int], limit: int) -> list[list[int]]:
    if tags.numel() and not (int(tags.min()) >= 0 and int(tags.max()) <= limit):
        raise ValueError(
            f"penstock.chunk_eval: tags of {name} are {int(tags.min())} to {int(tags.max())}; expected 0 to {limit}"
        )
    padded = tags.dim() > 1 and tags.shape[1] != 1
    rows = tags.reshape(tags.shape[0], -1).tolist() if padded else tags.reshape(-1).tolist()
    if padded:
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()
    return [rows[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _chunk_eval(
    inference: Tensor, label: Tensor, lengths: Tensor, scheme: str, num_types: int, excluded: Sequence[int]
) -> Tensor:
    kinds, own = _kinds(scheme), lengths.reshape(-1).tolist()
    counts = [0, 0, 0]
    both = (_sequences(name, t, own, num_types * kinds.number) for name, t in (("input", inference), ("label", label)))
    for left, right in zip(*both, strict=True):
        found, there = (
            {chunk for chunk in chunks_of(tags, kinds, num_types) if chunk[2] not in excluded} for tags in (left, right)
        )
        for i, chunks in enumerate((found, there, found & there)):
            counts[i] += len(chunks)
    return torch.tensor(counts, device=inference.device)


def _kinds(scheme: str) -> Kinds:
    if scheme not in SCHEMES:
        raise ValueError(f"penstock.chunk_eval: scheme is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def _shape(inference: Tensor, label: Tensor, lengths: Tensor, scheme: str, *rest: Any) -> Tensor:
    _kinds(scheme)
    return lengths.new_empty([3])


_LIBRARY.impl("chunk_eval", _chunk_eval, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::chunk_eval", _shape, lib=_LIBRARY)
