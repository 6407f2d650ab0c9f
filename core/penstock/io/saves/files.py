"""Files of a save, written so that a process which dies at any moment leaves the previous save whole.

The order: each data file under a temporary name, flushed to the disk, renamed to a name that contains its digest
(so that it never replaces a file of the previous save); then the manifest in the same way; then the files that
only the previous manifest named are removed. A reader sees one manifest or the other, each with its files.
Saves to one folder happen one after another, by a lock of the folder: all trainers of a job may name the same place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from penstock.errors import UserError
from penstock.io.saves.manifest import Damaged, Manifest, StoredFile, StoredVariable, parse, render

_CHUNK = 1 << 20  # bytes read at once for a digest


@contextmanager
def saving_to(folder: Path) -> Iterator[None]:
    """Make the folder, and let no other process or thread save to it within the block. A lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # close alone leaves it to a process that was forked meanwhile
        os.close(descriptor)


def write_save(
    manifest_path: Path, tensors: Mapping[str, torch.Tensor], describe: Callable[[StoredFile], Manifest]
) -> None:
    """Write tensors and the manifest that `describe` makes for their file, within `saving_to`. Raises OSError or
    UserError; then the previous save is as it was."""
    stem = stem_of(manifest_path)
    apart = _apart(tensors)
    values = _store(manifest_path.parent, stem, "safetensors", lambda path: _write_tensors(apart, path))
    manifest = describe(values)
    temporary = manifest_path.with_name(f".{stem}.{os.getpid()}.tmp")
    temporary.write_text(render(manifest))
    flush(temporary)
    os.replace(temporary, manifest_path)
    flush(manifest_path.parent)
    _sweep(manifest_path.parent, stem, manifest.files())


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except (KeyError, SafetensorError) as error:  # KeyError: a dtype that the format lacks
        dtypes = sorted({str(t.dtype) for t in tensors.values()})
        raise UserError(
            f"{path} cannot be written: {error}; expected dtypes that safetensors has, got {dtypes}", file=str(path)
        ) from error


def store_text(manifest_path: Path, text: str) -> StoredFile:
    """Write the text of a Program as a file of the save, within `saving_to`."""

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return _store(manifest_path.parent, stem_of(manifest_path), "program.txt", write)


def stem_of(manifest_path: Path) -> str:
    """Return the name that all files of a save begin with."""
    return manifest_path.name.removesuffix(".json")


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU, no two of which share memory: the format has no views."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        found[name] = value.clone() if address in seen or value.untyped_storage().nbytes() > value.nbytes else value
        seen.add(address)
    return found


def _store(folder: Path, stem: str, suffix: str, write: Callable[[Path], None]) -> StoredFile:
    temporary = folder / f".{stem}.{os.getpid()}.tmp"
    try:
        write(temporary)
        flush(temporary)
        digest = digest_of(temporary)
        stored = StoredFile(f"{stem}.{digest[:16]}.{suffix}", temporary.stat().st_size, digest)
        os.replace(temporary, folder / stored.name)
        flush(folder)  # before the manifest, which must never be on the disk without its files
    finally:
        temporary.unlink(missing_ok=True)
    return stored


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(folder: Path, stem: str, keep: set[str]) -> None:
    """Remove what earlier saves of the same name left, those that died half-way included."""
    ours = re.compile(rf"{re.escape(stem)}\.[0-9a-f]{{16}}\.(safetensors|program\.txt)|\.{re.escape(stem)}\.\d+\.tmp")
    for path in folder.iterdir():
        if path.name not in keep and ours.fullmatch(path.name):
            path.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# -- reading -----------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """Return a manifest whose files are whole. Raises UserError naming the absent or damaged file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; expected the manifest of a save", file=str(path)
        ) from error
    manifest = parse(text, str(path))
    for stored in (manifest.values, manifest.program):
        if stored is not None:
            verify(path.parent / stored.name, stored)
    return manifest


def not_read(path: Path, words: str, error: OSError) -> UserError:
    """Return the error of a file that cannot be read. Only one that is not there is Damaged: others may be read yet."""
    kind = Damaged if isinstance(error, FileNotFoundError | NotADirectoryError) else UserError
    return kind(f"{path} {words}: {error.strerror}", file=str(path))


def verify(path: Path, stored: StoredFile) -> None:
    """Raise Damaged unless a file has the size and the digest that it was stored with; UserError if it is not read."""
    try:
        size, digest = path.stat().st_size, digest_of(path)
    except OSError as error:
        raise not_read(path, "belongs to the save, but cannot be read", error) from error
    if size != stored.size_bytes:
        raise Damaged(
            f"{path} is damaged: it has {size} bytes; expected {stored.size_bytes}. Use another copy of the save",
            file=str(path), got=size, expected=stored.size_bytes,
        )  # fmt: skip
    if digest != stored.sha256:
        raise Damaged(
            f"{path} is damaged: its sha256 is {digest}; expected {stored.sha256}. Use another copy of the save",
            file=str(path), got=digest, expected=stored.sha256,
        )  # fmt: skip


def read_tensors(path: Path, wanted: Mapping[str, StoredVariable]) -> dict[str, torch.Tensor]:
    """Return tensors that own their memory. Raises UserError naming file and variable."""
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, stored in wanted.items():
                tensor = file.get_tensor(name).clone() if name in names else None
                _agree(path, stored, tensor)
                if tensor is not None:
                    found[name] = tensor
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file: {error}", file=str(path)) from error
    return found


def _agree(path: Path, stored: StoredVariable, tensor: torch.Tensor | None) -> None:
    got = "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    expected = f"{stored.dtype}{list(stored.shape)}"
    if got != expected:
        raise UserError(
            f"{path}: variable {stored.name!r} is {got}, but the manifest says {expected}. Use another copy",
            file=str(path), variable=stored.name, got=got, expected=expected,
        )  # fmt: skip
