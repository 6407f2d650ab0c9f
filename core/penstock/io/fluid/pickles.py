"""`.pdparams` and `.pdopt`: what `fluid.save` pickles, a dict of names to NumPy arrays.

They are read by `io.fluid.unpickling`, which looks up and runs nothing. Written are pickles of protocol 2, as Fluid
does, each beside its place and then put there whole.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import UserError
from penstock.io.fluid.unpickling import array_of, unpickled
from penstock.io.saves.manifest import Damaged


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Return the arrays of a file by name. Raises UserError if it holds anything else; then nothing of it has run."""
    try:
        found = unpickled(path.read_bytes())
    except ValueError as error:
        raise Damaged(
            f"{path} is no file of fluid.save, or is damaged: {error}. Use another copy of it", file=str(path)
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{path} holds a {type(found).__name__}; expected the dict of arrays that fluid.save writes", file=str(path)
        )
    return {name: _tensor(name, value, path) for name, value in found.items() if name != "StructuredToParameterName@@"}


def _tensor(name: Any, value: Any, path: Path) -> torch.Tensor:
    array = array_of(value)
    if not isinstance(name, str) or array is None:
        raise UserError(
            f"{path} holds {name!r} of {type(value).__name__}; expected names with arrays, as fluid.save writes them",
            file=str(path),
        )
    try:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise UserError(
            f"{path} holds {name!r} as {array.dtype}, which no tensor can be; expected numbers of at most 64 bits",
            file=str(path), variable=name,
        ) from error  # fmt: skip


def write_files(files: Mapping[Path, Mapping[str, torch.Tensor]]) -> None:
    """Write files of arrays by name, as `fluid.save` does. Raises OSError, and UserError for bfloat16 (NumPy lacks it).

    Then the files that were there before are as they were: all new ones are written before one is put in its place.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, tensors in files.items():
            temporaries[path].write_bytes(pickle.dumps(_arrays(path, tensors), protocol=2))
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise UserError(f"{path}: {name!r} is bfloat16, which {path.suffix} cannot hold", file=str(path))
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
