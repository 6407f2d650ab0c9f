"""The file that remembers how long kernels take: one for a user, with a section for each machine and installation.

`FILE_NAME` in `$PENSTOCK_CACHE`, else in `$XDG_CACHE_HOME/penstock` or `~/.cache/penstock`. A section's name says all
that changes the times but is not in an entry: processor, torch, how MKL's vendor check is answered, and the settings of
MKL and oneDNN in the environment. Any number of processes may add to it at once: the first to add an entry wins. Its
name holds the version of what is written, so that two installations do not take each other's files for damaged.
On failure, which is logged once: a damaged file is ignored, and replaced by the next addition; a file that cannot be
read is left as it is; in a folder that cannot be written nothing is stored, and times live as long as the process.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from penstock.logger import warn_once
from penstock.machine.cache import cache_folder
from penstock.machine.capability import capability
from penstock.native.fused_ops import mkl_vendor_check
from penstock.settings import with_prefixes

_log = logging.getLogger(__name__)
VERSION = 3
"""Of what is written and of how it is measured. 3: a third kernel."""
FILE_NAME = f"matrix-kernels-{VERSION}.json"
_SETTINGS = ("MKL_", "ONEDNN_", "DNNL_")
_NOT_SPEED = ("MKL_NUM_THREADS", "ONEDNN_VERBOSE", "MKL_VERBOSE", "DNNL_VERBOSE")
_MACHINES = "machines"

Times = dict[str, dict[str, float]]


def machine() -> str:
    """Describe processor and installation, as far as they change how long a product takes."""
    settings = [f"{k}={v}" for k, v in with_prefixes(_SETTINGS).items() if not k.startswith(_NOT_SPEED)]
    parts = [_processor(), f"{os.cpu_count()} cores", f"torch {torch.__version__}", f"mkl vendor {mkl_vendor_check()}"]
    parts.append(torch.backends.cpu.get_cpu_capability())  # an emulator shows the host's processor in /proc
    return ", ".join([*parts, *settings])


def _processor() -> str:
    """The model as the kernel names it, with its numbers: cloud machines call many models by one name."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found: dict[str, str] = {}
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            key, _, text = line.partition(":")
            if key.strip() in wanted:
                found.setdefault(key.strip(), text.strip())
    return " ".join(found[k] for k in wanted if k in found) or f"{platform.machine()} {platform.processor()}".strip()


class CacheFile:
    """A `Store` in a file. `machine`: the section that is read and added to."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path, self._machine = path, machine

    def load(self) -> Times:
        """Return the section of this machine; nothing if there is no file, or none that can be read."""
        try:
            return self._read().get(self._machine, {})
        except OSError as error:
            self._warn(f"cannot read {self._path}: {error.strerror}; matrix kernels are measured again")
            return {}

    def add(self, found: Mapping[str, Mapping[str, float]]) -> Times:
        """Add what this machine's section does not have: read, merge and replace the file under a lock.

        Return the section as it is now; `found` if that fails. An entry that has all kernels of `found` stays.
        """
        mine = {entry: dict(times) for entry, times in found.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._path.with_suffix(".lock")):
                sections = self._read()
                section = sections.setdefault(self._machine, {})
                new = {k: v for k, v in mine.items() if not section.get(k, {}).keys() >= v.keys()}
                section.update(new)
                if new:
                    text = json.dumps({"version": VERSION, _MACHINES: sections}, indent=1, sort_keys=True)
                    self._replace(text + "\n")
                return section
        except OSError as error:
            self._warn(f"cannot remember the times of matrix kernels in {self._path}: {error.strerror}")
            return mine

    def _replace(self, text: str) -> None:
        """Put a whole file in the place of the old one. On failure the old one stays, and nothing is left beside it."""
        with ExitStack() as on_failure:
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            on_failure.callback(Path(name).unlink, missing_ok=True)
            with os.fdopen(descriptor, "w") as new:
                new.write(text)
            os.replace(name, self._path)
            on_failure.pop_all()

    def _read(self) -> dict[str, Times]:
        """Return all sections; none of a file that is damaged or not there. Raises OSError if it cannot be read."""
        try:
            return _checked(json.loads(self._path.read_text()))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            self._warn(f"{self._path} is damaged ({error}); matrix kernels are measured again")
            return {}

    def _warn(self, text: str) -> None:
        warn_once(_log, text, self, about="file")


class Unkept:
    """A `Store` that keeps nothing: each process measures for itself."""

    def load(self) -> Times:
        """Return nothing."""
        return {}

    def add(self, found: Mapping[str, Mapping[str, float]]) -> Times:
        """Return what was found."""
        return {entry: dict(times) for entry, times in found.items()}


def store_of_machine() -> CacheFile | Unkept:
    """Return the file in the cache folder; where the folder or locks cannot be used, which is logged, no file."""
    for name in ("cache_folder", "file_locks"):
        found = capability(name)
        if not found.present:
            _log.warning("times of matrix kernels live as long as this process: %s", found.detail)
            return Unkept()
    return CacheFile(cache_folder() / FILE_NAME, machine())


def _checked(content: Any) -> dict[str, Times]:
    """Return the sections of a file. Raises ValueError for anything that this version does not write."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"expected an object of version {VERSION}")
    sections = content.get(_MACHINES)
    if not isinstance(sections, dict) or not all(_is_section(s) for s in sections.values()):
        raise ValueError(f"expected {_MACHINES!r} to hold seconds by product and kernel")
    return sections


def _is_section(section: Any) -> bool:
    return isinstance(section, dict) and all(
        isinstance(times, dict) and all(isinstance(t, float) and 0 < t < 1e6 for t in times.values())
        for times in section.values()
    )
