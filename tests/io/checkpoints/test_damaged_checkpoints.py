"""A damaged checkpoint is named and passed over; with nothing else to go on from, or if asked for, it is an error."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from tests.io.checkpoints.folders import contents, is_of_step, names, writer

from penstock.errors import UserError
from penstock.io.checkpoints.reading import newest, opened
from penstock.io.checkpoints.record import FORMAT, VERSION
from penstock.io.saves.manifest import Damaged, sealed, unsealed

FILES = ["manifest.json", "values-00000.safetensors", "values-00001.safetensors", "rank-00000.json", "program.txt"]


def flip(path: Path, byte: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(bytes(content))


def test_a_checkpoint_has_exactly_the_files_damaged_below(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1))
    assert sorted(one.name for one in path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "bit", "missing", "empty"])
def test_a_damaged_file_is_named_and_an_older_checkpoint_used(
    file: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = writer(tmp_path)
    made.write(contents(1))
    path = made.write(contents(2)) / file
    size = path.stat().st_size
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[: size // 2])
        case "bit":
            flip(path, size // 3)
        case "missing":
            path.unlink()
        case _:
            path.write_bytes(b"")
    with pytest.raises(UserError, match=file):
        newest(tmp_path, strict=True, sets_aside=False)
    assert is_of_step(newest(tmp_path, strict=False, sets_aside=True), 1)
    said = caplog.text
    assert "is damaged and is passed over" in said
    assert str(path) in said
    assert [name.partition(".")[0] for name in names(tmp_path)] == ["checkpoint", "damaged"]
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 1), "the damaged one is not met again"


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1))
    whole = (path / "manifest.json").read_bytes()
    for byte in range(0, len(whole), 7):
        flip(path / "manifest.json", byte)
        with pytest.raises(Damaged):
            opened(path)
        (path / "manifest.json").write_bytes(whole)
    opened(path)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("file", ["manifest.json", "values-00001.safetensors"])
def test_one_that_cannot_be_read_now_is_not_taken_for_damaged(
    file: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path)
    made.write(contents(1))
    newer = made.write(contents(2))
    really = io.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, Path) and path == newer / file:
            raise OSError(error, os.strerror(error), str(path))
        return really(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", refuse)  # which pathlib calls
        with pytest.raises(
            UserError, match=rf"{newer.name} cannot be restored, .*{file}.*{os.strerror(error)}"
        ) as raised:
            newest(tmp_path, strict=False, sets_aside=True)
        assert not isinstance(raised.value, Damaged)
    assert len(names(tmp_path)) == 2
    assert is_of_step(newest(tmp_path, strict=False, sets_aside=True), 2), "nothing was set aside"


def test_one_of_a_newer_penstock_is_not_taken_for_damaged(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.write(contents(1))
    path = made.write(contents(2)) / "manifest.json"
    content = unsealed(path.read_text(), FORMAT, VERSION, str(path))
    own = {name: value for name, value in content.items() if name not in ("format", "version")}
    path.write_text(sealed(own, FORMAT, VERSION + 1))
    with pytest.raises(UserError, match=rf"has version {VERSION + 1}.*Use the Penstock that wrote it, or a newer one"):
        newest(tmp_path, strict=False, sets_aside=True)
    path.write_text(sealed({**own, "kind": "nobody-knows"}, FORMAT, VERSION))
    with pytest.raises(UserError, match="'nobody-knows', which this Penstock does not know"):
        newest(tmp_path, strict=False, sets_aside=True)
    assert not [name for name in names(tmp_path) if name.startswith("damaged.")]


def test_if_none_is_whole_all_are_named_and_nothing_is_taken(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for step in (1, 2):
        flip(made.write(contents(step)) / "rank-00000.json", 0)
    for _ in range(2):
        with pytest.raises(UserError, match=r"none is whole") as raised:
            newest(tmp_path, strict=False, sets_aside=True)
    assert "000000000001" in str(raised.value)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1)) / "manifest.json"  # what an attacker would do: a seal that fits
    content = unsealed(path.read_text(), "penstock-checkpoint", 1, str(path))
    for name in ("../attempt.json", "/etc/passwd", "a/../../b", ""):
        content["files"][0]["name"] = name
        path.write_text(
            sealed({k: v for k, v in content.items() if k not in ("format", "version")}, "penstock-checkpoint", 1)
        )
        with pytest.raises(UserError, match="expected one in its own folder"):
            opened(path.parent)
