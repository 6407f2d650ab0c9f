"""The manifest of a save: which files belong to it, and what they hold. Pure: text in, data out.

Every field is covered by a digest of the manifest itself, and every file by a digest in the manifest, so that a
changed byte is found wherever it is. Whether a file is *right* is decided here; reading it is `io.saves.files`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.errors import UserError

FORMAT = "penstock-save"
VERSION = 1
_DIGEST = 64  # characters of a sha256 in hexadecimal


class Damaged(UserError):
    """A file of a save is absent, or is not what was written: it stays so, however often it is read. Fields: file."""

    code = "damaged"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the save, beside the manifest. `name`: its name without a folder."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredVariable:
    """A variable in the safetensors file. `dtype` as torch calls it, without 'torch.'."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServersPart:
    """What the parameter servers of a job wrote with a save: `<folder>/<index>-of-<num_servers>` each, beside the
    manifest, as `ps.durability.server_snapshots` writes it."""

    folder: str
    num_servers: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`step` and `seed`: how far the Program had run and what its random numbers follow from; -1 if not kept.

    `feeds` and `fetches`: of an inference model. `servers`: of a save of a job that has some.
    """

    values: StoredFile
    variables: tuple[StoredVariable, ...]
    program: StoredFile | None = None
    step: int = -1
    seed: int = -1
    feeds: tuple[str, ...] = field(default=())
    fetches: tuple[str, ...] = field(default=())
    servers: ServersPart | None = None

    def files(self) -> set[str]:
        """Names of the files that belong to this save."""
        return {f.name for f in (self.values, self.program) if f is not None}


def render(manifest: Manifest) -> str:
    """Return the JSON text, digest included. No newline at its end: every shorter text is invalid."""
    return sealed(asdict(manifest), FORMAT, VERSION)


def sealed(content: Mapping[str, Any], kind: str, version: int) -> str:
    """Return JSON text with the format's name, its version, and a digest of it all. `unsealed` takes it back."""
    whole = {"format": kind, "version": version, **content}
    return json.dumps({**whole, "sha256": _digest(whole)}, indent=1)


def parse(text: str | bytes, path: str) -> Manifest:
    """Return the manifest in `text`, read from `path`. Raises UserError for one that is damaged or foreign."""
    return _manifest(unsealed(text, FORMAT, VERSION, path), path)


def unsealed(text: str | bytes, kind: str, version: int, path: str) -> dict[str, Any]:
    """Return what was sealed, read from `path`. Raises Damaged; UserError for another format, or a version of it.

    Every version is sealed alike, so that a changed byte is not taken for another version.
    """
    try:
        content = json.loads(text)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise Damaged(f"{path} is damaged or no manifest of a save: {error}; expected JSON", file=path) from error
    said = content.pop("sha256", None) if isinstance(content, dict) else None
    computed = _digest(content)
    if not isinstance(content, dict) or content.get("format") != kind:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        error_type = UserError if said == computed else Damaged
        raise error_type(f"{path} is no manifest of a save: its format is {got!r}; expected {kind!r}", file=path)
    if content.get("version") != version and said in (computed, None):
        raise UserError(
            f"{path} has version {content.get('version')!r}; this Penstock reads version {version}. Use the Penstock "
            "that wrote it, or a newer one",
            file=path,
        )
    if said != computed:
        raise Damaged(
            f"{path} is damaged: its content has sha256 {computed}, but it says {said!r}. Use another copy of the save",
            file=path, got=computed, expected=said,
        )  # fmt: skip
    return content


def _digest(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _manifest(content: Mapping[str, Any], path: str) -> Manifest:
    values = _file(expect(content, "values", dict, path), path)
    program = _file(content["program"], path) if content.get("program") is not None else None
    variables = tuple(stored_variable(v, path) for v in expect(content, "variables", list, path))
    step, seed = expect(content, "step", int, path), expect(content, "seed", int, path)
    feeds, fetches = (tuple(map(str, expect(content, key, list, path))) for key in ("feeds", "fetches"))
    servers = servers_part(content["servers"], path) if content.get("servers") is not None else None
    return Manifest(values, variables, program, step, seed, feeds, fetches, servers)


def servers_part(content: Any, path: str) -> ServersPart:
    """Return what servers wrote. Raises UserError for a folder that is elsewhere."""
    folder, count = expect(content, "folder", str, path), expect(content, "num_servers", int, path)
    if not folder or folder.startswith("/") or ".." in folder.split("/"):
        raise UserError(f"{path} names the folder {folder!r}; expected one below its own", file=path)
    return ServersPart(folder, count)


def expect(content: Any, key: str, kind: type, path: str) -> Any:
    """Return the field `key` of an object. Raises UserError unless it is of this kind."""
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        raise UserError(
            f"{path}: the field {key!r} is {type(value).__name__}; expected {kind.__name__}", file=path, field=key
        )
    return value


def _file(content: Any, path: str) -> StoredFile:
    name, digest = expect(content, "name", str, path), expect(content, "sha256", str, path)
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise UserError(f"{path} names the file {name!r}; expected a name in its own folder", file=path)
    if len(digest) != _DIGEST:
        raise UserError(f"{path}: the digest of {name!r} has {len(digest)} characters; expected {_DIGEST}", file=path)
    return StoredFile(name, expect(content, "size_bytes", int, path), digest)


def stored_variable(content: Any, path: str) -> StoredVariable:
    """Return a variable of a manifest. Raises UserError for what is none."""
    shape = expect(content, "shape", list, path)
    if not all(isinstance(d, int) and d >= 0 for d in shape):
        raise UserError(f"{path}: the shape of {content.get('name')!r} is {shape}; expected sizes", file=path)
    return StoredVariable(
        expect(content, "name", str, path), expect(content, "dtype", str, path), tuple(map(int, shape))
    )


def check_wanted(
    wanted: Mapping[str, tuple[str, tuple[int, ...]]],
    stored: Mapping[str, StoredVariable],
    path: str,
    created: Callable[[str], str],
) -> None:
    """Raise UserError for the first wanted (dtype, shape) that the save does not have. `created(name)`: its line."""
    for name, (dtype, shape) in wanted.items():
        found = stored.get(name)
        expected = f"{dtype}{list(shape)}"
        if found is None:
            raise UserError(
                f"{path} has no variable {name!r} (created at {created(name) or 'an unknown line'}); expected "
                f"{expected}. It holds {_some(sorted(stored))}. Was it saved from another program, or by save_params "
                "while this loads all persistables?",
                file=path, variable=name, got="nothing", expected=expected,
            )  # fmt: skip
        got = f"{found.dtype}{list(found.shape)}"
        if got != expected:
            raise UserError(
                f"{path}: variable {name!r} is {got}, but the program (at {created(name) or 'an unknown line'}) "
                f"expects {expected}. Load it into the program that it was saved from",
                file=path, variable=name, got=got, expected=expected,
            )  # fmt: skip


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "no variables"
