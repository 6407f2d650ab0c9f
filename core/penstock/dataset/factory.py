"""DatasetFactory: Fluid's door to the data sets."""

from __future__ import annotations

from penstock.dataset.memory import InMemoryDataset
from penstock.dataset.settings import Dataset
from penstock.dataset.streaming import QueueDataset
from penstock.errors import SpecError

_KINDS: dict[str, type[Dataset]] = {"QueueDataset": QueueDataset, "InMemoryDataset": InMemoryDataset}


class DatasetFactory:
    """Makes data sets by name."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> Dataset:
        """Return a QueueDataset or an InMemoryDataset. Raises SpecError (a ValueError) for another name."""
        if datafeed_class not in _KINDS:
            raise SpecError(
                f"datafeed class {datafeed_class} does not exist; expected {' or '.join(_KINDS)}", got=datafeed_class
            )
        return _KINDS[datafeed_class]()
