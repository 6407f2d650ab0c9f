"""Save and load: variables, inference models, whole Programs, checkpoints of a training. Fluid's `fluid.io`.

A save is a manifest (JSON) beside a safetensors file and, where a Program belongs to it, the Program's text.
Nothing is pickled or unpickled. Source: python/paddle/fluid/io.py (Fluid 1.8); the formats are Penstock's own.
"""

from __future__ import annotations

from penstock.dataset.loader import DataLoader, PyReader
from penstock.io.checkpoints.fence import StaleAttempt
from penstock.io.checkpoints.restoring import Restored
from penstock.io.checkpoints.saving import CheckpointManager
from penstock.io.checkpoints.server_parts import OtherCheckpoint
from penstock.io.saves.inference import load_inference_model, save_inference_model
from penstock.io.saves.variables import (
    load,
    load_params,
    load_persistables,
    load_vars,
    save,
    save_params,
    save_persistables,
    save_vars,
)

__all__ = [
    "CheckpointManager", "DataLoader", "OtherCheckpoint", "PyReader", "Restored", "StaleAttempt", "load",
    "load_inference_model", "load_params", "load_persistables", "load_vars", "save", "save_inference_model",
    "save_params", "save_persistables", "save_vars",
]  # fmt: skip
