"""Readers: functions without arguments that return an iterator over samples, and what is made of them.

Names and arguments are Fluid's (`paddle.batch`, `paddle.reader`, `fluid.io`). A reader runs anew at every call. An
exception in a thread or process of a reader is raised where its samples are taken, and ends the iteration; threads
and processes end with the iterator, also if it is not run to its end.
Source: python/paddle/batch.py and python/paddle/reader/decorator.py (Fluid 1.8).
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import random
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, cast

from penstock.dataset.made_ahead import Prefetched
from penstock.errors import SpecError
from penstock.identity import JobIdentity

Reader = Callable[[], Iterable[Any]]
_SAMPLE, _END, _ERROR = "sample", "end", "error"
_END_S = 5.0  # how long a killed process may take to be reaped

__all__ = [
    "ComposeNotAligned", "batch", "buffered", "cache", "chain", "compose", "distributed_batch_reader", "firstn",
    "map_readers", "multiprocess_reader", "shuffle", "xmap_readers",
]  # fmt: skip


class ComposeNotAligned(SpecError):
    """Readers that were composed have different numbers of samples."""


def batch(reader: Reader, batch_size: int, drop_last: bool = False) -> Reader:
    """Return a reader of lists of `batch_size` samples; the last may be shorter. Raises SpecError for a size below 1.

    `drop_last`: leave a shorter last one out.
    """
    size = int(batch_size)
    if size < 1:
        raise SpecError(f"batch_size is {batch_size}; expected a whole number from 1 on", got=batch_size)

    def batches() -> Iterator[list[Any]]:
        samples = iter(reader())
        while found := list(itertools.islice(samples, size)):
            if len(found) == size or not drop_last:
                yield found

    return batches


def cache(reader: Reader) -> Reader:
    """Return a reader over the samples of one run of `reader`, which is run now and kept in memory."""
    samples = tuple(reader())
    return lambda: iter(samples)


def map_readers(func: Callable[..., Any], *readers: Reader) -> Reader:
    """Return a reader of `func(sample of the first, of the second, …)`, as many as the shortest has."""
    return lambda: map(func, *(reader() for reader in readers))


def distributed_batch_reader(batch_reader: Reader) -> Reader:
    """Return a reader of this trainer's batches: of each as many batches as there are trainers, the one of its number.

    A rest of fewer batches is left out, so that all trainers run equally many steps. Raises SpecError for a wrong
    variable of the environment.
    """
    own = JobIdentity.from_environ(reader="distributed_batch_reader: ")

    def batches() -> Iterator[Any]:
        found = iter(batch_reader())
        while len(group := list(itertools.islice(found, own.num_trainers))) == own.num_trainers:
            yield group[own.index]

    return batches


def shuffle(reader: Reader, buf_size: int) -> Reader:
    """Return a reader that shuffles each `buf_size` samples among themselves, by the module `random`; 0: none."""

    def shuffled() -> Iterator[Any]:
        for samples in batch(reader, max(buf_size, 1))():
            random.shuffle(samples)
            yield from samples

    return shuffled


def chain(*readers: Reader) -> Reader:
    """Return a reader of all samples of the first, then of the second, …."""
    return lambda: itertools.chain.from_iterable(reader() for reader in readers)


def compose(*readers: Reader, check_alignment: bool = True) -> Reader:
    """Return a reader of tuples with the fields of one sample of each reader.

    Raises ComposeNotAligned if a reader ends before another; without `check_alignment` it ends with the shortest.
    """
    end = object()

    def composed() -> Iterator[tuple[Any, ...]]:
        running = [iter(reader()) for reader in readers]
        while readers:
            parts = [next(one, end) for one in running]
            if any(part is end for part in parts):  # by identity: a sample may be an array
                if check_alignment and any(part is not end for part in parts):
                    short = [number for number, part in enumerate(parts) if part is end]
                    raise ComposeNotAligned(f"readers {short} of {len(parts)} have fewer samples than the others")
                return
            yield tuple(field for part in parts for field in (part if isinstance(part, tuple) else (part,)))

    return composed


def firstn(reader: Reader, n: int) -> Reader:
    """Return a reader of the first `n` samples."""
    return lambda: itertools.islice(reader(), n)


# ---------------------------------------------------------------- threads


def buffered(reader: Reader, size: int) -> Reader:
    """Return a reader that a thread runs ahead by up to `size` samples; 0: without a limit."""

    def ahead() -> Iterator[Any]:
        with closing(Prefetched(reader, size)) as samples:
            yield from samples

    return ahead


def xmap_readers(
    mapper: Callable[[Any], Any], reader: Reader, process_num: int, buffer_size: int, order: bool = False
) -> Reader:
    """Return a reader of `mapper(sample)`, computed by `process_num` threads, up to `buffer_size` samples ahead.

    `order`: as the samples are; else as they are ready.
    """

    def mapped() -> Iterator[Any]:
        most = process_num + max(buffer_size, 1)
        pending: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(process_num) as pool, closing(Prefetched(reader, max(buffer_size, 1))) as samples:
            try:
                for sample in samples:
                    pending.append(pool.submit(mapper, sample))
                    while pending and (len(pending) >= most or pending[0].done()):
                        yield _taken(pending, order).result()
                while pending:
                    yield _taken(pending, order).result()
            finally:
                for future in pending:
                    future.cancel()

    return mapped


def _taken(pending: deque[Future[Any]], order: bool) -> Future[Any]:
    if order or pending[0].done():
        return pending.popleft()
    ready = wait(pending, return_when=FIRST_COMPLETED).done.pop()
    pending.remove(ready)
    return ready


# ---------------------------------------------------------------- processes


def multiprocess_reader(readers: Sequence[Reader], use_pipe: bool = True, queue_size: int = 1000) -> Reader:
    """Return a reader of the samples of all `readers`, each run by a process of its own, as they arrive.

    Samples are pickled; `use_pipe` and `queue_size` are Fluid's and change nothing: each process has a pipe. Raises
    what a reader raised, and SpecError if a process ended without its end of data or if there are no readers.
    """
    if not readers:
        raise SpecError("multiprocess_reader got no readers; expected a list of at least one")

    def merged() -> Iterator[Any]:
        context = multiprocessing.get_context("fork")  # readers are closures, which no other way passes
        running: dict[Connection, ForkProcess] = {}
        try:
            for reader in readers:
                pipe, process = _started(context, reader, list(running))
                running[pipe] = process
            yield from _merge(running)
        finally:
            for pipe, process in running.items():
                pipe.close()
                process.kill()  # a reader may hold a signal back
            for process in running.values():
                process.join(_END_S)

    return merged


def _started(context: ForkContext, reader: Reader, others: Sequence[Connection]) -> tuple[Connection, ForkProcess]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(reader, theirs, [*others, ours]), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return ours, process


def _send(reader: Reader, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Run a reader in its process. Without the ends that are read, a write fails when the script's process is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # handlers of the process that was forked are not for this one
    for end in inherited:
        end.close()
    try:
        for sample in reader():
            pipe.send((_SAMPLE, sample))
        pipe.send((_END, None))
    except BrokenPipeError:
        return  # the rest is not wanted
    except Exception as error:  # noqa: BLE001 - raised again where samples are taken
        text = f"a process of multiprocess_reader failed:\n{traceback.format_exc()}"
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes: whether it arrives as it is
            error.add_note(text)
            pipe.send((_ERROR, error))
        except Exception:  # noqa: BLE001 - of any class: its text arrives
            pipe.send((_ERROR, SpecError(text)))


def _merge(running: Mapping[Connection, ForkProcess]) -> Iterator[Any]:
    """Iterate over what the processes send, as it arrives."""
    left = set(running)
    while left:
        for pipe in cast("list[Connection]", wait_for_pipes(left)):
            kind, sample = _received(pipe, running[pipe])
            if kind == _ERROR:
                raise sample
            if kind == _END:
                left.discard(pipe)
            else:
                yield sample


def _received(pipe: Connection, process: ForkProcess) -> tuple[str, Any]:
    try:
        kind, sample = pipe.recv()
    except (EOFError, OSError):
        process.join(_END_S)
        raise SpecError(
            f"a process of multiprocess_reader ended with exit code {process.exitcode} before its reader did; "
            "its last output is on stderr"
        ) from None
    return kind, sample
