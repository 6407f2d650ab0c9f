"""How the files of a data set are shared out among workers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import SpecError


def split_files(files: Sequence[str], index: int, num_workers: int) -> list[str]:
    """Return the files of worker `index`: contiguous, in order, one more for the first workers where they do not fit.

    Every file goes to exactly one worker: 5 files for 2 workers are [a, b, c] and [d, e]; 2 for 3 are [a], [b] and [].
    """
    if isinstance(files, str) or not all(isinstance(file, str) for file in files):
        raise SpecError(f"split_files takes a list of file names; got {files!r}", got=files)
    each, more = divmod(len(files), num_workers)
    first = index * each + min(index, more)
    return list(files[first : first + each + (index < more)])
