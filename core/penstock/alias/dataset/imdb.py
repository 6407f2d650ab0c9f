"""`paddle.dataset.imdb`: reviews as lists of word ids, with 0 for a positive and 1 for a negative one.

Words are str (in Fluid on Python 3: bytes). Source: python/paddle/dataset/imdb.py (Fluid 1.8).
"""

from __future__ import annotations

import re
import string
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from penstock.alias.dataset.common import download
from penstock.alias.dataset.text import UNKNOWN, numbered
from penstock.dataset.readers import Reader

__all__ = ["build_dict", "fetch", "test", "train", "word_dict"]

URL = "https://dataset.bj.bcebos.com/imdb%2FaclImdb_v1.tar.gz"
MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
_CUTOFF = 150
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def train(word_idx: Mapping[str, int]) -> Reader:
    """Return a reader of the training set: ids by `word_idx`, and a label. Raises SpecError."""
    return _reader("train", word_idx)


def test(word_idx: Mapping[str, int]) -> Reader:
    """Return a reader of the test set. Raises SpecError."""
    return _reader("test", word_idx)


def word_dict() -> dict[str, int]:
    """Return the ids of words that occur more than 150 times, most frequent first, and of `<unk>`. Raises SpecError."""
    return build_dict(re.compile(r"aclImdb/(train|test)/(pos|neg)/.*\.txt$"), _CUTOFF)


def build_dict(pattern: re.Pattern[str], cutoff: int) -> dict[str, int]:
    """Return the ids of words that occur more than `cutoff` times in files whose name matches. Raises SpecError."""
    return numbered(Counter(chain.from_iterable(tokenize(pattern))), cutoff)


def tokenize(pattern: re.Pattern[str]) -> Iterator[list[str]]:
    """Iterate over the words of each file of the archive whose name matches: lower case, without punctuation."""
    with tarfile.open(download(URL, "imdb", MD5)) as archive:
        for member in archive:
            file = archive.extractfile(member) if pattern.match(member.name) else None
            if file is not None:
                yield file.read().decode("utf-8", "replace").translate(_PUNCTUATION).lower().split()


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    download(URL, "imdb", MD5)


def _reader(part: str, word_idx: Mapping[str, int]) -> Reader:
    unknown = word_idx[UNKNOWN]
    samples = [
        ([word_idx.get(word, unknown) for word in words], label)
        for label, kind in enumerate(("pos", "neg"))
        for words in tokenize(re.compile(rf"aclImdb/{part}/{kind}/.*\.txt$"))
    ]
    return lambda: iter(samples)
