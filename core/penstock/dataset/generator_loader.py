"""Loaders over a Python generator: of samples, of lists of samples, or of batches.

In a program, on several replicas, each of them takes a batch of its own, as Fluid's do.
Source: fluid.io.DataLoader.from_generator, fluid.io.PyReader of Fluid 1.8.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock import telemetry
from penstock.dataset.dataset_base import at_least_one
from penstock.dataset.joined_loaders import share_of
from penstock.dataset.loader_base import BatchLoader, Feed, Made, Reader, places_of
from penstock.errors import EOFException, FeedError, SpecError
from penstock.lod_tensor import LoDTensor, of_sequences
from penstock.protocol.frames import Work

_log = logging.getLogger(__name__)
LEFT_OUT = "a DataLoader left out %d samples that fill no batch of %d (drop_last=True)"
AHEAD = 4


class GeneratorLoader(BatchLoader):
    """Feeds from a generator of samples, of lists of samples, or of batches."""

    def __init__(self, inputs: Sequence[Any], capacity: int, *, iterable: bool, return_list: bool) -> None:
        at_least_one("capacity", capacity)
        self._inputs, self._names = list(inputs), [v.name for v in inputs]
        program = None if iterable else inputs[0].program
        super().__init__(capacity, program, names=self._names, returns_lists=return_list)
        self._reader: Reader | None = None

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
        self._places = places_of(places)
        self._reader = batches
        return self

    def _maker(self) -> Callable[[], Iterable[Made]]:
        reader = self._reader
        if reader is None:
            raise SpecError("the loader has no generator; call set_batch_generator, or one of its siblings, first")
        return lambda: self._made(reader)

    def _made(self, reader: Reader) -> Iterator[Made]:
        trace = telemetry.input_trace()
        lanes = [] if trace is None else trace.claim(1)
        try:
            begin_ns = time.time_ns()
            for batch in reader():
                made = Made(self._of_values(batch))
                if trace is not None:
                    trace.add(Work.READ, lanes[0], begin_ns, time.time_ns())
                yield made
                begin_ns = time.time_ns()
        finally:
            if trace is not None:
                trace.release(lanes)

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

    def next_feeds(self, given: Any, num_replicas: int) -> Any:
        """Return a feed for each replica; those at the end of the data may be fewer, without `drop_last`."""
        if num_replicas == 1:
            return self.next_feed(given)
        feeds: list[Feed] = []
        try:
            while len(feeds) < num_replicas:
                feeds.append(self.next_feed(share_of(given, len(feeds))))
        except EOFException:
            if not feeds or self.drop_last:
                if feeds:
                    self._log_left_out(len(feeds), num_replicas, "replicas")
                raise
        return feeds

    def _of_values(self, values: Any) -> Feed:
        """Return the feed of a batch: a value for each input, in their order or by their names."""
        return feed_of_values(self._inputs, values, "the generator")


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
        number = AHEAD if capacity is None else capacity
        super().__init__(inputs_of(feed_list), number, iterable=iterable, return_list=return_list)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that makes the batches of the pass, if one was begun."""
        return None if self._ahead is None else self._ahead.thread

    @property
    def _loader(self) -> PyReader:
        """The loader behind it (Fluid's name): it is one itself."""
        return self

    def decorate_paddle_reader(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a reader of batches that are lists of samples, as `paddle.batch` makes them."""
        return self.set_sample_list_generator(reader, places)

    def decorate_tensor_provider(self, reader: Reader, places: object = None) -> GeneratorLoader:
        """Set a reader of batches: an array for each input."""
        return self.set_batch_generator(reader, places)

    decorate_sample_generator = GeneratorLoader.set_sample_generator
    decorate_sample_list_generator = GeneratorLoader.set_sample_list_generator
    decorate_batch_generator = GeneratorLoader.set_batch_generator


def keep_data_loader_order(*keeps: bool) -> bool:
    """Take Fluid's wish whether replicas get their batches in the order of the generator: they always do."""
    return True


def inputs_of(feed_list: Sequence[Any] | None) -> list[Any]:
    """Return the inputs of a loader. Raises SpecError for what is no input."""
    inputs = list(feed_list or ())
    if not inputs or not all(getattr(getattr(v, "desc", None), "feed", False) for v in inputs):
        raise SpecError(f"feed_list is {feed_list!r}; expected inputs of the program (fluid.layers.data)")
    return inputs


def feed_of_values(inputs: Sequence[Any], values: Any, source: str) -> Feed:
    """Return the feed of a batch: a value for each input, in their order or by their names. Raises FeedError."""
    names = [v.name for v in inputs]
    values = [values[name] for name in names] if isinstance(values, Mapping) else list(values)
    if len(values) != len(names):
        raise FeedError(f"{source} gives {len(values)} values; expected one for each of {names}", got=len(values))
    return {v.name: _array(v, value) for v, value in zip(inputs, values, strict=True)}


def _array(variable: Any, value: Any) -> Any:
    """Return what is fed for an input: its dtype, and its sizes where the values are those, flat.

    Always a copy: a generator may fill one array again and again while its batches wait.
    """
    desc = variable.desc
    if isinstance(value, LoDTensor):
        return value.copied() if value.lengths else _array(variable, value.rows)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if variable.is_ragged and isinstance(value, (list, tuple)):
        return _of_sequences(desc, value)
    array = np.array(BatchLoader._check_input_array(value), np.dtype(desc.dtype), order="C")
    fixed = list(desc.shape[1:])
    if all(isinstance(size, int) for size in fixed):
        if desc.has_several_rows and list(array.shape[1:]) != fixed:
            array = array.reshape(-1, *fixed)
        elif array.ndim != len(desc.shape):
            array = array.reshape(-1 if array.size else len(array), *fixed)  # one sample may hold all rows
    elif array.ndim == len(desc.shape) + 1:
        array = array.reshape(-1, *array.shape[2:])
    return array


def _of_sequences(desc: Any, sequences: Sequence[Any]) -> Any:
    """Return the sequences of a batch as new rows with their lengths, or as they are where feeding words the error."""
    try:
        return of_sequences(sequences, desc.lod_level, [int(str(size)) for size in desc.shape[1:]], desc.dtype)
    except (TypeError, ValueError):
        return list(sequences)


def _batched(samples: Iterable[Any], batch_size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for sample in samples:
        batch.append(sample if isinstance(sample, list | tuple) else (sample,))
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch and drop_last:
        _log.warning(LEFT_OUT, len(batch), batch_size)
    elif batch:
        yield batch
