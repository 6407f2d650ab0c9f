"""DataLoader: samples by their numbers, what a Python generator or a data set gives, as feeds, made ahead by a thread.

With `num_workers`, samples are read and put together in processes, those of `torch.utils.data`.
`ExecutionStrategy.num_iteration_per_run` makes a run of a program that reads several iterations. A batch of a data set
is split over the replicas of such a program, as a feed is. Source: fluid.io.DataLoader of Fluid 1.8.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from penstock.dataset.dataset_base import Dataset
from penstock.dataset.generator_loader import AHEAD, LEFT_OUT, GeneratorLoader, feed_of_values, inputs_of
from penstock.dataset.loader_base import BatchLoader, Feed, Made, places_of
from penstock.dataset.memory import InMemoryDataset
from penstock.dataset.samples import BatchSampler, default_collate_fn
from penstock.dataset.slots import feed_of
from penstock.dataset.worker_batches import Values, WorkerBatches, as_it_is, begin_worker
from penstock.errors import SpecError

_log = logging.getLogger(__name__)


class DatasetLoader(BatchLoader):
    """What `DataLoader.from_dataset` makes."""

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


class DataLoader(BatchLoader):
    """Feeds of samples that have numbers; `from_generator` and `from_dataset` make loaders of other data."""

    def __init__(
        self,
        dataset: Any,
        feed_list: Sequence[Any] | None = None,
        places: object = None,
        return_list: bool = False,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Values] | None = None,
        num_workers: int = 0,
        use_buffer_reader: bool = True,
        use_shared_memory: bool = True,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        """Load `dataset[i]`, samples that are a value for each input of `feed_list`.

        `places`: an item is then a list, a feed for each place; what is fewer at the end is left out, as in Fluid, and
        logged. None, which Fluid refuses: an item is a feed. `return_list`: a feed is a list, not a dict by the names
        of `feed_list`, which may then be None. `batch_sampler`: gives lists of numbers, instead of `batch_size`,
        `shuffle` and `drop_last` (see BatchSampler). `collate_fn`: a value for each input, in their order or by their
        names, of a list of samples; by default they are stacked. `num_workers`: processes that load, forked when a pass
        begins; 0: a thread does. What they make is pickled, tensors are detached.
        `timeout` (seconds): how long a batch of them may take, 0: any time. `worker_init_fn`: called in each of them
        with its number. `use_shared_memory`: their arrays come through shared memory, not through a pipe.
        `use_buffer_reader` changes nothing: batches are always made ahead.
        Raises SpecError; iterating raises ReaderError for what a sample's code has raised.
        """
        if not hasattr(dataset, "__getitem__"):
            raise SpecError(
                f"the data set is {dataset!r}; expected one with __getitem__ and __len__ (fluid.io.Dataset)"
            )
        if feed_list is None and not return_list:
            raise SpecError("feed_list is None; expected the inputs that the samples feed, or return_list=True")
        if num_workers < 0 or timeout < 0:
            raise SpecError(f"num_workers={num_workers} and timeout={timeout} have to be 0 or more")
        self.places = places_of(places)
        super().__init__(2 * max(1, len(self.places)), None, returns_lists=return_list)
        self._places = self.places
        self.dataset, self.num_workers = dataset, num_workers
        self.feed_list = None if feed_list is None else inputs_of(feed_list)
        self.batch_sampler = _sampler(dataset, batch_sampler, batch_size, shuffle=shuffle, drop_last=drop_last)
        self.collate_fn = collate_fn or default_collate_fn
        self._shares, self._timeout_s, self._worker_init = use_shared_memory, timeout, worker_init_fn

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return len(self.batch_sampler)  # type: ignore[arg-type]  # a sampler of the script's has a length, or no len()

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
    ) -> DatasetLoader:
        """Return a loader over a data set's passes for training. `drop_last`: leave out a short last batch, and warn.

        With `places` it gives lists of as many feeds; what is fewer at the end is left out, as in Fluid, and logged.
        The feed has the data set's inputs, and the lengths of ragged ones that their program asks for.
        """
        return DatasetLoader(dataset, places_of(places), drop_last=drop_last, iterable=iterable)

    def _maker(self) -> Callable[[], Iterator[Made]]:
        return self._batches

    def _batches(self) -> Iterator[Made]:
        for values in self._of_workers() if self.num_workers else self._of_this_process():
            yield Made(self._of_values(values))

    def _of_this_process(self) -> Iterator[Values]:
        for numbers in self.batch_sampler:
            yield self.collate_fn([self.dataset[number] for number in numbers])

    def _of_workers(self) -> Iterator[Values]:
        made: Any = WorkerBatches(self.dataset, self.collate_fn, self._shares)  # torch asks for a Dataset of its own
        sampler: Any = self.batch_sampler  # and for lists, and takes sequences
        init = self._worker_init
        batches = torch.utils.data.DataLoader(
            made,
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            timeout=self._timeout_s,
            worker_init_fn=None if init is None else partial(begin_worker, init),
            multiprocessing_context="fork",  # functions and classes of a script, which no other way passes
        )
        try:
            for batch in batches:
                yield batch.values()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # else it has torch's iterator, which ends the processes
            raise

    def _of_values(self, values: Values) -> Feed:
        if self.feed_list is None:
            found = values.values() if isinstance(values, Mapping) else values
            return {str(place): self._check_input_array(value) for place, value in enumerate(found)}
        return feed_of_values(self.feed_list, values, "the data set")

    @property
    def _gives_fewer(self) -> bool:
        return False


def _sampler(
    dataset: Any, sampler: Iterable[Sequence[int]] | None, batch_size: int | None, *, shuffle: bool, drop_last: bool
) -> Iterable[Sequence[int]]:
    if sampler is None:
        return BatchSampler(dataset, shuffle=shuffle, batch_size=batch_size or 0, drop_last=drop_last)
    if batch_size not in (None, 1) or shuffle or drop_last:
        raise SpecError(
            f"batch_size={batch_size}, shuffle={shuffle}, drop_last={drop_last} beside a batch_sampler, which has "
            "these itself"
        )
    return sampler
