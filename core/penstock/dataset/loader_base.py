"""What all loaders do: give their batches to a loop, or to the runs of a program.

Iterable, a loader gives LoDTensors by the names of inputs; with places, a list of as many dicts. Otherwise it belongs
to the program of its inputs: between `start()` and `reset()` a run of that program, or of a clone, takes the next batch
by itself, and raises EOFException when there is none. A program may have several (`joined_loaders`).
Source: fluid.reader.DataLoaderBase of Fluid 1.8.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import telemetry
from penstock.dataset.dataset_base import at_least_one
from penstock.dataset.joined_loaders import beside, joined
from penstock.dataset.made_ahead import FeedQueue, Prefetched
from penstock.dataset.slots import LENGTHS
from penstock.errors import EOFException, PenstockError, ReaderError, SpecError
from penstock.lod_tensor import LoDTensor
from penstock.protocol.frames import Work

_log = logging.getLogger(__name__)
_SIZES_DIFFER = (
    "a batch is no regular array ({}): its samples have different sizes. For sequences declare the input with "
    "lod_level=1, and give a fluid.create_lod_tensor(rows, [lengths], place)"
)
Feed = dict[str, Any]
Reader = Callable[[], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Made:
    """A feed that was made ahead; `used` is called when it was trained on."""

    feed: Feed
    used: Callable[[], None] | None = None


class DataLoaderBase:
    """What all loaders are: an iterable of feeds."""

    def __call__(self) -> Iterator[Any]:
        """Return an iterator over a pass."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError

    @classmethod
    def _check_input_array(cls, item: Any) -> np.ndarray:
        """Return values as an array (Fluid's name). Raises TypeError for values of different sizes."""
        try:
            array = np.asarray(item)
        except ValueError as error:
            raise TypeError(_SIZES_DIFFER.format(error)) from error
        if array.dtype == object:
            raise TypeError(_SIZES_DIFFER.format("an array of objects"))
        return array


