"""Save and load: variables, inference models, whole Programs, checkpoints of a training. Fluid's `fluid.io`.

A save is a manifest (JSON) beside a safetensors file and, where a Program belongs to it, the Program's text.
Files of Fluid are read as well (`io.fluid`); no class of a pickle is looked up.
Source: python/paddle/fluid/io.py (Fluid 1.8); the formats are Penstock's own.
"""

from __future__ import annotations

from penstock.dataset.generator_loader import PyReader
from penstock.dataset.loader import DataLoader
from penstock.dataset.readers import (
    ComposeNotAligned,
    batch,
    buffered,
    cache,
    chain,
    compose,
    firstn,
    map_readers,
    multiprocess_reader,
    shuffle,
    xmap_readers,
)
from penstock.dataset.samples import BatchSampler, Dataset, default_collate_fn
from penstock.io import load_operator as _load_operator  # noqa: F401 - of Programs that were saved
from penstock.io.checkpoints.fence import StaleAttempt
from penstock.io.checkpoints.preemption import Preempted
from penstock.io.checkpoints.restoring import Restored
from penstock.io.checkpoints.saving import CheckpointManager
from penstock.io.checkpoints.server_parts import OtherCheckpoint
from penstock.io.loads import load, load_inference_model, load_params, load_persistables, load_vars
from penstock.io.saves.inference import save_inference_model
from penstock.io.saves.variables import (
    is_parameter,
    is_persistable,
    save,
    save_params,
    save_persistables,
    save_vars,
)
from penstock.io.states import (
    get_parameter_value,
    get_parameter_value_by_name,
    get_program_parameter,
    get_program_persistable_vars,
    load_program_state,
    set_program_state,
)

__all__ = [
    "BatchSampler", "CheckpointManager", "ComposeNotAligned", "DataLoader", "Dataset", "OtherCheckpoint",
    "Preempted", "PyReader", "Restored", "StaleAttempt", "batch", "buffered", "cache", "chain", "compose",
    "default_collate_fn", "firstn", "get_parameter_value", "get_parameter_value_by_name", "get_program_parameter",
    "get_program_persistable_vars", "is_parameter", "is_persistable", "load", "load_inference_model",
    "load_params", "load_persistables", "load_program_state", "load_vars", "map_readers", "multiprocess_reader",
    "save", "save_inference_model", "save_params", "save_persistables", "save_vars", "set_program_state",
    "shuffle", "xmap_readers",
]  # fmt: skip
