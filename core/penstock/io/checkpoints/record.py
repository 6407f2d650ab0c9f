"""Manifest of a checkpoint, and the state of each rank. Pure: text in, data out.

`manifest.json` names every other file with its size and sha256, and has a digest of itself, so that a changed byte is
found wherever it is. It is written last: a folder without one was never finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from penstock.errors import SpecError, UserError
from penstock.io.saves.manifest import (
    ServersPart,
    StoredFile,
    StoredVariable,
    expect,
    sealed,
    servers_part,
    stored_variable,
    unsealed,
)

Kind = Literal["local", "collective", "pserver"]
Collect = Callable[[], list[str]]
"""Returns the texts of all ranks, in order; waits for them. For the writer's thread."""

MANIFEST, PROGRAM = "manifest.json", "program.txt"
FORMAT, VERSION = "penstock-checkpoint", 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file of values. `file`: its name in the checkpoint's folder."""

    file: str
    variables: tuple[StoredVariable, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The manifest. `metric`: what the user gave, None if nothing. `fingerprint`: of the program, see `fingerprint`.

    `job`, `epoch`: of the control plane, '' and -1 without one. `files`: all but the manifest itself.
    """

    kind: Kind
    step: int
    attempt: int
    num_ranks: int
    fingerprint: str
    files: tuple[StoredFile, ...]
    shards: tuple[Shard, ...]
    job: str = ""
    epoch: int = -1
    metric: float | None = None
    servers: ServersPart | None = None

    def file(self, name: str) -> StoredFile:
        """Return a file by its name."""
        return next(one for one in self.files if one.name == name)


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank needs to go on. `program_steps`, `seed`: what its random operators follow from.

    `passes`: passes over the data that it has finished. `position`: of its reader, in plain types. `generators`: the
    states of the random generators of Python, numpy and torch, which no operator uses but the user's code may.
    `steps`: that its manager has counted; -1 if unknown.
    """

    program_steps: int
    seed: int
    passes: int
    position: Any
    generators: Mapping[str, Any]
    steps: int = -1

    @property
    def is_known(self) -> bool:
        """Whether the rank had handed it in; False of one that was lost."""
        return self.program_steps >= 0

    def text(self) -> str:
        """Return JSON. Raises SpecError for a position that is more than plain types."""
        try:
            return json.dumps(asdict(self))
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"the reader's position {self.position!r} cannot be kept in a checkpoint: {error}. Expected dicts, "
                "lists, strings and numbers",
                got=self.position,
            ) from error


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank's state."""
    return f"rank-{rank:05d}.json"


def rank_state(text: str, path: str) -> RankState:
    """Return the state of a rank; nothing of one that had left. Raises UserError."""
    nothing = {"program_steps": -1, "seed": -1, "passes": 0, "steps": -1, "generators": {}}
    content = json.loads(text) if text else nothing
    counts = ("program_steps", "seed", "passes", "steps")
    program_steps, seed, passes, steps = (expect(content, key, int, path) for key in counts)
    kept = expect(content, "generators", dict, path)
    return RankState(program_steps, seed, passes, content.get("position"), kept, steps)


def render(record: Record) -> str:
    """Return the text of the manifest."""
    return sealed(asdict(record), FORMAT, VERSION)


def parse(text: str | bytes, path: str) -> Record:
    """Return the manifest in `text`, read from `path`. Raises UserError for one that is damaged or foreign."""
    content = unsealed(text, FORMAT, VERSION, path)
    kind = expect(content, "kind", str, path)
    if kind not in ("local", "collective", "pserver"):
        raise UserError(f"{path} is of a training of kind {kind!r}, which this Penstock does not know", file=path)
    step, attempt, num_ranks, epoch = (expect(content, key, int, path) for key in _NUMBERS)
    metric, servers = content.get("metric"), content.get("servers")
    return Record(
        kind=kind, step=step, attempt=attempt, num_ranks=num_ranks, epoch=epoch,
        fingerprint=expect(content, "fingerprint", str, path),
        files=tuple(_file(one, path) for one in expect(content, "files", list, path)),
        shards=tuple(_shard(one, path) for one in expect(content, "shards", list, path)),
        job=expect(content, "job", str, path),
        metric=None if metric is None else float(metric),
        servers=None if servers is None else servers_part(servers, path),
    )  # fmt: skip


_NUMBERS = ("step", "attempt", "num_ranks", "epoch")


def _file(content: Any, path: str) -> StoredFile:
    name = expect(content, "name", str, path)
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name:
        raise UserError(f"{path} names the file {name!r}; expected one in its own folder", file=path)
    return StoredFile(name, expect(content, "size_bytes", int, path), expect(content, "sha256", str, path))


def _shard(content: Any, path: str) -> Shard:
    variables = expect(content, "variables", list, path)
    return Shard(expect(content, "file", str, path), tuple(stored_variable(one, path) for one in variables))
