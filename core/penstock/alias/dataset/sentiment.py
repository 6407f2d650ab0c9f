"""`paddle.dataset.sentiment`: film reviews as ids of words, with 0 for negative and 1 for positive ones.

It reads the corpus movie_reviews of NLTK, from its archive and without NLTK. `train` and `test` are readers themselves.
Source: python/paddle/dataset/sentiment.py (Fluid 1.8); NLTK splits a text into runs of letters, digits and underscores
and runs of other characters that are no space (`WordPunctTokenizer`).
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterator

from penstock.alias.dataset.common import download
from penstock.errors import SpecError

__all__ = ["fetch", "get_word_dict", "test", "train"]

URL = "https://corpora.bj.bcebos.com/movie_reviews%2Fmovie_reviews.zip"
MD5 = "155de2b77c6834dd8eea7cbe88e93acb"
NUM_TRAINING_INSTANCES = 1600
NUM_TOTAL_INSTANCES = 2000
_WORDS = re.compile(r"\w+|[^\w\s]+")
_NAMES = re.compile(r"(?:.*/)?(neg|pos)/[^/]*\.txt")
Sample = tuple[list[int], int]


def get_word_dict() -> list[tuple[str, int]]:
    """Return (word, id), by frequency; equal ones as they occur first. Raises SpecError."""
    return _numbered(_reviews())


def train() -> Iterator[Sample]:
    """Iterate over the first 1600 reviews, negative and positive ones interleaved. Raises SpecError."""
    return iter(_samples()[:NUM_TRAINING_INSTANCES])


def test() -> Iterator[Sample]:
    """Iterate over the other reviews. Raises SpecError."""
    return iter(_samples()[NUM_TRAINING_INSTANCES:])


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    _archive()


def _archive() -> str:
    return download(URL, "corpora", MD5, "movie_reviews.zip")


def _reviews() -> dict[str, list[list[str]]]:
    """The words of each review of a kind, in the order of their files' names."""
    archive = _archive()
    found: dict[str, list[list[str]]] = {"neg": [], "pos": []}
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            if kind := _NAMES.fullmatch(name):
                found[kind[1]].append(_WORDS.findall(files.read(name).decode("utf-8", "replace")))
    if not all(found.values()):
        raise SpecError(
            f"{archive} has no reviews movie_reviews/neg/*.txt and movie_reviews/pos/*.txt", pointer=archive
        )
    return found


def _numbered(reviews: dict[str, list[list[str]]]) -> list[tuple[str, int]]:
    counts = Counter(word for texts in reviews.values() for text in texts for word in text)
    return [(word, number) for number, (word, _) in enumerate(counts.most_common())]


def _samples() -> list[Sample]:
    reviews = _reviews()
    ids = dict(_numbered(reviews))
    pairs = zip(reviews["neg"], reviews["pos"], strict=False)
    return [([ids[word.lower()] for word in text], kind) for pair in pairs for kind, text in enumerate(pair)]
