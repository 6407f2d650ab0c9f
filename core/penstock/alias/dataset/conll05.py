"""`paddle.dataset.conll05`: sentences with a predicate, its context and the tags of semantic roles, as ids.

Ids of tags follow the alphabet (in Fluid the order of a set). Source: python/paddle/dataset/conll05.py (Fluid 1.8).
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.alias.dataset.common import download
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["fetch", "get_dict", "get_embedding", "test"]

DATA_URL = "http://paddlemodels.bj.bcebos.com/conll05st/conll05st-tests.tar.gz"
DATA_MD5 = "387719152ae52d60422c016e92a742fc"
WORDDICT_URL = "http://paddlemodels.bj.bcebos.com/conll05st%2FwordDict.txt"
WORDDICT_MD5 = "ea7fb7d4c75cc6254716f0177a506baa"
VERBDICT_URL = "http://paddlemodels.bj.bcebos.com/conll05st%2FverbDict.txt"
VERBDICT_MD5 = "0d2977293bbb6cbefab5b0f97db1e77c"
TRGDICT_URL = "http://paddlemodels.bj.bcebos.com/conll05st%2FtargetDict.txt"
TRGDICT_MD5 = "d8c7f03ceb5fc2e5a0fa7503a4353751"
EMB_URL = "http://paddlemodels.bj.bcebos.com/conll05st%2Femb"
EMB_MD5 = "bf436eb0faa1f6f9103017f8be57cdb7"
UNK_IDX = 0
_FOLDER = "conll05st-release/test.wsj"


def get_dict() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the ids of words, of predicates and of tags (B-, I- and O). Raises SpecError."""
    words = _lines(download(WORDDICT_URL, "conll05st", WORDDICT_MD5))
    verbs = _lines(download(VERBDICT_URL, "conll05st", VERBDICT_MD5))
    tags = sorted({tag[2:] for tag in _lines(download(TRGDICT_URL, "conll05st", TRGDICT_MD5)) if tag[1:2] == "-"})
    labels = [*(f"{begin}-{tag}" for tag in tags for begin in "BI"), "O"]
    word_ids, verb_ids, label_ids = ({text: i for i, text in enumerate(texts)} for texts in (words, verbs, labels))
    return word_ids, verb_ids, label_ids


def get_embedding() -> str:
    """Return the path of the trained word vectors. Raises SpecError."""
    return download(EMB_URL, "conll05st", EMB_MD5)


def test() -> Reader:
    """Return a reader of the test set, on which Fluid's examples train: nine lists of one length. Raises SpecError.

    They are words, five words around the predicate (repeated), the predicate, whether a word is among the five, tags.
    """
    words, verbs, labels = get_dict()
    archive = download(DATA_URL, "conll05st", DATA_MD5)

    def samples() -> Iterator[tuple[list[int], ...]]:
        for sentence, verb, tags in _corpus(archive):
            yield _sample(sentence, verbs[verb], [labels[tag] for tag in tags], tags.index("B-V"), words)

    return samples


def fetch() -> None:
    """Check that all files are there. Raises SpecError."""
    get_dict()
    get_embedding()
    test()


def _sample(
    sentence: Sequence[str], verb: int, labels: list[int], place: int, words: Mapping[str, int]
) -> tuple[list[int], ...]:
    around = range(place - 2, place + 3)
    framed = {i: sentence[i] for i in range(len(sentence))}
    context = [framed.get(i, "bos" if i < 0 else "eos") for i in around]
    return (
        [words.get(word, UNK_IDX) for word in sentence],
        *([words.get(word, UNK_IDX)] * len(sentence) for word in context),
        [verb] * len(sentence),
        [int(i in around) for i in range(len(sentence))],
        labels,
    )


def _corpus(archive: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """Iterate over sentences with one predicate each and their tags: a sentence comes once for each predicate."""
    with tarfile.open(archive) as tar:
        words, props = (_member(tar, f"{_FOLDER}/{kind}/test.wsj.{kind}.gz") for kind in ("words", "props"))
    sentence: list[str] = []
    rows: list[list[str]] = []
    for word, row in zip([*words, ""], [*props, ""], strict=True):
        if row.split():
            sentence.append(word.strip())
            rows.append(row.split())
            continue
        verbs, *columns = zip(*rows, strict=True) if rows else ([],)
        for verb, column in zip([verb for verb in verbs if verb != "-"], columns, strict=True):
            yield sentence, verb, _tags(column)
        sentence, rows = [], []


def _member(tar: tarfile.TarFile, name: str) -> list[str]:
    file = tar.extractfile(name)
    if file is None:
        raise SpecError(f"{tar.name!r} has no file {name}")
    return gzip.decompress(file.read()).decode("utf-8").splitlines()


def _tags(column: Sequence[str]) -> list[str]:
    """Return the tags of a column of brackets: `(A0*`, `*`, `*)` are B-A0, I-A0, I-A0. Raises SpecError."""
    tags, open_ = [], ""
    for text in column:
        if text.startswith("("):
            open_ = text[1 : text.index("*")]
            tags.append(f"B-{open_}")
        elif text in ("*", "*)"):
            tags.append(f"I-{open_}" if open_ else "O")
        else:
            raise SpecError(f"{text!r} is no column of semantic roles; expected '(TAG*', '*', '*)' or '(TAG*)'")
        if text.endswith(")"):
            open_ = ""
    return tags


def _lines(path: str) -> list[str]:
    return [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
