"""`paddle.dataset.wmt16`: pairs of sentences, English and German, as word ids; the target also shifted by one.

Dictionaries are made of the training set and kept in memory (Fluid wrote them beside the archive).
Source: python/paddle/dataset/wmt16.py (Fluid 1.8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from penstock.alias.dataset.common import download
from penstock.alias.dataset.text import END, START, UNKNOWN, lines
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["fetch", "get_dict", "test", "train", "validation"]

DATA_URL = "http://paddlemodels.bj.bcebos.com/wmt/wmt16.tar.gz"
DATA_MD5 = "0c38be43600334966403524a40dcd81e"
TOTAL_EN_WORDS, TOTAL_DE_WORDS = 11250, 19220
_LANGUAGES = {"en": TOTAL_EN_WORDS, "de": TOTAL_DE_WORDS}


def train(src_dict_size: int, trg_dict_size: int, src_lang: str = "en") -> Reader:
    """Return a reader of (source, target behind `<s>`, target before `<e>`). Raises SpecError."""
    return _reader("train", src_dict_size, trg_dict_size, src_lang)


def test(src_dict_size: int, trg_dict_size: int, src_lang: str = "en") -> Reader:
    """Return a reader of the test set. Raises SpecError."""
    return _reader("test", src_dict_size, trg_dict_size, src_lang)


def validation(src_dict_size: int, trg_dict_size: int, src_lang: str = "en") -> Reader:
    """Return a reader of the validation set. Raises SpecError."""
    return _reader("val", src_dict_size, trg_dict_size, src_lang)


def get_dict(lang: str, dict_size: int, reverse: bool = False) -> dict[Any, Any]:
    """Return the ids by word, or with `reverse` the words by id; at most `dict_size`. Raises SpecError."""
    _check(lang)
    ids = _numbers(_archive(), lang, min(dict_size, _LANGUAGES[lang]))
    return {i: word for word, i in ids.items()} if reverse else dict(ids)


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    _archive()


def _archive() -> str:
    return download(DATA_URL, "wmt16", DATA_MD5, "wmt16.tar.gz")


def _check(lang: str) -> None:
    if lang not in _LANGUAGES:
        raise SpecError(f"wmt16 got the language {lang!r}; expected 'en' or 'de'", got=lang)


@cache
def _numbers(archive: str, lang: str, size: int) -> dict[str, int]:
    counts = Counter[str]()
    for pair in _pairs(archive, "train"):
        counts.update(pair[lang != "en"].split())
    words = sorted(counts, key=lambda word: -counts[word])[: max(size - 3, 0)]
    return {word: number for number, word in enumerate([START, END, UNKNOWN, *words])}


def _pairs(archive: str, part: str) -> Iterator[list[str]]:
    """Iterate over the sentences in English and German."""
    for line in lines(archive, f"wmt16/{part}"):
        if len(parts := line.split("\t")) == 2:
            yield parts


def _reader(part: str, src_dict_size: int, trg_dict_size: int, src_lang: str) -> Reader:
    _check(src_lang)
    archive, trg_lang = _archive(), "de" if src_lang == "en" else "en"

    def samples() -> Iterator[tuple[list[int], list[int], list[int]]]:
        source_ids, target_ids = get_dict(src_lang, src_dict_size), get_dict(trg_lang, trg_dict_size)
        start, end, unknown = (source_ids[word] for word in (START, END, UNKNOWN))
        for pair in _pairs(archive, part):
            source, target = pair if src_lang == "en" else reversed(pair)
            ids = [target_ids.get(word, unknown) for word in target.split()]
            yield [start, *(source_ids.get(w, unknown) for w in source.split()), end], [start, *ids], [*ids, end]

    return samples
