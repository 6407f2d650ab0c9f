"""InMemoryDataset: load files once, shuffle, train on them any number of passes.

Files are read by several threads in parts that begin at a line; rows lie in the order of files and lines whatever the
number of threads, and a shuffle moves references, so that the order is a function of files and seeds. Compressed and
piped files, and Parquet and Arrow ones, are one part each.
"""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.dataset.dataset_base import Dataset, Reading, Run, at_least_one
from penstock.dataset.global_shuffle import exchanged
from penstock.dataset.headings import ID_SLOT, Headings
from penstock.dataset.loading import Loading
from penstock.dataset.memory_run import Complement, MemoryRun
from penstock.dataset.peers import Peers, peers_of
from penstock.dataset.rearranged import merged, with_slots_shuffled
from penstock.dataset.shuffles import Seed, Shuffles
from penstock.dataset.slots import Slot
from penstock.dataset.sources import is_columnar
from penstock.errors import SpecError
from penstock.logger import warn_once
from penstock.native import _feed

_log = logging.getLogger(__name__)
_PART_BYTES = 32 << 20
_NO_ANNOUNCING = "has no effect: tables on servers make rows on first touch"
_SIGNAL_S = 0.5  # longest delay of a signal's handler


def _over(fleet: Any, count: int) -> int:
    peers = None if fleet is None else peers_of(fleet, "the size of the data")
    return count if peers is None else sum(size for (size,) in peers.gather([count]))


