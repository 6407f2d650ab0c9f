"""`paddle.dataset.image`: images as arrays [rows, columns, channels] of bytes, channels in the order BGR.

Files are decoded by OpenCV, which has to be installed for it (opencv-python); the rest is numpy and torch. Crops and
flips for training are drawn from numpy's global generator, as in Fluid.
Source: python/paddle/dataset/image.py (Fluid 1.8).
"""

from __future__ import annotations

import itertools
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.errors import SpecError

__all__ = [
    "batch_images_from_tar", "center_crop", "left_right_flip", "load_and_transform", "load_image", "load_image_bytes",
    "random_crop", "resize_short", "simple_transform", "to_chw",
]  # fmt: skip


def batch_images_from_tar(
    data_file: str, dataset_name: str, img2label: Mapping[str, int], num_per_batch: int = 1024
) -> str:
    """Write the images of a tar archive that have a label to pickles of `num_per_batch`; return the list of them.

    The pickles, {"label": [...], "data": [bytes, ...]}, are in `data_file`_batch/`dataset_name`; a folder that is there
    already is left as it is.
    """
    folder = Path(f"{data_file}_batch", dataset_name)
    listed = folder.with_name(f"{dataset_name}.txt")
    if folder.is_dir() and listed.is_file():
        return str(listed)
    folder.mkdir(parents=True, exist_ok=True)
    found = images_in(data_file, img2label)
    files: list[Path] = []
    while part := list(itertools.islice(found, num_per_batch)):
        files.append(folder / f"batch_{len(files)}")
        data, labels = [image for image, _ in part], [label for _, label in part]
        files[-1].write_bytes(pickle.dumps({"label": labels, "data": data}, protocol=2))
    listed.write_text("".join(f"{file.resolve()}\n" for file in files), encoding="utf-8")
    return str(listed)


def images_in(archive: str, labels: Mapping[str, int]) -> Any:
    """Iterate over (content, label) of the files of a tar archive that have a label, in the order of the archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name in labels else None
            if file is not None:
                yield file.read(), labels[member.name]


def load_image_bytes(bytes: bytes, is_color: bool = True) -> Any:
    """Return the image of a file's content; of grey tones without `is_color`. Raises SpecError."""
    image = _opencv().imdecode(np.frombuffer(bytes, dtype=np.uint8), int(is_color))
    if image is None:
        raise SpecError(f"{len(bytes)} bytes are no image that OpenCV can decode")
    return image


def load_image(file: str, is_color: bool = True) -> Any:
    """Return the image of a file. Raises SpecError."""
    return load_image_bytes(Path(file).read_bytes(), is_color)


def _opencv() -> Any:
    try:
        import cv2  # an optional library
    except ImportError as error:
        raise SpecError(
            "paddle.dataset.image decodes images by OpenCV, which is not installed: pip install opencv-python-headless"
        ) from error
    return cv2


def resize_short(im: Any, size: int) -> Any:
    """Return the image with `size` pixels along its shorter edge, bicubic with OpenCV's coefficients (a = -0.75).

    Bytes are rounded from exact sums; OpenCV's arithmetic of 11 bits may differ by 1.
    """
    rows, columns = im.shape[:2]
    sizes = (size * rows // columns, size) if rows > columns else (size, size * columns // rows)
    whole = torch.from_numpy(np.ascontiguousarray(im)).to(torch.float64).reshape(1, rows, columns, -1)
    grown = F.interpolate(whole.permute(0, 3, 1, 2), size=sizes, mode="bicubic", align_corners=False)
    found = grown[0].permute(1, 2, 0).reshape(*sizes, *im.shape[2:]).numpy()
    if np.issubdtype(im.dtype, np.integer):
        limits = np.iinfo(im.dtype)
        found = np.clip(np.rint(found), limits.min, limits.max)
    return found.astype(im.dtype)


def to_chw(im: Any, order: Sequence[int] = (2, 0, 1)) -> Any:
    """Return the image with its dimensions in `order`."""
    return im.transpose(order)


def center_crop(im: Any, size: int, is_color: bool = True) -> Any:
    """Return the `size` x `size` pixels in the middle."""
    rows, columns = im.shape[:2]
    return _cropped(im, (rows - size) // 2, (columns - size) // 2, size)


def random_crop(im: Any, size: int, is_color: bool = True) -> Any:
    """Return `size` x `size` pixels at a place that is drawn."""
    rows, columns = im.shape[:2]
    top = np.random.randint(0, rows - size + 1)
    return _cropped(im, top, np.random.randint(0, columns - size + 1), size)


def _cropped(im: Any, top: int, left: int, size: int) -> Any:
    return im[top : top + size, left : left + size]


def left_right_flip(im: Any, is_color: bool = True) -> Any:
    """Return the image with left and right exchanged."""
    return im[:, ::-1]


def simple_transform(
    im: Any, resize_size: int, crop_size: int, is_train: bool, is_color: bool = True, mean: Any = None
) -> Any:
    """Return float32 [channels, crop_size, crop_size]: resized, cropped, less `mean` (of a channel, or elementwise).

    `is_train`: cropped at random, half of the images flipped; else the middle.
    """
    im = resize_short(im, resize_size)
    if is_train:
        im = random_crop(im, crop_size, is_color)
        if np.random.randint(2) == 0:
            im = left_right_flip(im, is_color)
    else:
        im = center_crop(im, crop_size, is_color)
    im = (to_chw(im) if im.ndim == 3 else im).astype("float32")
    if mean is None:
        return im
    mean = np.array(mean, dtype=np.float32)
    return im - (mean[:, np.newaxis, np.newaxis] if mean.ndim == 1 and is_color else mean)


def load_and_transform(
    filename: str, resize_size: int, crop_size: int, is_train: bool, is_color: bool = True, mean: Any = None
) -> Any:
    """Return `simple_transform` of the image of a file. Raises SpecError."""
    return simple_transform(load_image(filename, is_color), resize_size, crop_size, is_train, is_color, mean)
