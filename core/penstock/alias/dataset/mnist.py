"""`paddle.dataset.mnist`: handwritten digits as float32 [784] in [-1, 1], with an int label.

Without its files, the 1797 digits of 8 x 8 pixels that scikit-learn ships stand in, each pixel three by three with a
border of two: every fifth is for tests. Source: python/paddle/dataset/mnist.py (Fluid 1.8).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.alias.dataset import shipped
from penstock.alias.dataset.common import download, path_of
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["fetch", "test", "train"]

URL_PREFIX = "https://dataset.bj.bcebos.com/mnist/"
TRAIN_IMAGE_URL = URL_PREFIX + "train-images-idx3-ubyte.gz"
TRAIN_IMAGE_MD5 = "f68b3c2dcbeaaa9fbdd348bbdeb94873"
TRAIN_LABEL_URL = URL_PREFIX + "train-labels-idx1-ubyte.gz"
TRAIN_LABEL_MD5 = "d53e105ee54ea40749a09fcbcd1e9432"
TEST_IMAGE_URL = URL_PREFIX + "t10k-images-idx3-ubyte.gz"
TEST_IMAGE_MD5 = "9fb629c4189551a2d022fa330f9573f3"
TEST_LABEL_URL = URL_PREFIX + "t10k-labels-idx1-ubyte.gz"
TEST_LABEL_MD5 = "ec29112dd5afa0611ce80d1b7f02629c"
_TEST_EVERY = 5
_DIGIT_MAX = 16.0


def train() -> Reader:
    """Return a reader of the training set. Raises SpecError."""
    return _reader("train", (TRAIN_IMAGE_URL, TRAIN_IMAGE_MD5), (TRAIN_LABEL_URL, TRAIN_LABEL_MD5))


def test() -> Reader:
    """Return a reader of the test set. Raises SpecError."""
    return _reader("test", (TEST_IMAGE_URL, TEST_IMAGE_MD5), (TEST_LABEL_URL, TEST_LABEL_MD5))


def fetch() -> None:
    """Check that the files are there, or none of a part, for which the digits stand in. Raises SpecError."""
    train(), test()


def _reader(part: str, images: tuple[str, str], labels: tuple[str, str]) -> Reader:
    files = [path_of(url, "mnist") for url, _ in (images, labels)]
    if not any(file.exists() for file in files):
        digits = shipped.scikit_learn("mnist", files, "1797 digits of 8 x 8 pixels").load_digits()
        return _samples(*_enlarged(digits, is_test=part == "test"))
    read = [download(url, "mnist", md5) for url, md5 in (images, labels)]
    return _samples(_idx(read[0], 3) / np.float32(127.5) - np.float32(1), _idx(read[1], 1))


def _samples(images: NDArray[Any], labels: NDArray[Any]) -> Reader:
    rows = images.reshape(len(images), -1).astype(np.float32)

    def samples() -> Iterator[tuple[NDArray[np.float32], int]]:
        yield from zip(rows, map(int, labels), strict=True)

    return samples


def _idx(path: str, dims: int) -> NDArray[np.uint8]:
    """Return an array of bytes in the IDX format: magic number, sizes, values. Raises SpecError."""
    content = gzip.decompress(Path(path).read_bytes())
    head = 4 * (1 + dims)
    magic, *shape = np.frombuffer(content[:head].ljust(head, b"\0"), ">u4").tolist()
    if magic != (8 << 8) + dims or len(content) != head + np.prod(shape):
        raise SpecError(f"{path} is no IDX file of bytes with {dims} dimensions", pointer=path)
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _enlarged(digits: Any, *, is_test: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    chosen = (np.arange(len(digits.images)) % _TEST_EVERY == 0) == is_test
    large = np.kron(digits.images[chosen], np.ones((1, 3, 3)))
    return np.pad(large, ((0, 0), (2, 2), (2, 2))) / (_DIGIT_MAX / 2) - 1, digits.target[chosen]