class InMemoryDataset(Dataset):
    """Reads everything, then trains. Source: fluid.dataset.InMemoryDataset."""

    _feed_name = "MultiSlotInMemoryDataFeed"

    def __init__(self) -> None:
        super().__init__()
        self._store: _feed.Store | None = None
        self._loading: Loading | None = None
        self._shuffles = Shuffles()
        self._run: MemoryRun | None = None
        self._under_way: weakref.WeakSet[MemoryRun] = weakref.WeakSet()
        self._rows_a_message = 1024
        self._complement: tuple[Any, int] | None = None
        self._num_places = 1
        self.parse_ins_id = self.parse_content = self.fea_eval = False
        self._merge_size: int | None = None
        self._has_ids = self._is_merged = False
        self._before_shuffle: _feed.Store | None = None

    def load_into_memory(self) -> None:
        """Read all files. Raises DataError; what was in memory before is retained then."""
        self.preload_into_memory()
        self.wait_preload_done()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begin to read all files, with `thread_num` threads or those of `set_thread`."""
        if self._loading is not None:
            raise SpecError("preload_into_memory was called already; call wait_preload_done first")
        self._loading = Loading(self._reading(), self.skipped, thread_num)

    def _reading(self) -> Reading:
        reading = super()._reading()
        if not (self.parse_ins_id or self.parse_content):
            return reading
        columnar = next(filter(is_columnar, reading.files), None)
        if columnar is not None:
            raise SpecError(f"set_parse_ins_id and set_parse_content are for text, and {columnar!r} has columns")
        headings = Headings(has_id=self.parse_ins_id, has_content=self.parse_content)
        return replace(reading, headings=headings, slots=(ID_SLOT,) * self.parse_ins_id + reading.slots)

    def wait_preload_done(self) -> None:
        """Wait until all files were read. Raises DataError."""
        if self._loading is None:
            raise SpecError("wait_preload_done is called without preload_into_memory before it")
        loading, self._loading = self._loading, None
        self._store, self._run = loading.wait(), None
        self._has_ids, self._is_merged, self._before_shuffle = loading.has_ids, False, None
        self._shuffles.loaded()

    def local_shuffle(self, seed: int | None = None) -> None:
        """Put this process's samples in another order, one that `seed` gives; without it, a seed is drawn.

        What was left of the last pass is forgotten; raises SpecError while one is under way. After a restore, a shuffle
        that the interrupted pass began with is made again, by its seed; raises SpecError for another one.
        """
        self._still()
        for before in self._shuffles.before_next():
            self._again(before, None)
        wanted = self._shuffles.next_seed(None if seed is None else seed % (1 << 64))
        self._shuffle(int.from_bytes(os.urandom(8), "little") if wanted is None else wanted)

    def _shuffle(self, seed: int) -> None:
        self._still().shuffle(seed)
        self._shuffles.made(seed)
        self._is_changed()

    def _is_changed(self) -> None:
        self._run = None
        if self._shuffles.restored is None:
            self._count_from(0)

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12, seed: int | None = None) -> None:
        """Shuffle the samples of all trainers: each has as many as the others afterwards, or one more.

        All trainers call it, between passes: those of `fleet`, or (None) of the collective job that this process is in.
        In a process of its own this is `local_shuffle`. Needs memory for the samples twice. `thread_num` changes
        nothing: there is a thread for each other trainer. After a restore as `local_shuffle`. Raises SpecError,
        Unavailable.
        """
        peers = peers_of(fleet, "global_shuffle")
        if self._merge_size is not None:
            self._check_merging(peers)
            self.merge_by_lineid()
        if peers is None:
            self.local_shuffle(seed)
            return
        self._still()
        for before in self._shuffles.before_next():
            self._again(before, peers)
        wanted = self._shuffles.next_seed(None if seed is None else seed % (1 << 62), (peers.rank, peers.num))
        self._exchange(wanted, peers)

    def _exchange(self, seed: int | None, peers: Peers) -> None:
        before = self._shuffles.seeds
        self._store, used = exchanged(
            self._still(), self._held_slots, peers, seed, shuffle=self._shuffle, rows_a_message=self._rows_a_message
        )
        self._shuffles.seeds = [*before, [used, peers.rank, peers.num]]
        self._is_changed()

    def set_parse_ins_id(self, parse_ins_id: bool) -> None:
        """Say whether lines begin with `1 <id>`, of the instance; ids of equal text are equal. For the next load."""
        self.parse_ins_id = bool(parse_ins_id)

    def set_parse_content(self, parse_content: bool) -> None:
        """Say whether lines begin with `1 <content>`, behind the id if there is one. It is left out."""
        self.parse_content = bool(parse_content)

    def set_merge_by_lineid(self, merge_size: int = 2) -> None:
        """Let `global_shuffle` make one sample of the lines of an id, of which there are `merge_size` (0: any number).

        Lines begin with their id then. Those of an id that cannot be merged are left out, and that is logged.
        """
        if merge_size < 0:
            raise SpecError(f"set_merge_by_lineid is given {merge_size!r}; expected a number of lines, or 0 for any")
        self._merge_size, self.parse_ins_id = merge_size, True

    def merge_by_lineid(self) -> None:
        """Make one sample of the lines of each id, once after a load (see `set_merge_by_lineid`). Raises SpecError."""
        store = self._still()
        if self._is_merged:
            return
        if not self._has_ids:
            raise SpecError("merge_by_lineid: the samples were loaded without ids; call set_parse_ins_id(True) before")
        before = len(store)
        self._store, left_out = merged(store, self._held_slots, 2 if self._merge_size is None else self._merge_size)
        if left_out:
            _log.warning("merge_by_lineid has left out %d of %d lines, which could not be merged", left_out, before)
        self._is_merged = True
        self._is_changed()

    @staticmethod
    def _check_merging(peers: Peers | None) -> None:
        if peers is not None:
            raise SpecError(
                "set_merge_by_lineid with several trainers: lines of one id may be with different ones. Merge them "
                "before they are read, or call merge_by_lineid() where each trainer's files have all lines of an id"
            )

    def set_fea_eval(self, record_candidate_size: int, fea_eval: bool = True) -> None:
        """Say that slots will be shuffled. Each sample is a candidate: `record_candidate_size` limits nothing."""
        at_least_one("set_fea_eval", record_candidate_size)
        self.fea_eval = bool(fea_eval)

    def slots_shuffle(self, slots: Sequence[str], seed: int | None = None) -> None:
        """Give each sample the values of `slots` from another one, to see what they are worth in an evaluation.

        Other slots stay; what an earlier call has shuffled is put back first. Needs `set_fea_eval`. Raises SpecError.
        """
        if not self.fea_eval:
            raise SpecError("slots_shuffle is called without set_fea_eval(record_candidate_size, True) before it")
        store = self._still()
        self._before_shuffle = store if self._before_shuffle is None else self._before_shuffle
        drawn = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._store = with_slots_shuffled(self._before_shuffle, self._held_slots, list(slots), drawn)
        self._is_changed()

    def set_generate_unique_feasigns(self, generate_uni_feasigns: bool, shard_num: int) -> None:
        """Take what announces ids to Fluid's servers, which has no effect; a warning says so."""
        warn_once(_log, f"set_generate_unique_feasigns {_NO_ANNOUNCING}", self)

    def generate_local_tables_unlock(
        self, table_id: int, fea_dim: int, read_thread_num: int, consume_thread_num: int, shard_num: int
    ) -> None:
        """Take what announces ids to Fluid's servers, which has no effect; a warning says so."""
        warn_once(_log, f"generate_local_tables_unlock {_NO_ANNOUNCING}", self)

    @property
    def dataset(self) -> InMemoryDataset:
        """What holds the samples (Fluid's name): it does so itself."""
        return self

    def deal_to(self, num_places: int) -> None:
        """Let a pass give as many samples to each of so many places, which take its batches by turns."""
        self._num_places = at_least_one("deal_to", num_places)

    @property
    def _held_slots(self) -> tuple[Slot, ...]:
        """The slots in memory: those of the lines, behind the ids if there are some."""
        return (ID_SLOT,) * self._has_ids + self._slots

    def set_fleet_send_batch_size(self, fleet_send_batch_size: int = 1024) -> None:
        """Set how many samples `global_shuffle` sends at a time (1024)."""
        self._rows_a_message = at_least_one("set_fleet_send_batch_size", fleet_send_batch_size)

    def set_complement(self, is_on: bool = True, fleet: Any = None, seed: int = 0) -> None:
        """Let trainers with less data draw samples again, at random, until each has as many batches in a pass.

        Each pass of training then begins with a barrier of the trainers (of `fleet`, or of the collective job): all of
        them begin it. Every sample is trained on at least once. Nothing happens in a process of its own, or when
        inferring.
        """
        self._complement = (fleet, seed) if is_on else None

    def release_memory(self) -> None:
        """Forget the samples."""
        self._store, self._run, self._before_shuffle = None, None, None
        self._shuffles.loaded()

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Return how many samples are in memory: of this process, or of all workers of a fleet, which all call this."""
        return _over(fleet, 0 if self._store is None else len(self._store))

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Return how many of them were shuffled: all, or none before the first shuffle."""
        return _over(fleet, self.get_memory_data_size() if self._shuffles.seeds else 0)

    @property
    def memory_bytes(self) -> int:
        """What the samples take."""
        return 0 if self._store is None else self._store.bytes

    def open(self) -> MemoryRun:
        return self._begin(Complement())

    def open_for_training(self) -> Run:
        if self._complement is None:
            return super().open_for_training()
        if self._batches_per_pass is not None:
            raise SpecError(
                "set_batches_per_pass and set_complement are two ways to the same number of batches: set one"
            )
        fleet, seed = self._complement
        peers = peers_of(fleet, "set_complement")
        self._catch_up()
        own = -(-len(self._loaded()) // self._batch_size)
        most = own if peers is None else max(count for (count,) in peers.gather([own]))
        if most and not own:
            raise SpecError("set_complement: this trainer has no samples to draw from; give each a file at least")
        return self._begin(Complement(most - own, zlib.crc32(repr((seed, self._shuffles.seeds)).encode()) << 32))

    def _begin(self, complement: Complement) -> MemoryRun:
        store = self._loaded()
        self._catch_up()
        restored = self._shuffles.restored
        first = 0 if restored is None else restored.samples
        if first > len(store) + complement.num_batches * self._batch_size:
            raise SpecError(f"the reader's position is sample {first}, and {len(store)} are in memory: other files?")
        self._shuffles.begin()
        self._run = self._pass(first, complement)
        return self._run

    def _pass(self, first: int, complement: Complement) -> MemoryRun:
        places = 1 if complement.num_batches else self._num_places
        run = MemoryRun(self._held_slots, self._loaded(), self._batch_size, first, complement, places)
        self._under_way.add(run)
        return run

    def open_for_inference(self) -> MemoryRun:
        return self._pass(0, Complement())

    def position(self) -> dict[str, Any]:
        return self._counted(self._shuffles.as_position(self._run.used_samples if self._run else None))

    def between_passes(self) -> dict[str, Any] | None:
        return self._shuffles.between()

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Let the next pass go on there, in the order of that time: the shuffles since the load are repeated.

        Those that the pass began with may be asked for again; whatever is not is made when the pass begins.
        """
        if position.get("kind") != "memory":
            raise SpecError(f"the position {dict(position)!r} is not one of an InMemoryDataset")
        self._shuffles.restore(position)
        self._run = None
        self._count_from(int(position.get("batches", 0)))

    def _catch_up(self) -> None:
        """Make the shuffles that the pass which goes on had begun with, unless they were made again."""
        for seed in self._shuffles.missing():
            self._again(seed, None)

    def _again(self, seed: Seed, peers: Peers | None) -> None:
        if isinstance(seed, int):
            self._shuffle(seed)
            return
        if peers is None or seed[1:] != [peers.rank, peers.num]:
            raise SpecError(
                "the position is one after a global_shuffle, for which all trainers are needed: call what was "
                f"called before the position was taken (the shuffle's seed, the rank, the number of trainers: {seed})"
            )
        self._exchange(seed[0], peers)

    def _still(self) -> _feed.Store:
        if any(not run.closed for run in self._under_way):
            raise SpecError("the samples cannot be put in another order while a pass over them is under way")
        return self._loaded()

    def _loaded(self) -> _feed.Store:
        if self._loading is not None:
            raise SpecError("samples are being loaded; call wait_preload_done first")
        if self._store is None:
            raise SpecError("no samples are in memory; call load_into_memory first")
        return self._store
