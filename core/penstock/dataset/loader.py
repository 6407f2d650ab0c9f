"""DataLoader: what a Python generator or a data set gives, as feeds, made ahead by a thread.

Iterable (the default), it gives feeds to hand to `run`. Otherwise it belongs to the program of its inputs: between
`start()` and `reset()` a run of that program, or of a clone, takes the next batch by itself, and raises EOFException
when there is none; `ExecutionStrategy.num_iteration_per_run` then makes a run several iterations.
On several replicas a batch is split over them, as a feed is. What the thread raises is raised by the next take, after
what was made before; a thread that is needed no more ends when its generator gives the next batch, and is not waited
for, since a generator may wait for anything. Source: fluid.io.DataLoader, PyReader of Fluid 1.8.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.dataset.dataset_base import Dataset, at_least_one
from penstock.dataset.reader_process import from_process
from penstock.dataset.slots import feed_of
from penstock.errors import EOFException, FeedError, SpecError
from penstock.lod_tensor import LoDTensor

_log = logging.getLogger(__name__)
_LEFT_OUT = "a DataLoader left out %d samples that fill no batch of %d (drop_last=True)"
_AHEAD = 4
Feed = dict[str, Any]
Reader = Callable[[], Iterable[Any]]


_LOOK_S = 0.1  # how long a thread waits before it looks whether it is still wanted


class _End:
    """Behind the last batch; `error` if there is one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Iterator[Any]):
    """An iterator over what `make()` gives, `capacity` items of it made in advance. One thread at a time takes."""

    def __init__(self, make: Callable[[], Iterable[Any]], capacity: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(capacity)
        self._wanted = True
        self._end: _End | None = None
        threading.Thread(target=self._run, args=(make,), name="penstock-data-loader", daemon=True).start()

    def __next__(self) -> Any:
        while self._end is None:
            try:
                item = self._queue.get(timeout=_LOOK_S)  # bounded: a thread that waits for ever sees no signal
            except queue.Empty:
                continue
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    @property
    def num_waiting(self) -> int:
        """How many items are made and not taken."""
        return self._queue.qsize()

    def close(self) -> None:
        """Let the thread end."""
        self._wanted = False
        self._end = self._end or _End(None)

    def _run(self, make: Callable[[], Iterable[Any]]) -> None:
        items: Iterator[Any] = iter(())
        try:
            items = iter(make())
            for item in items:
                if not self._put(item):
                    break
            else:
                self._put(_End(None))
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the next take raises it
            self._put(_End(error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: Any) -> bool:
        while self._wanted:
            try:
                self._queue.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False


@dataclass(frozen=True, slots=True)
class _Made:
    """A feed that was made ahead; `used` is called when it was trained on."""

    feed: Feed
    used: Callable[[], None] | None = None


class Waiting:
    """The batches of a loader that were made ahead, as Fluid's queue of them; none of a loader that is not started."""

    def __init__(self, ahead: Prefetched | None) -> None:
        self._ahead = ahead

    def size(self) -> int:
        """Return how many wait at the moment."""
        return 0 if self._ahead is None else self._ahead.num_waiting

    def __len__(self) -> int:
        return self.size()


class DataLoader:
    """Made by `from_generator` and `from_dataset`."""

    def __init__(self, names: Sequence[str], capacity: int, program: Any, *, returns_lists: bool = False) -> None:
        """`program`: the one that takes batches by itself; None: the loader is iterable."""
        self._names, self._capacity, self._program = list(names), capacity, program
        self._returns_lists = returns_lists
        self._reader: Reader | None = None
        self._ahead: Prefetched | None = None
        self._at_most: int | None = None
        self._given = 0
        self._last: _Made | None = None
        if program is not None:
            program.reader = self

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

        `use_double_buffer` changes nothing: batches are always made ahead. `use_multiprocess`: the generator runs in
        a process of its own (forked, so it may be a closure); what it raises, and its end by a signal, is raised by the
        next take. `drop_last`: with several places, leave out batches at the end that are fewer than the places.
        Raises SpecError.
        """
        loader = GeneratorLoader(
            _inputs(feed_list), _AHEAD if capacity is None else capacity, iterable=iterable, return_list=return_list
        )
        loader.in_process, loader.drop_last = use_multiprocess, drop_last
        return loader

    @staticmethod
    def from_dataset(
        dataset: Dataset, places: object = None, drop_last: bool = True, iterable: bool = True
    ) -> DataLoader:
        """Return a loader over a data set's passes for training. `drop_last`: leave out a short last batch, and warn.

        `places` changes nothing: the executor splits. The feed has the data set's inputs, and the lengths of ragged
        ones that their program asks for.
        """
        if not isinstance(dataset, Dataset):
            raise SpecError(f"from_dataset is given {dataset!r}; expected what DatasetFactory().create_dataset() made")
        program = dataset.program
        loader = DataLoader([], _AHEAD, None if iterable else program)
        loader._reader = lambda: _batches_of(dataset, program, drop_last=drop_last)
        return loader

    def set_batches_per_pass(self, num_batches: int | None) -> None:
        """Let every pass end after so many batches; what is left of the generator is not trained on. None: all."""
        self._at_most = None if num_batches is None else at_least_one("set_batches_per_pass", num_batches)

    # -- iterable ------------------------------------------------------------------------------------

    def __call__(self) -> Iterator[Any]:
        """Return an iterator over a pass."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        if self._program is not None:
            raise SpecError(
                "this loader is not iterable (iterable=False): call start(), and run the program without feed"
            )
        ahead = self._begun()
        try:
            for number, made in enumerate(ahead):
                if number == self._at_most:
                    return
                yield self._shown(made.feed)
                if made.used is not None:
                    made.used()
        finally:
            ahead.close()

    def _shown(self, feed: Any) -> Any:
        return list(feed.values()) if self._returns_lists else feed

    # -- of a program ----------------------------------------------------------------------------------

    @property
    def queue(self) -> Waiting:
        """The batches that wait to be taken."""
        return Waiting(self._ahead)

    @property
    def is_started(self) -> bool:
        """Whether the program takes its batches from here."""
        return self._ahead is not None

    def start(self) -> None:
        """Begin a pass."""
        if self._program is None:
            raise SpecError("an iterable loader is not started: iterate over it, or make it with iterable=False")
        if self._ahead is not None:
            raise SpecError("the loader was started already; call reset() at the end of a pass (EOFException)")
        self._ahead, self._given = self._begun(), 0

    def reset(self) -> None:
        """End the pass, finished or not; `start` begins another."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def next_feed(self, given: Any) -> Feed:
        """Return the next batch beside what a run was given. Raises EOFException, FeedError."""
        if self._ahead is None:
            raise SpecError("the program reads from a DataLoader that was not started; call its start() before a pass")
        self._last = next(self._ahead, None) if self._given != self._at_most else None
        if self._last is None:
            raise EOFException("the reader has no more data; call its reset(), and start() for another pass")
        self._given += 1
        return {**self._last.feed, **_beside(self._last.feed, given)}

    def used(self) -> None:
        """Note that a run has ended on what `next_feed` gave last: a data set's position counts it from now on."""
        if self._last is not None and self._last.used is not None:
            self._last.used()
        self._last = None

    def _begun(self) -> Prefetched:
        if self._reader is None:
            raise SpecError("the loader has no generator; call set_batch_generator, or one of its siblings, first")
        return Prefetched(self._reader, self._capacity)


class GeneratorLoader(DataLoader):
    """Feeds from a generator of samples, of lists of samples, or of batches."""

    def __init__(self, inputs: Sequence[Any], capacity: int, *, iterable: bool, return_list: bool) -> None:
        at_least_one("capacity", capacity)
        program = None if iterable else inputs[0].program
        super().__init__([v.name for v in inputs], capacity, program, returns_lists=return_list)
        self._inputs = list(inputs)
        self.in_process, self.drop_last = False, True
        self._num_places = 0

    @property
    def iterable(self) -> bool:
        """Whether it gives its batches to a loop, not to a program."""
        return self._program is None

    @property
    def inputs(self) -> list[Any]:
        """The inputs that it feeds."""
        return list(self._inputs)

    def set_sample_generator(
        self, reader: Reader, batch_size: int, drop_last: bool = True, places: object = None
    ) -> GeneratorLoader:
        """Set a generator of samples: a value for each input. `drop_last`: leave out a short last batch, and log it."""
        at_least_one("batch_size", batch_size)
        return self._set(lambda: self._columns_of(_batched(reader(), batch_size, drop_last=drop_last)), places)

    def set_sample_list_generator(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a generator of batches that are lists of samples."""
        return self._set(lambda: self._columns_of(reader()), places)

    def set_batch_generator(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a generator of batches: an array for each input."""
        return self._set(reader, places)

    def _set(self, batches: Reader, places: object) -> GeneratorLoader:
        """`places`: an iterable loader then gives lists of feeds, one for each place, as Fluid's does."""
        self._num_places = 0 if places is None else len(places) if isinstance(places, (list, tuple)) else 1
        self._reader = lambda: (_Made(self._feed(batch)) for batch in self._batches(batches))
        return self

    def _columns_of(self, batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        """For batches of samples a column for each input: an array, or of an input with sequences a list of them."""
        lists = [v.is_ragged for v in self._inputs]
        for samples in batches:
            columns = list(zip(*samples, strict=True))
            if len(columns) != len(lists):
                raise FeedError(
                    f"the generator gives samples of {len(columns)} values; expected one for each of {self._names}",
                    got=len(columns),
                )
            yield [
                list(column) if sequences else np.stack([np.asarray(value) for value in column])
                for column, sequences in zip(columns, lists, strict=True)
            ]

    def _batches(self, batches: Reader) -> Iterable[Any]:
        return from_process(batches) if self.in_process else batches()

    def __iter__(self) -> Iterator[Any]:
        feeds = super().__iter__()
        if not self._num_places:
            yield from feeds
            return
        group: list[Any] = []
        for feed in feeds:
            group.append(feed)
            if len(group) == self._num_places:
                yield group
                group = []
        if group and not self.drop_last:
            yield group
        elif group:
            _log.warning(
                "a DataLoader left out %d batches that are fewer than its %d places", len(group), self._num_places
            )

    def _feed(self, batch: Any) -> Feed:
        values = [batch[name] for name in self._names] if isinstance(batch, Mapping) else list(batch)
        if len(values) != len(self._names):
            raise FeedError(
                f"the generator gives {len(values)} values; expected one for each of {self._names}", got=len(values)
            )
        return {v.name: _array(v, value) for v, value in zip(self._inputs, values, strict=True)}


class PyReader(GeneratorLoader):
    """Fluid's older name, with its methods."""

    def __init__(
        self,
        feed_list: Sequence[Any] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
    ) -> None:
        number = _AHEAD if capacity is None else capacity
        super().__init__(_inputs(feed_list), number, iterable=iterable, return_list=return_list)

    def decorate_paddle_reader(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a reader of batches that are lists of samples, as `paddle.batch` makes them."""
        return self.set_sample_list_generator(reader, places)

    def decorate_tensor_provider(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a reader of batches: an array for each input."""
        return self.set_batch_generator(reader, places)

    decorate_sample_generator = GeneratorLoader.set_sample_generator
    decorate_sample_list_generator = GeneratorLoader.set_sample_list_generator
    decorate_batch_generator = GeneratorLoader.set_batch_generator


def _inputs(feed_list: Sequence[Any] | None) -> list[Any]:
    inputs = list(feed_list or ())
    if not inputs or not all(getattr(getattr(v, "desc", None), "feed", False) for v in inputs):
        raise SpecError(f"feed_list is {feed_list!r}; expected inputs of the program (fluid.layers.data)")
    return inputs


def _beside(feed: Feed, given: Any) -> Mapping[str, Any]:
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise FeedError("the program reads from a DataLoader; feed one dict of its other inputs, or nothing")
    both = sorted(feed.keys() & given.keys())
    if both:
        raise FeedError(f"{both[0]!r} is fed, and read from the program's DataLoader, too", variable=both[0])
    return given


def _array(variable: Any, value: Any) -> Any:
    """Return what is fed for an input: its dtype, and its sizes where the values are those, flat."""
    desc = variable.desc
    if isinstance(value, LoDTensor):
        return value if value.lengths else _array(variable, value.rows)
    if isinstance(value, torch.Tensor) or (variable.is_ragged and isinstance(value, (list, tuple))):
        return value
    array = np.ascontiguousarray(value, dtype=np.dtype(desc.dtype))
    fixed = list(desc.shape[1:])
    if array.ndim != len(desc.shape) and all(isinstance(size, int) for size in fixed):
        array = array.reshape(len(array), *fixed)
    return array if array.flags.writeable else array.copy()


def _batched(samples: Iterable[Any], batch_size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for sample in samples:
        batch.append(sample if isinstance(sample, list | tuple) else (sample,))
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch and drop_last:
        _log.warning(_LEFT_OUT, len(batch), batch_size)
    elif batch:
        yield batch


def _batches_of(dataset: Dataset, program: Any, *, drop_last: bool) -> Iterator[_Made]:
    run = dataset.open_for_training()
    wanted = {v.name for v in program.feeds()}
    try:
        while (batch := run.take()) is not None:
            if drop_last and len(batch) < dataset.batch_size:
                _log.warning(_LEFT_OUT, len(batch), dataset.batch_size)
                run.used(batch)
                continue
            yield _Made(feed_of(batch, run.slots, wanted), partial(run.used, batch))
    finally:
        run.close()
