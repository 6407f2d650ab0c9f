"""`paddle.dataset.mq2007`: documents of queries with their relevance, LETOR 4.0, for learning to rank.

`train` and `test` take `format`: "pairwise" (label [1], the more relevant document, the other), "listwise" (relevances
[n, 1], documents [n, 46]), and "pointwise" and "plain_txt", which have the most relevant document of each query alone,
as in Fluid. Queries without a relevant document are left out. The archive is a RAR file: extract it beside itself.
Source: python/paddle/dataset/mq2007.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.alias.dataset.common import path_of
from penstock.errors import SpecError

__all__ = ["Query", "QueryList", "fetch", "gen_list", "gen_pair", "gen_plain_txt", "gen_point", "test", "train"]

URL = "http://www.bigdatalab.ac.cn/benchmark/upload/download_source/7b6dbbe2-842c-11e4-a536-bcaec51b9163_MQ2007.rar"
_FOLD = "MQ2007/MQ2007/Fold1"
_NUM_PARTS = 48  # relevance, query and 46 features
_FORMATS = ("pairwise", "listwise", "pointwise", "plain_txt")


@dataclass(slots=True)
class Query:
    """A document of a query."""

    query_id: int = -1
    relevance_score: int = -1
    feature_vector: list[float] = field(default_factory=list)
    description: str = ""

    def __str__(self) -> str:
        """Relevance, query and features."""
        return " ".join(map(str, (self.relevance_score, self.query_id, *self.feature_vector)))


class QueryList:
    """The documents of one query. Raises SpecError for those of several."""

    def __init__(self, querylist: Iterable[Query] | None = None) -> None:
        self.querylist = list(querylist or ())
        ids = {query.query_id for query in self.querylist}
        if len(ids) > 1:
            raise SpecError(f"a QueryList has the documents of one query; got those of {sorted(ids)}")

    @property
    def query_id(self) -> int:
        """The number of the query; -1 without documents."""
        return self.querylist[0].query_id if self.querylist else -1

    def __iter__(self) -> Iterator[Query]:
        """Iterate over the documents."""
        return iter(self.querylist)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.querylist)

    def __getitem__(self, i: int) -> Query:
        """Return a document."""
        return self.querylist[i]


def _ranked(queries: QueryList | Sequence[Query]) -> list[Query]:
    return sorted(QueryList(queries), key=lambda query: -query.relevance_score)


def gen_plain_txt(querylist: QueryList | Sequence[Query]) -> Iterator[tuple[int, int, Any]]:
    """Iterate over (query, relevance, features [46]) of the documents, the most relevant first."""
    return ((one.query_id, one.relevance_score, np.array(one.feature_vector)) for one in _ranked(querylist))


def gen_point(querylist: QueryList | Sequence[Query]) -> Iterator[tuple[int, Any]]:
    """Iterate over (relevance, features [46]) of the documents, the most relevant first."""
    return ((relevance, features) for _, relevance, features in gen_plain_txt(querylist))


def gen_pair(querylist: QueryList | Sequence[Query], partial_order: str = "full") -> Iterator[tuple[Any, Any, Any]]:
    """Iterate over ([1], features of the more relevant, of the other) of all pairs of unequal relevance.

    `partial_order` has no effect, as in Fluid.
    """
    ranked = _ranked(querylist)
    for i, better in enumerate(ranked):
        for other in ranked[i + 1 :]:
            if better.relevance_score > other.relevance_score:
                yield np.array([1]), np.array(better.feature_vector), np.array(other.feature_vector)


def gen_list(querylist: QueryList | Sequence[Query]) -> Iterator[tuple[Any, Any]]:
    """Iterate over one item: relevances [n, 1] and features [n, 46], the most relevant first."""
    ranked = _ranked(querylist)
    yield np.array([[one.relevance_score] for one in ranked]), np.array([one.feature_vector for one in ranked])


def load_from_text(filepath: str, shuffle: bool = False, fill_missing: int = -1) -> list[QueryList]:
    """Return the queries of a file of the data set. `shuffle` and `fill_missing` have no effect, as in Fluid.

    Raises SpecError if it is not there.
    """
    path = _folder() / filepath
    if not path.is_file():
        raise SpecError(
            f"paddle.dataset.mq2007 needs the file {path}, which is not there. Penstock downloads nothing: extract the "
            f"archive of {URL} in {_folder()}, or set paddle.dataset.common.DATA_HOME to the folder that has MQ2007",
            pointer=str(path),
        )
    found: list[QueryList] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        query = _parsed(line)
        if query is None:
            continue
        if not found or found[-1].query_id != query.query_id:
            found.append(QueryList())
        found[-1].querylist.append(query)
    return found


def _folder() -> Path:
    return path_of(URL, "MQ2007").parent


def _parsed(line: str) -> Query | None:
    """Return the document of a line `relevance qid:n 1:x … # description`; None for one of another form."""
    values, _, description = line.partition("#")
    relevance, *rest = values.split() or [""]
    if len(rest) != _NUM_PARTS - 1:
        return None
    query, *features = (part.partition(":")[2] for part in rest)
    return Query(int(query), int(relevance), [float(one) for one in features], description.strip())


def _samples(filepath: str, format: str = "pairwise", shuffle: bool = False, fill_missing: int = -1) -> Iterator[Any]:
    if format not in _FORMATS:
        raise SpecError(f"paddle.dataset.mq2007: format is {format!r}; expected one of {', '.join(_FORMATS)}")
    for queries in load_from_text(filepath, shuffle, fill_missing):
        if not any(query.relevance_score for query in queries):
            continue
        if format == "pairwise":
            yield from gen_pair(queries)
        elif format == "listwise":
            yield from gen_list(queries)
        else:
            yield next(gen_point(queries) if format == "pointwise" else gen_plain_txt(queries))


train = partial(_samples, filepath=f"{_FOLD}/train.txt")
test = partial(_samples, filepath=f"{_FOLD}/test.txt")


def fetch() -> None:
    """Check that the extracted files are there. Raises SpecError."""
    for part in ("train", "test"):
        load_from_text(f"{_FOLD}/{part}.txt")
