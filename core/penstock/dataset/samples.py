"""Data sets whose samples have a number (map-style): the sampler of their batches, and how samples become a batch.

Source: fluid.dataloader (Dataset, BatchSampler) and fluid.reader.default_collate_fn of Fluid 1.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np

from penstock.dataset.dataset_base import at_least_one
from penstock.errors import FeedError, SpecError


class Dataset:
    """A data set of numbered samples: derive from it, or give any object with these two methods to a DataLoader."""

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`: a value for each input, as a tuple or a list."""
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__(index), which returns a sample")

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__(), which returns the number of samples")


class BatchSampler:
    """Gives the numbers of the samples of each batch.

    Of `dataset` (anything with a length) or of `indices`, which are copied. `shuffle`: each pass is in another order,
    from `numpy.random`, as in Fluid: numpy.random.seed makes it repeatable. `drop_last`: leave out a short last batch.
    Raises SpecError.
    """

    def __init__(
        self,
        dataset: Sized | None = None,
        indices: Sequence[int] | None = None,
        shuffle: bool = False,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if (dataset is None) == (indices is None):
            raise SpecError(
                "BatchSampler takes either dataset or indices, and got " + ("both", "none")[dataset is None]
            )
        self.indices = list(range(len(dataset))) if dataset is not None else list(indices or ())
        self.batch_size, self.shuffle, self.drop_last = at_least_one("batch_size", batch_size), shuffle, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of a pass."""
        if self.shuffle:
            np.random.shuffle(self.indices)  # the generator that scripts of Fluid seed
        for begin in range(0, len(self) * self.batch_size, self.batch_size):
            yield self.indices[begin : begin + self.batch_size]

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        full, rest = divmod(len(self.indices), self.batch_size)
        return full + (rest > 0 and not self.drop_last)


def default_collate_fn(batch: Sequence[Any]) -> list[np.ndarray]:
    """Return the batch of samples: of each of their values an array, `[len(batch), *shape of the value]`.

    Raises FeedError for samples of different numbers of values, or of different shapes.
    """
    samples = [sample if isinstance(sample, (list, tuple)) else (sample,) for sample in batch]
    numbers = sorted({len(sample) for sample in samples})
    if len(numbers) > 1:
        raise FeedError(f"the samples of a batch have {numbers} values; expected the same number of each", got=numbers)
    columns = [[np.asarray(value) for value in column] for column in zip(*samples, strict=True)]
    for place, column in enumerate(columns):
        shapes = sorted({value.shape for value in column})
        if len(shapes) > 1:
            raise FeedError(
                f"value {place} of the samples of a batch has shapes {shapes}; expected one, or a collate_fn of yours "
                "that makes a batch of them",
                got=shapes,
            )
    return [np.stack(column) for column in columns]
