"""`paddle.dataset.cifar`: images as float32 [3072] in [0, 1] (channel, row, column), with an int label.

The archives hold pickles; what such a file names beyond arrays, bytes and numbers is refused, not run.
Source: python/paddle/dataset/cifar.py (Fluid 1.8).
"""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.alias.dataset.common import download
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["test10", "test100", "train10", "train100"]

_NAMES = frozenset(
    {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
    | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
    | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
)
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
            batch = _Arrays(file, encoding="bytes").load()
            labels = batch.get(b"labels") or batch[b"fine_labels"]
            for image, label in zip(batch[b"data"], labels, strict=True):
                yield (image / 255.0).astype(np.float32), int(label)


class _Arrays(pickle.Unpickler):
    """Reads arrays, bytes, numbers and their containers. Raises SpecError for any other class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _NAMES:
            raise SpecError(
                f"the archive of CIFAR holds a pickle of {module_name}.{global_name}; expected arrays alone"
            )
        return super().find_class(module_name, global_name)
