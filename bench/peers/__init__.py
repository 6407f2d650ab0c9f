"""Peers: what Penstock is measured against. Each runs in a process of its own, some in an environment of their own.

`environment(name)` is the Python of a peer's environment, `build/peers/<name>/bin/python`, made from pinned
requirements by `make peers`. Peers on PyTorch run with the project's own torch and need none.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
PROJECT = "project"
"""The environment that this process runs in."""


class PeerMissing(Exception):
    """A peer's environment is not there. The text says which command makes it."""


def environments() -> list[str]:
    """List the environments that can be set up: the requirement files."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment(name: str) -> Path:
    """Return the Python of an environment: `PROJECT`, or one that was set up. Raises PeerMissing."""
    if name == PROJECT:
        return Path(sys.executable)
    if name not in environments():
        raise PeerMissing(f"no peer environment is called '{name}'; there are: {', '.join(environments())}")
    if not stamp(name).exists():
        raise PeerMissing(
            f"the environment of peer '{name}' is missing; set it up with 'make peers', "
            f"or 'python -m bench.peers setup {name}'"
        )
    return python(name)


def python(name: str) -> Path:
    """Return where the Python of an environment lies or will lie."""
    return FOLDER / name / "bin" / "python"


def stamp(name: str) -> Path:
    """Return the file that says that an environment is complete. It holds the requirements that it was made from."""
    return FOLDER / name / "complete.txt"
