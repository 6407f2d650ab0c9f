"""Which GPUs of this host a launcher gives to its ranks. Without torch, which would take seconds to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import SpecError
from penstock.settings import NAMES, VISIBLE_GPUS


def num_installed() -> int:
    """Return the number of NVIDIA devices of this host, as the driver lists them."""
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    return sum(one.name.removeprefix("nvidia").isdecimal() for one in Path("/dev").glob("nvidia[0-9]*"))


def visible(environ: Mapping[str, str], installed: int) -> tuple[str, ...]:
    """Return the GPUs that a user may take: by the names of CUDA_VISIBLE_DEVICES, where it is set, else by number."""
    restricted = VISIBLE_GPUS.text(environ)
    if restricted is None:
        return tuple(str(i) for i in range(installed))
    return NAMES.parse(restricted)


def listed(wanted: str) -> tuple[str, ...]:
    """Return the names in --selected_gpus. Raises SpecError for an empty one, or one that is there twice."""
    found = tuple(one.strip() for one in wanted.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise SpecError(f"--selected_gpus is {wanted!r}; expected different GPUs, as 0,1", pointer="--selected_gpus")
    return found


def chosen(wanted: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of --selected_gpus. Raises SpecError for one that is not there, or there twice."""
    found = listed(wanted)
    for one in found:
        if one not in known:
            raise SpecError(
                f"--selected_gpus asks for GPU {one}, but visible here are {', '.join(known) or 'none'} "
                f"({VISIBLE_GPUS} may restrict them). For ranks that compute on CPU: --nproc_per_node N",
                pointer="--selected_gpus",
            )
    return found


def first(number: int, known: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of --gpus. Raises SpecError if there are not so many."""
    if number > len(known):
        raise SpecError(
            f"--gpus asks for {number} GPUs, but visible here are {', '.join(known)} ({VISIBLE_GPUS} may restrict "
            "them)",
            pointer="--gpus",
        )
    return tuple(known[:number])
