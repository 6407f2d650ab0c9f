"""Two processes that all-reduce over Gloo on command: the peer of `bench sync`.

They wait in a pipe's `recv` between commands, so they take no core from what else is measured. A context manager
owns both: they are ended and joined on any way out, and being daemons they do not outlive the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

NUM_PROCESSES = 2
START_TIMEOUT_S = 120
REPLY_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 10
ELEMENT_BYTES = 4


def serve(rank: int, store: str, commands: Connection) -> None:
    """Answer (size_bytes, repeats) with the (begin, end) of each all-reduce on the clock that processes share."""
    # Imported here: this is the child's business, and takes the parent a second.
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # two processes on two cores
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_PROCESSES)
    commands.send("ready")
    while (command := next_command(commands)) is not None:
        size_bytes, repeats = command
        gradient = torch.zeros(size_bytes // ELEMENT_BYTES)
        gradient.fill_(rank + 1)
        dist.all_reduce(gradient)
        right = bool((gradient == NUM_PROCESSES * (NUM_PROCESSES + 1) / 2).all())
        gradient.zero_()
        times = []
        for _ in range(repeats):
            dist.barrier()
            begin = time.monotonic()
            dist.all_reduce(gradient)
            times.append((begin, time.monotonic()))
        commands.send((right, times))
    dist.destroy_process_group()


def next_command(commands: Connection) -> tuple[int, int] | None:
    """Return the next command; None at the end of the pipe, which is the parent's end."""
    try:
        command: tuple[int, int] | None = commands.recv()
    except EOFError:
        return None
    return command


class GlooPair:
    """Both processes. Enter to start them; `all_reduce` measures. Raises RuntimeError if one dies or is silent."""

    target = staticmethod(serve)
    """What each process runs."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(NUM_PROCESSES):
                ours, theirs = context.Pipe()
                store = str(Path(self._folder.name) / "store")
                process = context.Process(target=self.target, args=(rank, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            for pipe in self._pipes:
                _reply(pipe, START_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                for pipe in self._pipes:
                    _send(pipe, None)
                for process in self._processes:
                    process.join(CLOSE_TIMEOUT_S)
        finally:
            self._stop()

    def all_reduce(self, size_bytes: int, repeats: int) -> list[float]:
        """Return seconds of each of `repeats`, from the later process's call until the later one has the sum."""
        for pipe in self._pipes:
            _send(pipe, (size_bytes, repeats))
        replies = [_reply(pipe, REPLY_TIMEOUT_S) for pipe in self._pipes]
        if not all(right for right, _ in replies):
            raise RuntimeError("the all-reduce did not give the sum, so its time says nothing")
        runs = zip(*(times for _, times in replies), strict=True)
        return [max(end for _, end in run) - max(begin for begin, _ in run) for run in runs]

    def _stop(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _send(pipe: Connection, command: tuple[int, int] | None) -> None:
    try:
        pipe.send(command)
    except OSError as error:
        raise RuntimeError("a Gloo process has ended; its own error is above") from error


def _reply(pipe: Connection, timeout_s: float) -> tuple[bool, list[tuple[float, float]]]:
    if not pipe.poll(timeout_s):
        raise RuntimeError(f"a Gloo process has not answered within {timeout_s} s")
    try:
        answer: tuple[bool, list[tuple[float, float]]] = pipe.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError("a Gloo process has ended before it answered; its own error is above") from error
    return answer
