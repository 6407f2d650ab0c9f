"""`paddle.dataset.flowers`: photographs of 102 kinds of flowers, float32 [3 * 224 * 224], with an int label from 0 on.

Images are read from the archive at each pass, in its order. The lists of images are MATLAB files, read by SciPy, and
decoding needs OpenCV (`paddle.dataset.image`), or a `mapper` of the script's own, which gets (content, label).
Source: python/paddle/dataset/flowers.py (Fluid 1.8), which trains on the larger part, `tstid`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from penstock.alias.dataset.common import download
from penstock.alias.dataset.image import images_in, load_image_bytes, simple_transform
from penstock.dataset.readers import Reader, map_readers, xmap_readers
from penstock.errors import SpecError

__all__ = ["fetch", "test", "train", "valid"]

URL_PREFIX = "http://paddlemodels.bj.bcebos.com/flowers/"
FILES = {
    "102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
    "imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
    "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
}
_MEAN = [103.94, 116.78, 123.68]
_THREADS = 4
Mapper = Callable[[tuple[bytes, int]], Any]


def default_mapper(is_train: bool, sample: tuple[bytes, int]) -> tuple[Any, int]:
    """Return the pixels of an image's content, resized to 256 and cropped to 224, less the mean; and its label."""
    content, label = sample
    image = simple_transform(load_image_bytes(content), 256, 224, is_train, mean=_MEAN)
    return image.flatten(), label


train_mapper: Mapper = functools.partial(default_mapper, True)
test_mapper: Mapper = functools.partial(default_mapper, False)


def train(
    mapper: Mapper = train_mapper, buffered_size: int = 1024, use_xmap: bool = True, cycle: bool = False
) -> Reader:
    """Return a reader of the training set; `cycle`: without end. Raises SpecError."""
    return _reader("tstid", mapper, buffered_size, use_xmap=use_xmap, cycle=cycle)


def test(mapper: Mapper = test_mapper, buffered_size: int = 1024, use_xmap: bool = True, cycle: bool = False) -> Reader:
    """Return a reader of the test set; `cycle`: without end. Raises SpecError."""
    return _reader("trnid", mapper, buffered_size, use_xmap=use_xmap, cycle=cycle)


def valid(mapper: Mapper = test_mapper, buffered_size: int = 1024, use_xmap: bool = True) -> Reader:
    """Return a reader of the validation set. Raises SpecError."""
    return _reader("valid", mapper, buffered_size, use_xmap=use_xmap, cycle=False)


def fetch() -> None:
    """Check that the files are there. Raises SpecError."""
    _paths()


def _paths() -> list[str]:
    return [download(URL_PREFIX + name, "flowers", md5) for name, md5 in FILES.items()]


def _reader(part: str, mapper: Mapper, buffered_size: int, *, use_xmap: bool, cycle: bool) -> Reader:
    archive, labels_file, parts_file = _paths()
    labels = _column(labels_file, "labels")
    labelled = {f"jpg/image_{number:05d}.jpg": int(labels[number - 1]) - 1 for number in _column(parts_file, part)}

    def samples() -> Iterator[tuple[bytes, int]]:
        yield from images_in(archive, labelled)
        while cycle:
            yield from images_in(archive, labelled)

    if use_xmap:
        return xmap_readers(mapper, samples, min(_THREADS, os.cpu_count() or 1), buffered_size)
    return map_readers(mapper, samples)


def _column(path: str, name: str) -> Any:
    """Return the row of numbers that a MATLAB file has under a name. Raises SpecError."""
    try:
        from scipy.io import loadmat  # an optional library
    except ImportError as error:
        raise SpecError(
            f"paddle.dataset.flowers reads {path} by SciPy, which is not installed: pip install scipy"
        ) from error
    try:
        return loadmat(path)[name][0]
    except (ValueError, TypeError, LookupError) as error:
        raise SpecError(f"{path} has no row of numbers {name!r} in MATLAB's format: {error}", pointer=path) from error
