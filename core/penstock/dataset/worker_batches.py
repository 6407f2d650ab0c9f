"""What processes of a DataLoader send: batches that are pickled before they are handed to torch.

torch pickles what a process has made in a thread, whose errors nothing reports: the batch never comes, and the reader
waits for it. So everything is pickled here, where an error is one of the batch, and only bytes, tensors in shared
memory and errors that can be pickled are handed over.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import ReaderError

Values = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch: `pickled` has its names, if it has some, and the values by their places that are not in `shared`.

    `arrays`: places in `shared` of what were arrays.
    """

    pickled: bytes
    shared: dict[int, torch.Tensor]
    arrays: frozenset[int]

    def values(self) -> Values:
        """Return the values as the process had them; tensors are detached."""
        names, found = pickle.loads(self.pickled)  # noqa: S301 - of a process that was forked from this one
        found |= {place: one.numpy() if place in self.arrays else one for place, one in self.shared.items()}
        ordered = [found[place] for place in range(len(found))]
        return ordered if names is None else dict(zip(names, ordered, strict=True))


@dataclass(frozen=True, slots=True)
class WorkerBatches:
    """Batches by the numbers of their samples, as a data set of torch's. `shares`: through shared memory."""

    dataset: Any
    collate: Callable[[list[Any]], Values]
    shares: bool

    def __getitem__(self, numbers: Sequence[int]) -> SentBatch:
        with errors_that_can_be_pickled():
            return sent(self.collate([self.dataset[number] for number in numbers]), shares=self.shares)


def sent(values: Values, *, shares: bool) -> SentBatch:
    """Return a batch as it is sent. Raises ReaderError for values that cannot be pickled."""
    names = list(values) if isinstance(values, Mapping) else None
    shared: dict[int, torch.Tensor] = {}
    arrays, rest = [], {}
    for place, value in enumerate(values.values() if isinstance(values, Mapping) else values):
        value = value.detach() if isinstance(value, torch.Tensor) else value
        tensor = _dense(value) if shares else None
        if tensor is None:
            rest[place] = value
            continue
        tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch's; its thread would do so, and may fail
        shared[place] = tensor
        if isinstance(value, np.ndarray):
            arrays.append(place)
    try:
        pickled = pickle.dumps((names, rest), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kinds = sorted({type(value).__name__ for value in rest.values()})
        raise ReaderError(
            f"the batch that collate_fn made has values of {kinds} that cannot be pickled, so no process can send it "
            f"({type(error).__name__}: {error}). Return arrays or tensors, or use num_workers=0"
        ) from error
    return SentBatch(pickled, shared, frozenset(arrays))


def _dense(value: Any) -> torch.Tensor | None:
    """Return a tensor of the value that shared memory can hold; None if there is none."""
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.layout is torch.strided and value.device.type == "cpu" else None
    if not isinstance(value, np.ndarray) or not value.ndim:
        return None
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError):  # a dtype that torch lacks, such as text, or another order of bytes
        return None


@contextmanager
def errors_that_can_be_pickled() -> Iterator[None]:
    """Raise a ReaderError for an error whose class cannot be pickled, such as one that a function defines."""
    try:
        yield
    except Exception as error:
        try:
            pickle.dumps(type(error))
        except Exception as reason:  # noqa: BLE001 - whatever a class's own reduction raises
            raise ReaderError(f"{type(error).__name__}: {error} (its class cannot be pickled: {reason})") from error
        raise


def begin_worker(init: Callable[[int], Any], number: int) -> None:
    """Call a script's `worker_init_fn`."""
    with errors_that_can_be_pickled():
        init(number)


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the batch is one."""
    return batch
