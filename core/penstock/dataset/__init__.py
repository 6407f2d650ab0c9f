"""Data sets: files of samples, read by native threads into batches that a program takes without a copy.

    slots           from a program's inputs to the columns of a line, and from a batch to a feed
    faults          a line that cannot be read: file, line, column, reason; the policy raise or skip, and its count
    sources         a file as a stream of text: plain, compressed, through a command
    arrow           Parquet and Arrow files as the same columns
    position        how far each file has come, so that a resumed run sees each sample once
    dataset_base    what Fluid's setters set
    streaming       QueueDataset: files to batches, as they are read
    memory          InMemoryDataset: load, shuffle
    memory_run      a pass over what is in memory
    headings        what lines may begin with: ids and contents
    rearranged      slots that are shuffled on their own, lines of one id as one sample
    peers           the trainers of a job, as data sets need them
    global_shuffle  samples from trainer to trainer
    made_ahead      batches that wait to be taken
    loader_base     feeds made in advance, for a loop over them or for a program that reads
    generator_loader  those of a Python generator, PyReader
    samples         data sets of numbered samples, BatchSampler
    loader          DataLoader: of numbered samples, and of a data set of files
    generator       MultiSlotDataGenerator: scripts that write the text format

Text is parsed in C++ (`src/feed`) without the interpreter lock. Nothing is dropped silently: what is skipped
is counted. Nothing here knows graphs or executors; `penstock.exec.dataset_pass` trains from a data set.
"""

from __future__ import annotations

from penstock.dataset.dataset_base import Dataset
from penstock.dataset.faults import DataError
from penstock.dataset.generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
from penstock.dataset.memory import InMemoryDataset
from penstock.dataset.streaming import FileInstantDataset, QueueDataset
from penstock.errors import SpecError

__all__ = [
    "DataError",
    "Dataset",
    "DatasetFactory",
    "FileInstantDataset",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "QueueDataset",
]

_KINDS: dict[str, type[Dataset]] = {
    "QueueDataset": QueueDataset,
    "InMemoryDataset": InMemoryDataset,
    "FileInstantDataset": FileInstantDataset,
}


class DatasetFactory:
    """Makes data sets by name."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> Dataset:
        """Return a QueueDataset or an InMemoryDataset. Raises SpecError (a ValueError) for another name."""
        if datafeed_class not in _KINDS:
            raise SpecError(
                f"datafeed class {datafeed_class} does not exist; expected {' or '.join(_KINDS)}", got=datafeed_class
            )
        return _KINDS[datafeed_class]()
