"""Beam search over ragged candidates: one step, and the sentences that a search has found.

Rows are the prefixes that are alive; `levels` are their sequences, outermost first, lengths int64 [n, 1]: the sources
that prefixes belong to, then the prefixes of the step before that they continue. Source: the kernels of beam_search
and beam_search_decode (Fluid 1.8), paddle/fluid/operators/math/beam_search.cc, beam_search_decode_op.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Lengths = list[int]


class _Candidate(NamedTuple):
    row: int
    token: int
    score: float

    def is_below(self, other: _Candidate) -> bool:
        """Whether the other comes first: of equal scores, the one of the later row does."""
        return self.score < other.score or (self.score == other.score and self.row < other.row)


def step(
    pre_ids: Tensor,
    pre_scores: Tensor,
    ids: Tensor | None,
    scores: Tensor,
    levels: Sequence[Tensor],
    level: int,
    beam_size: int,
    end_id: int,
    is_accumulated: bool,
) -> tuple[Tensor, ...]:
    """Return the best continuations of each source: ids [m, 1], scores [m, 1], the row of each [m], and their levels.

    Shapes: pre_ids, pre_scores [rows, 1]; ids, scores [rows, k]. A prefix that has ended is continued by `end_id`
    alone, at its own score. A source all of whose prefixes had ended before is left out from then on. Levels of the
    result: rows of each source, continuations of each row.
    """
    rows = scores.shape[0]
    ended = (pre_ids.reshape(-1) == end_id).tolist()
    before = pre_scores.reshape(-1)
    grown = scores if is_accumulated else before.unsqueeze(1) + torch.log(scores)
    counts = _rows_of(levels, level)
    if sum(counts) != rows or len(ended) != rows or before.numel() != rows:
        raise ValueError(
            f"beam_search: the sequences have {sum(counts)} rows, scores {rows}, pre_ids {len(ended)} and pre_scores "
            f"{before.numel()}; expected one number of rows"
        )
    each: list[list[_Candidate]] = [[] for _ in range(rows)]
    first = 0
    for count in counts:
        beam: list[_Candidate] = []
        for row in range(first, first + count):
            own = [_Candidate(row, end_id, float(before[row]))] if ended[row] else _best(row, ids, grown, beam_size)
            for candidate in own:
                _insert(beam, candidate, beam_size)
        if not all(ended[c.row] and c.token == end_id for c in beam):
            for candidate in beam:
                each[candidate.row].append(candidate)
        first += count
    chosen = [c for own in each for c in own]
    return (
        torch.tensor([c.token for c in chosen], dtype=pre_ids.dtype).reshape(-1, 1),
        torch.tensor([c.score for c in chosen], dtype=scores.dtype).reshape(-1, 1),
        torch.tensor([c.row for c in chosen], dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int64).reshape(-1, 1),
        torch.tensor([len(own) for own in each], dtype=torch.int64).reshape(-1, 1),
    )


def _rows_of(levels: Sequence[Tensor], level: int) -> Lengths:
    """The rows of each sequence of a level."""
    counts: Lengths = levels[-1].reshape(-1).tolist()
    for outer in reversed(levels[level:-1]):
        ends = list(accumulate(outer.reshape(-1).tolist(), initial=0))
        counts = [sum(counts[begin:end]) for begin, end in pairwise(ends)]
    return counts


def _best(row: int, ids: Tensor | None, scores: Tensor, beam_size: int) -> Iterator[_Candidate]:
    """The candidates of a row that a beam may take, in their order; those below `beam_size` others are none."""
    own = scores[row]
    least = own.topk(min(beam_size, own.numel())).values[-1]
    for at in torch.nonzero(own >= least).reshape(-1).tolist():
        yield _Candidate(row, at if ids is None else int(ids[row, at]), float(own[at]))


def _insert(beam: list[_Candidate], new: _Candidate, beam_size: int) -> None:
    """Put a candidate into a beam, the best first; a full one loses its last."""
    if len(beam) >= beam_size:
        if new.is_below(beam[-1]):
            return
        beam.pop()
    place = len(beam)
    while place and beam[place - 1].is_below(new):
        place -= 1
    beam.insert(place, new)


class _Sentence:
    """One hypothesis, from its last word to its first. `at`: its candidate in the step that was looked at last."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.words: list[int] = []
        self.scores: list[float] = []

    def grow(self, word: int, score: float) -> None:
        self.words.append(word)
        self.scores.append(score)


def sentences(
    ids: Sequence[Tensor | None],
    scores: Sequence[Tensor | None],
    outer: Sequence[Tensor | None],
    inner: Sequence[Tensor | None],
    beam_size: int,
    end_id: int,
) -> tuple[Tensor, ...]:
    """Return all sentences that steps have found: words and scores [m], and levels: sentences of a source, their words.

    A list has one tensor for each step. The sentences of a source are in the order of their last scores, best first;
    an end is kept once. A source has `beam_size` sentences; where there are fewer, the others are empty.
    """
    steps = [_Step(*parts) for parts in zip(ids, scores, outer, inner, strict=True)]
    if not steps:
        raise ValueError("beam_search_decode needs the ids of at least one step; the array is empty")
    found: list[list[_Sentence]] = [[] for _ in steps[0].counts]
    for one in reversed(steps):
        for source, own in enumerate(found):
            one.take(source, own, end_id)
    words, grades, lengths = [], [], []
    for own in found:
        if len(own) > beam_size:
            raise ValueError(f"beam_search_decode: a source has {len(own)} sentences; beam_size is {beam_size}")
        own.sort(key=lambda sentence: -sentence.scores[0])
        words += [word for sentence in own for word in reversed(sentence.words)]
        grades += [score for sentence in own for score in reversed(sentence.scores)]
        lengths += [len(sentence.words) for sentence in own] + [0] * (beam_size - len(own))
    return (
        torch.tensor(words, dtype=torch.int64),
        torch.tensor(grades, dtype=steps[0].scores.dtype),
        torch.tensor([beam_size] * len(found), dtype=torch.int64).reshape(-1, 1),
        torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1),
    )


class _Step:
    """The candidates of a step. `counts`: prefixes of each source; `ends`: of each prefix the end of its candidates."""

    def __init__(self, ids: Tensor | None, scores: Tensor | None, outer: Tensor | None, inner: Tensor | None) -> None:
        if ids is None or scores is None or outer is None or inner is None:
            raise ValueError("beam_search_decode: a step of the search was not written to the arrays")
        self.ids: list[int] = ids.reshape(-1).tolist()
        self.values: list[float] = scores.reshape(-1).tolist()
        self.scores = scores
        self.counts: Lengths = outer.reshape(-1).tolist()
        self._ends = [0, *accumulate(inner.reshape(-1).tolist())]
        self._first = [0, *accumulate(self.counts)]
        self._prefix = [p for p, n in enumerate(inner.reshape(-1).tolist()) for _ in range(n)]

    def take(self, source: int, own: list[_Sentence], end_id: int) -> None:
        """Add the words of this step to the sentences of a source, which begin in its last step."""
        if not own:
            begin, end = (self._ends[self._first[source + i]] for i in (0, 1))
            own += [_Sentence(at) for at in range(begin, end)]
        for sentence in own:
            word = self.ids[sentence.at]
            if word != end_id or not sentence.words:
                sentence.grow(word, self.values[sentence.at])
            sentence.at = self._prefix[sentence.at]