class BatchLoader(DataLoaderBase, ABC):
    """The base of what `DataLoader.from_generator` and `from_dataset` make."""

    def __init__(
        self, capacity: int, program: Any, *, names: Iterable[str] | None = None, returns_lists: bool = False
    ) -> None:
        """`program`: the one that takes batches by itself; None: the loader is iterable. `names`: see ProgramLoader."""
        self._capacity, self._program = capacity, program
        self.names = None if names is None else frozenset(names)
        self._returns_lists = returns_lists
        self._places: list[Any] = []
        self._ahead: Prefetched | None = None
        self._queue: FeedQueue | None = None
        self._at_most: int | None = None
        self._given = 0
        self._last: Made | None = None
        self.drop_last = True
        if program is not None:
            program.reader = joined(program.reader, self)

    @abstractmethod
    def _maker(self) -> Callable[[], Iterable[Made]]:
        """Return what makes the batches of a pass, on a thread of their own. Raises SpecError if nothing was set."""

    @abstractmethod
    def _of_values(self, values: Sequence[Any]) -> Feed:
        """Return the feed of a batch that was pushed."""

    @property
    def iterable(self) -> bool:
        """Whether it gives its batches to a loop, not to a program."""
        return self._program is None

    def set_batches_per_pass(self, num_batches: int | None) -> None:
        """Let every pass end after so many batches; what is left of the generator is not trained on. None: all."""
        self._at_most = None if num_batches is None else at_least_one("set_batches_per_pass", num_batches)

    # -- iterable ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._program is not None:
            raise SpecError(
                "this loader is not iterable (iterable=False): call start(), and run the program without feed"
            )
        return self._passed() if not self._places else self._grouped(self._passed())

    def _passed(self) -> Iterator[Any]:
        self._ahead = ahead = self._begun()
        try:
            for number in itertools.count():
                made = _taken(ahead) if number != self._at_most else None
                if made is None:
                    return
                yield self._shown(made.feed)
                if made.used is not None:
                    made.used()
        finally:
            ahead.close()

    def _grouped(self, feeds: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield a feed for each place. Those at the end that are fewer may be left out, which is logged."""
        group: list[Any] = []
        for feed in feeds:
            group.append(_on(feed, self._places[len(group)]))
            if len(group) == len(self._places):
                yield group
                group = []
        if group and self._gives_fewer:
            yield group
        elif group:
            self._log_left_out(len(group), len(self._places), "places")

    @property
    def _gives_fewer(self) -> bool:
        """Whether the last feeds may be fewer than the places."""
        return not self.drop_last

    def _shown(self, feed: Feed) -> Any:
        tensors = {
            name: _as_lod_tensor(value, feed.get(name + LENGTHS))
            for name, value in feed.items()
            if name.removesuffix(LENGTHS) == name or name.removesuffix(LENGTHS) not in feed
        }
        return list(tensors.values()) if self._returns_lists else tensors

    @staticmethod
    def _log_left_out(number: int, of: int, what: str) -> None:
        _log.warning("a DataLoader left out %d batches that are fewer than its %d %s", number, of, what)

    def _reset(self) -> None:
        """End the pass of a loop that was left (Fluid's name)."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    # -- of a program ----------------------------------------------------------------------------------

    @property
    def queue(self) -> FeedQueue:
        """The batches that wait to be taken. A script may push its own instead of starting the loader."""
        if self._queue is None:
            self._queue = FeedQueue(self._capacity)
            self._queue.shows(self._ahead)
        return self._queue

    @property
    def is_started(self) -> bool:
        """Whether the program takes its batches from here."""
        return self._program is not None and self._ahead is not None

    def start(self) -> None:
        """Begin a pass."""
        if self._program is None:
            raise SpecError("an iterable loader is not started: iterate over it, or make it with iterable=False")
        if self._ahead is not None:
            raise SpecError("the loader was started already; call reset() at the end of a pass (EOFException)")
        self._ahead, self._given = self._begun(), 0
        if self._queue is not None:
            self._queue.shows(self._ahead)

    def reset(self) -> None:
        """End the pass, finished or not; `start` begins another."""
        self._reset()
        if self._queue is not None:
            self._queue.shows(None)
            self._queue.reopen()

    def next_feed(self, given: Any) -> Feed:
        """Return the next batch beside what a run was given. Raises EOFException, FeedError."""
        feed = self._next()
        return {**feed, **beside(feed, given)}

    def next_feeds(self, given: Any, num_replicas: int) -> Any:
        """Return what a run on several replicas is fed: one dict that they share, or one for each of them.

        Raises EOFException, FeedError.
        """
        return self.next_feed(given)

    def used(self) -> None:
        """Note that a run has ended on what `next_feed` gave last: a data set's position counts it from now on."""
        if self._last is not None and self._last.used is not None:
            self._last.used()
        self._last = None

    def _next(self) -> Feed:
        if self._ahead is None:
            return self._pushed()
        self._last = _taken(self._ahead) if self._given != self._at_most else None
        if self._last is None:
            raise EOFException("the reader has no more data; call its reset(), and start() for another pass")
        self._given += 1
        return self._last.feed

    def _pushed(self) -> Feed:
        if self._queue is None:
            raise SpecError("the program reads from a DataLoader that was not started; call its start() before a pass")
        values = self._queue.pop()
        if values is None:
            raise EOFException("the reader's queue was closed, and has no more data")
        return self._of_values(values)

    def _begun(self) -> Prefetched:
        return Prefetched(self._maker(), self._capacity)


def _taken(ahead: Prefetched) -> Made | None:
    """Return the next batch; None at the end. Raises ReaderError for what a script's generator has raised."""
    trace, begin_ns = telemetry.input_trace(), time.time_ns()
    try:
        made = next(ahead, None)
        if trace is not None:
            trace.add(Work.WAIT, 0, begin_ns, time.time_ns())
        return made
    except PenstockError:
        raise
    except Exception as error:
        raise ReaderError(f"the reader of the program has raised {type(error).__name__}: {error}") from error


def _as_lod_tensor(value: Any, lengths: Any) -> Any:
    if isinstance(value, (LoDTensor, list)):
        return value
    return LoDTensor(value, [] if lengths is None else [np.asarray(lengths)])


def _on(feed: Any, place: Any) -> Any:
    """Note the place for which a feed was made."""
    for tensor in feed.values() if isinstance(feed, dict) else feed:
        if isinstance(tensor, LoDTensor):
            tensor.set_place(place)
    return feed


def places_of(places: object) -> list[Any]:
    """Return the places that a setter was given: a list, one, or none."""
    if places is None:
        return []
    return list(places) if isinstance(places, (list, tuple)) else [places]
