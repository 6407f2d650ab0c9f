"""Files of `paddle.dataset`: where Fluid's cache would have them. Nothing is downloaded.

`download` returns the path of a file that the user has put there, and otherwise raises an error that says which file
to put where. Source: python/paddle/dataset/common.py (Fluid 1.8).
"""

from __future__ import annotations

import glob
import hashlib
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from penstock.dataset.readers import Reader, batch
from penstock.errors import SpecError
from penstock.logger import warn_once

__all__ = ["DATA_HOME", "cluster_files_reader", "download", "md5file", "split"]

_log = logging.getLogger(__name__)
DATA_HOME = str(Path("~/.cache/paddle/dataset").expanduser())


def path_of(url: str, module_name: str, save_name: str | None = None) -> Path:
    """Return where the file of a URL belongs."""
    return Path(DATA_HOME, module_name, save_name or url.split("/")[-1])


def download(url: str, module_name: str, md5sum: str, save_name: str | None = None) -> str:
    """Return the path of the file, which is there already. Raises SpecError with its place if it is not.

    A file with another MD5 sum than `md5sum` is used, with a warning.
    """
    path = path_of(url, module_name, save_name)
    if not path.is_file():
        raise SpecError(
            f"paddle.dataset.{module_name} needs the file {path}, which is not there. Penstock downloads nothing: "
            f"put the file of {url} (MD5 {md5sum}) at that path, or set paddle.dataset.common.DATA_HOME to the folder "
            f"that has {module_name}/{path.name}",
            pointer=str(path),
        )
    if (found := md5file(str(path))) != md5sum:
        warn_once(_log, f"{path} has the MD5 sum {found}, not {md5sum} of Fluid's own file; it is read as it is")
    return str(path)


def md5file(fname: str) -> str:
    """Return the MD5 sum of a file, in hexadecimal."""
    with Path(fname).open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def split(
    reader: Reader,
    line_count: int,
    suffix: str = "%05d.pickle",
    dumper: Callable[[list[Any], IO[bytes]], None] = pickle.dump,
) -> None:
    """Write the samples of a reader to files of `line_count` samples, named by `suffix` with their number."""
    for number, samples in enumerate(batch(reader, line_count)()):
        with Path(suffix % number).open("wb") as file:
            dumper(samples, file)


def cluster_files_reader(
    files_pattern: str,
    trainer_count: int,
    trainer_id: int,
    loader: Callable[[IO[bytes]], list[Any]] = pickle.load,
) -> Reader:
    """Return a reader of a trainer's share of the files that `split` wrote: each `trainer_count`-th, sorted.

    Like pickle, it runs what a file contains: read files of your own only.
    """

    def reader() -> Iterator[Any]:
        for name in sorted(glob.glob(files_pattern))[trainer_id::trainer_count]:
            with Path(name).open("rb") as file:
                yield from loader(file)

    return reader
