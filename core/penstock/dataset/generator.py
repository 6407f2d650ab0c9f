"""MultiSlotDataGenerator: a script that turns raw lines into the text format, on standard input and output.

    class Words(MultiSlotDataGenerator):
        def generate_sample(self, line):
            def samples():
                yield [("words", [1926, 8, 17]), ("label", [1])]
            return samples

    Words().run_from_stdin()

A sample is a list of (name, values) in the order of `set_use_var`; None leaves a line out. Names have to be the same in
every sample. Source: fluid/incubate/data_generator of Fluid 1.8.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from penstock.errors import SpecError

Sample = Iterable[tuple[str, Sequence[Any]]]
Samples = Callable[[], Iterable[Sample | None]]


class DataGenerator(ABC):
    """Base: override `generate_sample`, and `generate_batch` for what needs several samples at once."""

    def __init__(self) -> None:
        self._batch_size = 32

    def set_batch(self, batch_size: int) -> None:
        """Set how many samples `generate_batch` is given."""
        if batch_size < 1:
            raise SpecError(f"set_batch is given {batch_size}; expected at least 1", got=batch_size)
        self._batch_size = batch_size

    @abstractmethod
    def generate_sample(self, line: str | None) -> Samples | Iterable[Sample | None]:
        """Return the samples of a line (None: of what is in memory), as an iterator or a function that makes one."""

    def generate_batch(self, samples: list[Sample]) -> Samples | Iterable[Sample | None]:
        """Return what is written for a batch of samples: these, unless it is overridden."""
        return samples

    def run_from_stdin(self) -> None:
        """Write the samples of each line of standard input to standard output."""
        self.write((sample for line in sys.stdin for sample in _made(self.generate_sample(line))), sys.stdout)

    def run_from_memory(self) -> None:
        """Write the samples of `generate_sample(None)` to standard output."""
        self.write(_made(self.generate_sample(None)), sys.stdout)

    def write(self, samples: Iterable[Sample | None], to: IO[str]) -> None:
        """Write samples as lines, batch by batch. Raises SpecError for one that is not like the first."""
        batch: list[Sample] = []
        for sample in samples:
            if sample is not None:
                batch.append(sample if isinstance(sample, Sequence) else list(sample))
            if len(batch) == self._batch_size:
                self._write_batch(batch, to)
                batch = []
        if batch:
            self._write_batch(batch, to)
        to.flush()

    def _write_batch(self, batch: list[Sample], to: IO[str]) -> None:
        to.writelines(self.line_of(sample) for sample in _made(self.generate_batch(batch)) if sample is not None)

    def line_of(self, sample: Sample) -> str:
        """Return a sample as a line of text. Raises SpecError in this class, which knows no form of it."""
        raise SpecError(f"{type(self).__name__} writes nothing: derive it from MultiSlotDataGenerator, or its like")


class MultiSlotDataGenerator(DataGenerator):
    """Numbers: a slot of whole ones is written as such; one float in it, at any time, makes it one of floats."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: list[tuple[str, str]] = []

    def line_of(self, sample: Sample) -> str:
        names = [name for name, _ in sample]
        if not self._kinds:
            self._kinds = [(name, "uint64") for name in names]
        elif names != [name for name, _ in self._kinds]:
            raise SpecError(
                f"a sample has the slots {names}; the first had {[name for name, _ in self._kinds]}", got=names
            )
        fields: list[str] = []
        for place, (name, values) in enumerate(sample):
            self._check(name, values)
            if any(isinstance(value, float) for value in values):
                self._kinds[place] = (name, "float")
            fields += [str(len(values)), *map(str, values)]
        return " ".join(fields) + "\n"

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Name and type ("uint64" or "float") of each slot, as far as samples have shown."""
        return list(self._kinds)

    def _check(self, name: str, values: Sequence[Any]) -> None:
        if not isinstance(values, list | tuple) or not values:
            raise SpecError(
                f"slot {name!r} of a sample has {values!r}; expected a name and a list of at least one number (pad an "
                "empty one, with a 0 say)",
                got=values,
            )
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(f"slot {name!r} of a sample holds {value!r}; expected ints and floats", got=value)


class MultiSlotStringDataGenerator(DataGenerator):
    """Values are text already, and are not looked at."""

    def line_of(self, sample: Sample) -> str:
        return " ".join(part for _, values in sample for part in (str(len(values)), *values)) + "\n"


def _made(samples: Samples | Iterable[Sample | None]) -> Iterator[Sample | None]:
    return iter(samples() if callable(samples) else samples)
