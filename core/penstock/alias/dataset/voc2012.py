"""`paddle.dataset.voc2012`: photographs uint8 [rows, columns, 3] with the class of each pixel uint8 [rows, columns].

Files are decoded by Pillow, which has to be installed for it.
Source: python/paddle/dataset/voc2012.py (Fluid 1.8), whose `train` is the list `trainval` and `test` the list `train`.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.alias.dataset.common import download
from penstock.dataset.readers import Reader
from penstock.errors import SpecError

__all__ = ["fetch", "test", "train", "val"]

URL = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"
MD5 = "6cd6e144f989b92b3379bac3b3de84fd"
_FOLDER = "VOCdevkit/VOC2012"


def train() -> Reader:
    """Return a reader of the training set. Raises SpecError."""
    return _reader("trainval")


def test() -> Reader:
    """Return a reader of the test set. Raises SpecError."""
    return _reader("train")


def val() -> Reader:
    """Return a reader of the validation set. Raises SpecError."""
    return _reader("val")


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    download(URL, "voc2012", MD5)


def _reader(part: str) -> Reader:
    archive = download(URL, "voc2012", MD5)

    def samples() -> Iterator[tuple[Any, Any]]:
        with tarfile.open(archive) as tar:
            members = {member.name: member for member in tar}

            def content(name: str) -> bytes:
                file = tar.extractfile(members[name]) if name in members else None
                if file is None:
                    raise SpecError(f"{archive} has no file {name}", pointer=archive)
                return file.read()

            for name in content(f"{_FOLDER}/ImageSets/Segmentation/{part}.txt").decode("ascii").split():
                yield (
                    _decoded(content(f"{_FOLDER}/JPEGImages/{name}.jpg")),
                    _decoded(content(f"{_FOLDER}/SegmentationClass/{name}.png")),
                )

    return samples


def _decoded(content: bytes) -> Any:
    try:
        from PIL import Image  # an optional library
    except ImportError as error:
        raise SpecError(
            "paddle.dataset.voc2012 decodes images by Pillow, which is not installed: pip install pillow"
        ) from error
    return np.array(Image.open(io.BytesIO(content)))
