"""What a manager is told by its arguments, and by the environment of a job.

PENSTOCK_CHECKPOINT_DIR           folder of the job's checkpoints
PENSTOCK_CHECKPOINT_EVERY_STEPS   how often they are written (not at all)
PENSTOCK_CHECKPOINT_KEEP          how many of the latest are kept (3)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpecError
from penstock.protocol.checkpoints import DIRECTORY, EVERY_STEPS, KEEP

DEFAULT_KEEP = 3


@dataclass(frozen=True, slots=True)
class Told:
    """What the job says; '' and None where it says nothing."""

    directory: str
    every_steps: int | None
    keep: int


def from_environ(environ: Mapping[str, str]) -> Told:
    """Read the environment. Raises SpecError naming the variable."""
    every, keep = _number(environ, EVERY_STEPS), _number(environ, KEEP)
    return Told(environ.get(DIRECTORY, ""), every, DEFAULT_KEEP if keep is None else keep)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not (text.isdecimal() and int(text)):
        raise SpecError(f"{name} is {text!r}; expected a whole number of at least 1", got=text)
    return int(text) if text else None


def at_least(least: int, name: str, value: int) -> int:
    """Return a number. Raises SpecError if it is less, or none."""
    if type(value) is not int or value < least:
        raise SpecError(f"{name} is {value!r}; expected a whole number of at least {least}", got=value)
    return value


def folder(given: str | os.PathLike[str] | None, told: Told) -> Path:
    """Return where checkpoints lie. Raises SpecError if nobody says so."""
    if given is None and not told.directory:
        raise SpecError(
            f"CheckpointManager is given no directory, and this process is of no job that has one ({DIRECTORY}); "
            "expected a folder for checkpoints alone"
        )
    return Path(told.directory if given is None else given).absolute()
