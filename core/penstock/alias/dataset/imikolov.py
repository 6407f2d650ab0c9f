"""`paddle.dataset.imikolov`: the Penn Treebank as n-grams of word ids, or as sequences and the same shifted by one.

Words are str (in Fluid on Python 3: bytes). Source: python/paddle/dataset/imikolov.py (Fluid 1.8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.alias.dataset.common import download
from penstock.alias.dataset.text import END, START, UNKNOWN, lines, numbered
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["DataType", "build_dict", "fetch", "test", "train"]

URL = "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz"
MD5 = "30177ea32e27c525793142b6bf2c8e2d"
_TRAIN, _TEST = "simple-examples/data/ptb.train.txt", "simple-examples/data/ptb.valid.txt"


class DataType:
    """What a sample is."""

    NGRAM = 1
    SEQ = 2


def build_dict(min_word_freq: int = 50) -> dict[str, int]:
    """Return the ids of words that occur more than `min_word_freq` times, and of `<unk>`. Raises SpecError."""
    counts = Counter[str]()
    for name in (_TRAIN, _TEST):
        for line in lines(download(URL, "imikolov", MD5), name):
            counts.update([*line.split(), START, END])
    return numbered(counts, min_word_freq)


def train(word_idx: Mapping[str, int], n: int, data_type: int = DataType.NGRAM) -> Reader:
    """Return a reader of the training set: tuples of `n` ids, or (SEQ) sequences of at most `n` if `n` is positive."""
    return _reader(_TRAIN, word_idx, n, data_type)


def test(word_idx: Mapping[str, int], n: int, data_type: int = DataType.NGRAM) -> Reader:
    """Return a reader of the validation set."""
    return _reader(_TEST, word_idx, n, data_type)


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    download(URL, "imikolov", MD5)


def _reader(name: str, word_idx: Mapping[str, int], n: int, data_type: int) -> Reader:
    if data_type not in (DataType.NGRAM, DataType.SEQ) or (data_type == DataType.NGRAM and n < 1):
        raise SpecError(f"imikolov got data_type={data_type} and n={n}; expected DataType.NGRAM with n >= 1, or SEQ")
    archive, unknown = download(URL, "imikolov", MD5), word_idx[UNKNOWN]

    def samples() -> Iterator[Any]:
        for line in lines(archive, name):
            ids = [word_idx.get(word, unknown) for word in [START, *line.split(), END]]
            if data_type == DataType.NGRAM:
                yield from zip(*(ids[start:] for start in range(n)), strict=False)
            elif n <= 0 or len(ids) - 1 <= n:
                yield ids[:-1], ids[1:]

    return samples
