"""DataFeeder: lists of samples to feeds. Source: fluid.data_feeder.DataFeeder (Fluid 1.8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import FeedError, SpecError
from penstock.exec.places import cpu_num
from penstock.lod_tensor import LoDTensor, of_sequences
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.context import default_main_program


class DataFeeder:
    """Turns samples, each with a value for every input, into a feed.

    `feed_list`: the inputs, or their names in `program` (the default main program). `place` is noted in the feeds.
    """

    def __init__(self, feed_list: Sequence[Any], place: object = None, program: Program | None = None) -> None:
        chosen = program or default_main_program()
        self._inputs = [v if isinstance(v, str) else v.name for v in feed_list]
        self._place = place
        self._describe = [
            partial(chosen.var, v) if isinstance(v, str) else partial(getattr, v, "desc") for v in feed_list
        ]
        self._described()  # raises for a name that the program does not have

    def _described(self) -> dict[str, VarDesc]:
        """What is known of the inputs now: layers that were added since may have declared rows for several steps."""
        return {name: describe() for name, describe in zip(self._inputs, self._describe, strict=True)}

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Any]:
        """Return a feed of the samples: a LoDTensor for each input, in its dtype and with its sizes where the values
        are those, flat; of an input with sequences (`lod_level`) with their lengths. Raises FeedError."""
        samples = [tuple(sample) for sample in iterable]
        for sample in samples:
            if len(sample) != len(self._inputs):
                raise FeedError(
                    f"a sample has {len(sample)} values; expected one for each of {self._inputs}", got=len(sample)
                )
        if not samples:
            raise FeedError("DataFeeder.feed is given no samples; give at least one")
        columns, described = zip(*samples, strict=True), self._described()
        return {
            name: _column(described[name], column, self._place)
            for name, column in zip(self._inputs, columns, strict=True)
        }

    def feed_parallel(
        self, iterable: Iterable[Iterable[Sequence[Any]]], num_places: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Return a feed for each place; `iterable` has the samples of each. Raises SpecError for another number."""
        batches = [list(samples) for samples in iterable]
        places = num_places or cpu_num()
        if len(batches) != places:
            raise SpecError(f"feed_parallel is given {len(batches)} batches for {places} places; give one for each")
        for samples in batches:
            yield self.feed(samples)

    def decorate_reader(
        self,
        reader: Callable[[], Iterable[Any]],
        multi_devices: bool,
        num_places: int | None = None,
        drop_last: bool = True,
    ) -> Callable[[], Iterator[Any]]:
        """Return a reader of feeds for a reader of lists of samples; with `multi_devices`, of lists of feeds, one for
        each place. `drop_last`: leave out what is fewer than the places at the end, else raise SpecError."""

        def decorated() -> Iterator[Any]:
            if not multi_devices:
                yield from map(self.feed, reader())
                return
            places, group = num_places or cpu_num(), []
            for samples in reader():
                group.append(self.feed(samples))
                if len(group) == places:
                    yield group
                    group = []
            if group and not drop_last:
                raise SpecError(
                    f"the reader ends with {len(group)} batches for {places} places; pass drop_last=True to leave "
                    "them out, or make the number of batches a multiple of the places"
                )

        return decorated


def _column(var: VarDesc, values: Sequence[Any], place: object) -> LoDTensor:
    made = _sequences(var, values) if var.lod_level > 0 else LoDTensor(_stacked(var, values))
    made.set_place(place)
    return made


def _sequences(var: VarDesc, values: Sequence[Any]) -> LoDTensor:
    sizes = [int(size) for size in var.shape[1:] if isinstance(size, int)]
    try:
        return of_sequences(values, var.lod_level, sizes, var.dtype)
    except (TypeError, ValueError) as error:
        raise FeedError(
            f"input {var.name!r} is given samples that are no {var.lod_level}-fold nests of sequences of "
            f"{var.dtype}{sizes} ({error}); declared at {var.source}",
            variable=var.name,
        ) from error


def _stacked(var: VarDesc, values: Sequence[Any]) -> np.ndarray:
    sizes = [size for size in var.shape[1:] if isinstance(size, int)]
    fixed = sizes if len(sizes) == len(var.shape) - 1 else None
    made = np.concatenate if fixed is not None and var.has_several_rows else np.stack
    try:
        return made([_sample(var, np.asarray(value, dtype=np.dtype(var.dtype)), fixed) for value in values])
    except (TypeError, ValueError) as error:
        if isinstance(error, FeedError):
            raise
        raise FeedError(
            f"input {var.name!r} is given samples that make no {var.dtype} array ({error}); all need the same sizes",
            variable=var.name,
        ) from error


def _sample(var: VarDesc, value: np.ndarray, fixed: list[int] | None) -> np.ndarray:
    if fixed is not None and var.has_several_rows and value.size and value.size % math.prod(fixed) == 0:
        return value.reshape([-1, *fixed])  # several rows a sample
    if fixed is None or value.shape == tuple(fixed):
        return value
    if value.size != math.prod(fixed):
        raise FeedError(
            f"input {var.name!r} is given a sample of shape {list(value.shape)}; expected {fixed}", variable=var.name
        )
    return value.reshape(fixed)
