"""`paddle.dataset.cifar`: images as float32 [3072] in [0, 1] (channel, row, column), with an int label.

The archives hold pickles; what such a file holds beyond arrays, bytes and numbers is refused, not run.
Source: python/paddle/dataset/cifar.py (Fluid 1.8).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.alias.dataset.common import download
from penstock.dataset.readers import Reader
from penstock.errors import SpecError
from penstock.io.fluid.unpickling import array_of, unpickled

__all__ = ["fetch", "test10", "test100", "train10", "train100"]

URL_PREFIX = "https://dataset.bj.bcebos.com/cifar/"
CIFAR10_URL = URL_PREFIX + "cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR100_URL = URL_PREFIX + "cifar-100-python.tar.gz"
CIFAR100_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"


def train10(cycle: bool = False) -> Reader:
    """Return a reader of CIFAR-10's training set; `cycle`: without end. Raises SpecError."""
    return _reader(CIFAR10_URL, CIFAR10_MD5, "data_batch", cycle=cycle)


def test10(cycle: bool = False) -> Reader:
    """Return a reader of CIFAR-10's test set; `cycle`: without end. Raises SpecError."""
    return _reader(CIFAR10_URL, CIFAR10_MD5, "test_batch", cycle=cycle)


def train100() -> Reader:
    """Return a reader of CIFAR-100's training set, with fine labels. Raises SpecError."""
    return _reader(CIFAR100_URL, CIFAR100_MD5, "train", cycle=False)


def test100() -> Reader:
    """Return a reader of CIFAR-100's test set, with fine labels. Raises SpecError."""
    return _reader(CIFAR100_URL, CIFAR100_MD5, "test", cycle=False)


def fetch() -> None:
    """Check that both archives are there. Raises SpecError."""
    download(CIFAR10_URL, "cifar", CIFAR10_MD5)
    download(CIFAR100_URL, "cifar", CIFAR100_MD5)


def _reader(url: str, md5: str, name: str, *, cycle: bool) -> Reader:
    archive = download(url, "cifar", md5)

    def samples() -> Iterator[tuple[Any, int]]:
        yield from _once(archive, name)
        while cycle:
            yield from _once(archive, name)

    return samples


def _once(archive: str, name: str) -> Iterator[tuple[Any, int]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if name in member.name else None
            if file is None:
                continue
            images, labels = _arrays(file.read(), f"{archive}: {member.name}")
            for image, label in zip(images, labels, strict=True):
                yield (image / 255.0).astype(np.float32), int(label)


def _arrays(content: bytes, place: str) -> tuple[Any, Any]:
    """Return images and labels of a pickle. Raises SpecError for one that holds anything else."""
    try:
        batch = unpickled(content, bytes_of_python2=True)
        images, labels = array_of(batch[b"data"]), batch.get(b"labels") or batch[b"fine_labels"]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SpecError(f"{place} is no pickle of arrays alone, as the archive of CIFAR has them: {error}") from error
    if images is None or len(images) != len(labels):
        raise SpecError(f"{place} has no array of images, one for each of its {len(labels)} labels")
    return images, labels
