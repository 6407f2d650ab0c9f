"""Values in safetensors files of bounded size, written from memory with their digests. Source: the format's document.

Written by hand because the library copies each tensor while it holds the interpreter's lock, which a training thread
needs; reading goes through the library. Here only headers are made under the lock: data is written, and its digest
computed, from the tensors' own memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.saves.manifest import StoredFile, StoredVariable

SHARD_BYTES = 1 << 30
"""Of a file, unless one tensor is larger."""
_CHUNK = 1 << 20  # bytes written at once
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for a tensor of a dtype that the format lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UserError(
                f"variable {name!r} is {tensor.dtype}, which safetensors has not; expected one of "
                f"{', '.join(str(d) for d in _NAMES)}",
                variable=name,
            )


def shares(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Part tensors, in order, so that no part but one of a single tensor is larger than `limit` bytes."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write contiguous tensors in the processor's memory, and bring them to the disk. Raises OSError."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, tensors):
            digest.update(piece)
            _write_all(file.fileno(), piece)
            size += len(piece)
        os.fsync(file.fileno())
    return StoredFile(path.name, size, digest.hexdigest())


def _pieces(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors.values():
        if not tensor.nbytes:
            continue
        whole = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(whole), _CHUNK):
            yield whole[begin : begin + _CHUNK]


def _write_all(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def described(tensors: Mapping[str, torch.Tensor]) -> tuple[StoredVariable, ...]:
    """Return what the manifest says of tensors."""
    return tuple(
        StoredVariable(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
