"""What Fluid's setters set: the base of both data sets. Source: fluid/dataset.py of Fluid 1.8.

A setting of Fluid that is not supported is refused where it is set, never ignored; of two that only tune what is done
in another way here it is logged once that they have no effect.
"""

from __future__ import annotations

import glob
import logging
import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from penstock.dataset.faults import POLICIES, DataError, Policy, Skipped
from penstock.dataset.headings import Headings
from penstock.dataset.slots import Slot, slots_of
from penstock.dataset.sources import CAT, is_columnar, is_remote
from penstock.errors import SpecError
from penstock.logger import warn_once
from penstock.native import _feed

_log = logging.getLogger(__name__)
_REFUSED = {
    "set_rank_offset": "it belongs to page-view batches, which are not supported",
    "set_pv_batch_size": "page-view batches are not supported",
    "set_enable_pv_merge": "page-view batches are not supported",
    "set_fea_eval": "only slots in memory can be shuffled; use an InMemoryDataset",
    "slots_shuffle": "only slots in memory can be shuffled; use an InMemoryDataset",
    "set_parse_ins_id": "only samples in memory keep their ids; use an InMemoryDataset",
    "set_parse_content": "use an InMemoryDataset, or leave the content out in the pipe command",
    "set_parse_logkey": "lines begin with the first slot; leave the key out in the pipe command",
    "set_merge_by_lineid": "only lines in memory can be merged; use an InMemoryDataset",
    "set_input_type": "a slot's values on a line are one sequence of it, as with Fluid's input type 0",
    "set_merge_by_sid": "merge lines before they are read",
    "set_complement": "only what is in memory can be drawn again; use an InMemoryDataset, or set_batches_per_pass",
    "preprocess_instance": "page-view batches are not supported",
    "postprocess_instance": "page-view batches are not supported",
    "set_current_phase": "page-view batches are not supported",
    "set_generate_unique_feasigns": "use an InMemoryDataset; it has no effect",
    "generate_local_tables_unlock": "use an InMemoryDataset; it has no effect",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything a reader has to know; fixed when a run begins."""

    slots: tuple[Slot, ...]
    files: tuple[str, ...]
    batch_size: int
    threads: int
    command: str
    policy: Policy
    headings: Headings | None = None
    download: str = ""

    def is_plain(self, path: str) -> bool:
        """Whether a file is text as it lies on the disk, any part of which can be read."""
        is_changed = self.command != CAT or self.headings is not None or is_remote(path)
        return not is_changed and not path.endswith(".gz") and not is_columnar(path)

    def command_for(self, path: str) -> str:
        """Return the command that gives a file's lines: of a remote one, what downloads it, piped into the command."""
        return f"{self.download} {shlex.quote(path)} | ( {self.command}\n)" if is_remote(path) else self.command


class Run(Protocol):
    """One pass over a data set. `take` and `used` may be called by many threads."""

    slots: tuple[Slot, ...]
    gathers: bool = False
    """Whether `take` makes the batch itself, from samples that are there, instead of waiting for it."""

    def take(self) -> _feed.Batch | None:
        """Return the next batch, None after the last. Raises DataError."""
        ...

    def used(self, batch: _feed.Batch) -> None:
        """Note that a batch was trained on."""
        ...

    def fraction(self) -> float | None:
        """How much of the data was read, 0 to 1, as far as this can be known."""
        ...

    def stop(self) -> None:
        """Let `take` return None from now on, also where it waits. Any thread."""
        ...

    def close(self) -> None:
        """End the readers, finished or not, and log what was skipped. Idempotent."""
        ...


class Limited(Run):
    """A pass that ends after some batches, and logs it. `used_before`: those of this pass before it was resumed."""

    def __init__(self, run: Run, num_batches: int, used_before: int) -> None:
        self.slots, self._run, self._num_batches = run.slots, run, num_batches
        self.gathers = run.gathers
        self._lock = threading.Lock()
        self._taken = self.num_used = used_before

    def take(self) -> _feed.Batch | None:
        with self._lock:
            is_over = self._taken >= self._num_batches
            self._taken += not is_over
        batch = None if is_over else self._run.take()
        if batch is None:
            self._warn_of_end(is_over=is_over)
        return batch

    def _warn_of_end(self, *, is_over: bool) -> None:
        if is_over:
            text = f"has ended a pass after {self._num_batches} batches; whatever data is left is not trained on"
        else:
            text = f"asks for {self._num_batches} batches in a pass, and the data has fewer"
        warn_once(_log, f"set_batches_per_pass {text}", self, about="end")

    def used(self, batch: _feed.Batch) -> None:
        self._run.used(batch)
        with self._lock:
            self.num_used += 1

    def fraction(self) -> float | None:
        return min(1.0, self._taken / self._num_batches)

    def stop(self) -> None:
        self._run.stop()

    def close(self) -> None:
        self._run.close()


class Dataset(ABC):
    """The setters that both kinds have. A pass begins with `open`; settings may change between passes."""

    def __init__(self) -> None:
        self._batch_size, self._threads, self._command = 32, 1, CAT
        self._patterns: list[str] | None = None
        self._slots: tuple[Slot, ...] = ()
        self._program: Any = None
        self._batches_per_pass: int | None = None
        self._limited: Limited | None = None
        self._used_before = 0
        self._policy: Policy = "raise"
        self._download = ""
        self.skipped = Skipped()

    def set_batch_size(self, batch_size: int) -> None:
        """Set how many samples a batch has (32); the last one of a reader may have fewer."""
        self._batch_size = at_least_one("set_batch_size", batch_size)

    def set_thread(self, thread_num: int) -> None:
        """Set how many threads read and train (1). A file belongs to one reader."""
        self._threads = at_least_one("set_thread", thread_num)

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Set the files, in order; patterns (`part-*`, `*.parquet`) are looked up when a pass begins, and sorted.

        An empty list is that of a trainer for which there is no file: its passes have no batches.
        """
        if isinstance(filelist, str) or not all(isinstance(name, str | os.PathLike) for name in filelist):
            raise SpecError(f"set_filelist is given {filelist!r}; expected a list of paths", got=filelist)
        self._patterns = [os.fspath(name) for name in filelist]

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        """Set the inputs that a line holds, in the order of its columns."""
        self._slots, self._program = slots_of(var_list), var_list[0].program

    def set_pipe_command(self, pipe_command: str) -> None:
        """Set the command that turns a file, on its standard input, into lines ("cat": none). It is run by bash.

        With Parquet or Arrow files in the list, anything but "cat" is refused when a pass begins.
        """
        if not pipe_command.strip():
            raise SpecError("set_pipe_command is given an empty command; 'cat' leaves files as they are")
        self._command = pipe_command.strip()

    def set_download_cmd(self, download_cmd: str) -> None:
        """Set the command that writes a remote file (`hdfs:`, `afs:`), its last argument, to its standard output."""
        if not download_cmd.strip():
            raise SpecError("set_download_cmd is given an empty command; expected one that writes a file to its output")
        self._download = download_cmd.strip()

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Read remote files by the command `hadoop`, which has to be there, of the file system and the user given."""
        settings = {"fs.default.name": fs_name, "hadoop.job.ugi": fs_ugi}
        given = " ".join(f"-D {name}={shlex.quote(value)}" for name, value in settings.items())
        self._download = f"hadoop fs {given} -text"

    def set_bad_line_policy(self, policy: Policy) -> None:
        """Set what a line that cannot be read does: 'raise' ends the run, 'skip' leaves it out and counts it."""
        if policy not in POLICIES:
            raise SpecError(f"set_bad_line_policy is given {policy!r}; expected one of {POLICIES}", got=policy)
        self._policy = policy

    def set_batches_per_pass(self, num_batches: int | None) -> None:
        """Let a pass of training end after so many batches (None: all), the same number for each trainer of a job.

        What is left is not trained on, and that is logged.
        """
        self._batches_per_pass = None if num_batches is None else at_least_one("set_batches_per_pass", num_batches)

    def set_queue_num(self, queue_num: int) -> None:
        """Take Fluid's number of channels between readers and trainers, which has no effect; a warning says so."""
        at_least_one("set_queue_num", queue_num)
        warn_once(_log, "set_queue_num has no effect: readers put batches into one queue, of four a reader", self)

    def set_fleet_send_sleep_seconds(self, fleet_send_sleep_seconds: int = 0) -> None:
        """Take Fluid's pause between messages of a shuffle, which has no effect; a warning says so, if it is not 0."""
        if isinstance(fleet_send_sleep_seconds, bool) or not isinstance(fleet_send_sleep_seconds, int | float):
            raise SpecError(f"set_fleet_send_sleep_seconds is given {fleet_send_sleep_seconds!r}; expected seconds")
        if fleet_send_sleep_seconds:
            why = "global_shuffle waits for slower trainers by itself"
            warn_once(_log, f"set_fleet_send_sleep_seconds has no effect: {why}", self)

    @property
    def thread_num(self) -> int:
        """What `set_thread` has set."""
        return self._threads

    @property
    def batch_size(self) -> int:
        """What `set_batch_size` has set."""
        return self._batch_size

    @property
    def program(self) -> Any:
        """The program whose inputs `set_use_var` was given. Raises SpecError before that."""
        if self._program is None:
            raise SpecError("the data set has no inputs; call dataset.set_use_var([…]) first")
        return self._program

    @property
    def num_skipped_lines(self) -> int:
        """How many bad lines were left out so far, over all passes."""
        return self.skipped.count

    @property
    def skipped_lines(self) -> list[DataError]:
        """The first ten of them."""
        return list(self.skipped.first)

    def desc(self) -> str:
        """Return the settings as text, in the form of Fluid's description."""
        slots = "\n".join(
            f'    slots {{\n        name: "{s.name}"\n        type: "{"float" if s.is_float else "uint64"}"\n'
            f"        is_dense: {str(bool(s.width)).lower()}\n        is_used: true\n    }}"
            for s in self._slots
        )
        return (
            f'name: "{self._feed_name}"\nbatch_size: {self._batch_size}\nmulti_slot_desc {{\n{slots}\n}}\n'
            f'pipe_command: "{self._command}"\nthread_num: {self._threads}\n'
        )

    @abstractmethod
    def open(self) -> Run:
        """Begin a pass. Raises SpecError if files or inputs were not set; DataError if a file is not there."""

    def open_for_training(self) -> Run:
        """Begin a pass of as many batches as `set_batches_per_pass` has set. Raises like `open`."""
        if self._batches_per_pass is None:
            return self.open()
        before, self._used_before = self._used_before, 0
        self._limited = Limited(self.open(), self._batches_per_pass, before)
        return self._limited

    @abstractmethod
    def open_for_inference(self) -> Run:
        """Begin a pass aside of the training: a position that was set, or is asked for later, is not its own."""

    def _counted(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return a position with the batches of its pass, if these are limited."""
        if self._batches_per_pass is None:
            return position
        return {**position, "batches": self._used_before if self._limited is None else self._limited.num_used}

    def _count_from(self, num_batches: int) -> None:
        self._limited, self._used_before = None, num_batches

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Return how far the pass that runs, or ran last, has come: plain types, to be kept in a checkpoint."""

    def between_passes(self) -> dict[str, Any] | None:
        """Return the position of a pass that has not begun, after one that is over; None: it begins like the first."""
        return None

    @abstractmethod
    def set_position(self, position: Mapping[str, Any]) -> None:
        """Let the next pass go on from there: what is left of it is read, each sample once."""

    _feed_name = "MultiSlotDataFeed"

    def _reading(self) -> Reading:
        if not self._slots:
            raise SpecError("the data set has no inputs; call dataset.set_use_var([…]) first")
        files = self._files()
        columnar = next(filter(is_columnar, files), None)
        if columnar is not None and self._command != CAT:
            raise SpecError(
                f"set_pipe_command({self._command!r}): a command gets and gives text, and {columnar!r} has columns. "
                "Take the command away (set_pipe_command('cat')), or read such files with a data set of their own",
                got=self._command,
            )
        remote = next(filter(is_remote, files), None)
        if remote is not None and not self._download:
            raise SpecError(
                f"set_filelist: {remote!r} is not a local path: say how it is read with set_download_cmd(command) or "
                "set_hdfs_config(name, ugi), or mount it",
                got=remote,
            )
        return Reading(
            self._slots, files, self._batch_size, self._threads, self._command, self._policy, download=self._download
        )

    def _files(self) -> tuple[str, ...]:
        if self._patterns is None:
            raise SpecError("the data set has no files; call dataset.set_filelist([…]) first")
        files: list[str] = []
        for pattern in self._patterns:
            is_pattern = glob.has_magic(pattern) and not is_remote(pattern) and not os.path.exists(pattern)
            found = sorted(glob.glob(pattern)) if is_pattern else [pattern]
            if not found:
                raise SpecError(f"set_filelist: no file is called {pattern!r}", got=pattern)
            files += found
        return tuple(files)

    def __getattr__(self, name: str) -> Any:
        """Refuse what Fluid has and Penstock has not."""
        if name not in _REFUSED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise SpecError(f"{type(self).__name__}.{name} is not supported: {_REFUSED[name]}")

        return refuse


def at_least_one(setter: str, value: Any) -> int:
    """Check what a setter is given. Raises SpecError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{setter} is given {value!r}; expected a whole number of at least 1", got=value)
    return value
