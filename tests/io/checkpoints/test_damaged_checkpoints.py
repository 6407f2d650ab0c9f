"""A damaged checkpoint is named and passed over; with nothing else to go on from, or if asked for, it is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.io.checkpoints.folders import contents, is_of_step, names, writer

from penstock.errors import UserError
from penstock.io.checkpoints.reading import newest, opened

FILES = ["manifest.json", "values-00000.safetensors", "values-00001.safetensors", "rank-00000.json", "program.txt"]


def flip(path: Path, byte: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(bytes(content))


def test_the_files_of_a_checkpoint_are_those_that_are_damaged_below(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1))
    assert sorted(one.name for one in path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "bit", "missing", "empty"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    file: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    said = capsys.readouterr().err
    assert "is damaged and is passed over" in said
    assert str(path) in said
    assert [name.partition(".")[0] for name in names(tmp_path)] == ["checkpoint", "damaged"]
    assert is_of_step(newest(tmp_path, strict=True, sets_aside=False), 1), "the damaged one is not met again"


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = writer(tmp_path).write(contents(1))
    whole = (path / "manifest.json").read_bytes()
    for byte in range(0, len(whole), 7):
        flip(path / "manifest.json", byte)
        with pytest.raises(UserError):
            opened(path)
        (path / "manifest.json").write_bytes(whole)
    opened(path)


def test_if_none_is_whole_all_are_named_and_nothing_is_taken(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for step in (1, 2):
        flip(made.write(contents(step)) / "rank-00000.json", 0)
    for _ in range(2):
        with pytest.raises(UserError, match=r"none is whole") as raised:
            newest(tmp_path, strict=False, sets_aside=True)
    assert "000000000001" in str(raised.value)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    from penstock.io.manifest import sealed, unsealed  # what an attacker would do: a seal that fits

    path = writer(tmp_path).write(contents(1)) / "manifest.json"
    content = unsealed(path.read_text(), "penstock-checkpoint", 1, str(path))
    for name in ("../attempt.json", "/etc/passwd", "a/../../b", ""):
        content["files"][0]["name"] = name
        path.write_text(
            sealed({k: v for k, v in content.items() if k not in ("format", "version")}, "penstock-checkpoint", 1)
        )
        with pytest.raises(UserError, match="expected one in its own folder"):
            opened(path.parent)
