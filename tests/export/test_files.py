"""Files of an export: whole or none, under any name that a user may give."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.export.files import is_stdout, whole_file


class Interrupted(bytes):
    """What has been written when the user presses Ctrl-C."""


def write(path: Path, content: bytes = b"new") -> None:
    with whole_file(path) as file:
        file.write(content)
        if isinstance(content, Interrupted):
            raise KeyboardInterrupt


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write(path, Interrupted(b"half"))
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == {path: b"old"}
    write(path)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == {path: b"new"}


@pytest.mark.parametrize("name", ["existing.txt/out.csv", "x" * 300, "none/out.csv", "folder", "loop"])
def test_a_name_that_cannot_be_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "existing.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SpecError, match="give another file with --output"):
        write(tmp_path / name)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write(tmp_path / ("\u0414" * 127))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for target in ("far/there.csv", "far/new.csv"):
        link = tmp_path / Path(target).name
        link.symlink_to(target)
        write(link)
        assert link.is_symlink()
        assert (tmp_path / target).read_bytes() == b"new"
    assert len(list((tmp_path / "far").iterdir())) == 2


@pytest.mark.parametrize("name", ["pipe.gz", "link.gz"])
def test_what_is_no_regular_file_is_written_to(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe.gz"  # no device, which a failure of this test would replace
    os.mkfifo(pipe)
    (tmp_path / "link.gz").symlink_to("pipe.gz")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / name)
        assert gzip.decompress(os.read(reader, 1000)) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_standard_output_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout is, which a failure would replace
    log = tmp_path / "log"
    log.write_bytes(b"old ")
    code = """if True:
        from pathlib import Path
        from penstock.export.files import whole_file
        with whole_file(Path("stdout")) as file:
            file.write(b"new")
        print(" end")
    """
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=file, cwd=tmp_path, timeout=60)
    assert log.read_bytes() == b"old new end\n"
    assert is_stdout(Path("/dev/stdout"))
    assert not is_stdout(log)


def test_exports_to_one_name_do_not_share_a_part(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with whole_file(path) as first:
        write(path, b"second")
        first.write(b"first")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_is_that_of_an_ordinary_file(tmp_path: Path) -> None:
    write(tmp_path / "out.csv")
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "out.csv").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
