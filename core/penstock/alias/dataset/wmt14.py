"""`paddle.dataset.wmt14`: pairs of sentences, French and English, as word ids; the target also shifted by one.

Source: python/paddle/dataset/wmt14.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from penstock.alias.dataset.common import download
from penstock.alias.dataset.text import END, START, lines
from penstock.dataset.readers import Reader

__all__ = ["fetch", "gen", "get_dict", "test", "train"]

URL_TRAIN = "http://paddlemodels.bj.bcebos.com/wmt/wmt14.tgz"
MD5_TRAIN = "0791583d57d5beb693b9414c5b36798c"
UNK_IDX = 2
_MAX_WORDS = 80


def train(dict_size: int) -> Reader:
    """Return a reader of (source, target behind `<s>`, target before `<e>`), of at most 80 words. Raises SpecError."""
    return _reader("train/train", dict_size)


def test(dict_size: int) -> Reader:
    """Return a reader of the test set. Raises SpecError."""
    return _reader("test/test", dict_size)


def gen(dict_size: int) -> Reader:
    """Return a reader of the sentences to translate. Raises SpecError."""
    return _reader("gen/gen", dict_size)


def get_dict(dict_size: int, reverse: bool = True) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the words by id of source and target; the ids by word without `reverse`. Raises SpecError."""
    source, target = (_numbers(name, dict_size) for name in ("src.dict", "trg.dict"))
    if not reverse:
        return source, target
    return {i: word for word, i in source.items()}, {i: word for word, i in target.items()}


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    download(URL_TRAIN, "wmt14", MD5_TRAIN)


def _numbers(name: str, size: int) -> dict[str, int]:
    found = lines(download(URL_TRAIN, "wmt14", MD5_TRAIN), name)
    return {word: number for number, word in enumerate(islice(found, size))}


def _reader(name: str, dict_size: int) -> Reader:
    archive = download(URL_TRAIN, "wmt14", MD5_TRAIN)

    def samples() -> Iterator[tuple[list[int], list[int], list[int]]]:
        source_ids, target_ids = get_dict(dict_size, reverse=False)
        for line in lines(archive, name):
            if len(parts := line.split("\t")) != 2:
                continue
            source = [source_ids.get(word, UNK_IDX) for word in [START, *parts[0].split(), END]]
            target = [target_ids.get(word, UNK_IDX) for word in parts[1].split()]
            if len(source) <= _MAX_WORDS and len(target) <= _MAX_WORDS:
                yield source, [target_ids[START], *target], [*target, target_ids[END]]

    return samples
