"""A program's reader at a run: where the batches of its iterations come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.exec.data_parallel import DataParallel
from penstock.exec.feeding import takes_from_reader


def run_fed(
    core: DataParallel, feed: Any, fetch_list: Sequence[Any] | None, num_iterations: int
) -> list[list[torch.Tensor]]:
    """Run one iteration on what is fed; with a reader, `num_iterations` on its batches, and fetch from the last.

    Raises EOFException, also after some of the iterations: those have updated, and are fetched from by nobody.
    """
    if not takes_from_reader(core.program, feed):
        return core.run(feed, fetch_list)
    reader = core.program.reader
    fetched = []
    for left in reversed(range(num_iterations)):
        fetched = core.run(reader.next_feed(feed), [] if left else fetch_list)
        reader.used()
    return fetched


__all__ = ["run_fed"]
