"""DataLoader: what a Python generator or a data set gives, as feeds, made ahead by a thread.

`ExecutionStrategy.num_iteration_per_run` makes a run of a program that reads several iterations. A batch of a data set
is split over the replicas of such a program, as a feed is. Source: fluid.io.DataLoader of Fluid 1.8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from penstock.dataset.dataset_base import Dataset
from penstock.dataset.generator_loader import AHEAD, LEFT_OUT, GeneratorLoader, inputs_of
from penstock.dataset.loader_base import BatchLoader, Feed, Made, places_of
from penstock.dataset.memory import InMemoryDataset
from penstock.dataset.slots import feed_of
from penstock.errors import SpecError

_log = logging.getLogger(__name__)


class DataLoader(BatchLoader):
    """What `DataLoader.from_dataset` makes; `from_generator` makes a GeneratorLoader."""

    def __init__(self, dataset: Dataset, places: Sequence[Any], *, drop_last: bool, iterable: bool) -> None:
        """Use `from_dataset`."""
        if not isinstance(dataset, Dataset):
            raise SpecError(f"from_dataset is given {dataset!r}; expected what DatasetFactory().create_dataset() made")
        super().__init__(AHEAD, None if iterable else dataset.program)
        self._dataset, self.drop_last = dataset, drop_last
        self._places = list(places) if iterable else []
        if isinstance(dataset, InMemoryDataset):
            dataset.deal_to(max(1, len(self._places)))
        elif len(self._places) > 1:
            dataset.set_thread(len(self._places))  # a reader for each place, as in Fluid

    @staticmethod
    def from_generator(
        feed_list: Sequence[Any] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        use_multiprocess: bool = False,
        drop_last: bool = True,
    ) -> GeneratorLoader:
        """Return a loader of the inputs `feed_list`; `capacity`: batches made ahead (4). Then set a generator.

        `use_double_buffer` and `use_multiprocess` change nothing: batches are always made ahead, by a thread, as Fluid
        does where there is a program; `fluid.io.multiprocess_reader` runs readers in processes. `drop_last`: with
        several places or replicas, leave out batches at the end that are fewer than these. Raises SpecError.
        """
        loader = GeneratorLoader(
            inputs_of(feed_list), AHEAD if capacity is None else capacity, iterable=iterable, return_list=return_list
        )
        loader.drop_last = drop_last
        return loader

    @staticmethod
    def from_dataset(
        dataset: Dataset, places: object = None, drop_last: bool = True, iterable: bool = True
    ) -> DataLoader:
        """Return a loader over a data set's passes for training. `drop_last`: leave out a short last batch, and warn.

        With `places` it gives lists of as many feeds; what is fewer at the end is left out, as in Fluid, and logged.
        The feed has the data set's inputs, and the lengths of ragged ones that their program asks for.
        """
        return DataLoader(dataset, places_of(places), drop_last=drop_last, iterable=iterable)

    @property
    def _gives_fewer(self) -> bool:
        return False

    def _maker(self) -> Callable[[], Iterator[Made]]:
        return self._batches

    def _batches(self) -> Iterator[Made]:
        dataset = self._dataset
        run = dataset.open_for_training()
        wanted = {v.name for v in dataset.program.feeds()}
        try:
            while (batch := run.take()) is not None:
                if self.drop_last and len(batch) < dataset.batch_size:
                    _log.warning(LEFT_OUT, len(batch), dataset.batch_size)
                    run.used(batch)
                    continue
                yield Made(feed_of(batch, run.slots, wanted), partial(run.used, batch))
        finally:
            run.close()

    def _of_values(self, values: Sequence[Any]) -> Feed:
        self._refuse_pushes()

    @staticmethod
    def _refuse_pushes() -> NoReturn:
        raise SpecError("the loader of a data set takes no batches that are pushed; use DataLoader.from_generator")
