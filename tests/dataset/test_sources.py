"""Files, compressed files and commands: what fails is an error with its reason, never less data."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path

import pytest
from tests.dataset.oracle import Row, dataset_of, drained, has_ended, rows
from tests.support.waiting import until

from penstock.dataset import DataError
from penstock.errors import SpecError

SLOTS = [(False, 1), (False, 0)]


def lines(count: int) -> bytes:
    return b"".join(b"1 %d 2 %d %d\n" % (n, n + 1, n + 2) for n in range(count))


def expected(count: int) -> list[Row]:
    return [((n,), (n + 1, n + 2)) for n in range(count)]


KINDS = ["QueueDataset", "InMemoryDataset"]


def read(files: list[Path], kind: str, command: str = "cat", policy: str = "raise") -> list[Row]:
    dataset = dataset_of(files, SLOTS, kind, batch_size=64)
    dataset.set_pipe_command(command)
    dataset.set_bad_line_policy(policy)
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
    return rows(dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gz_file_is_read_like_the_text_in_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "part.gz").write_bytes(gzip.compress(lines(20_000)))
    assert read([tmp_path / "part.gz"], kind) == expected(20_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_truncated_gz_file_is_an_error_under_every_policy(tmp_path: Path, kind: str, policy: str) -> None:
    whole = gzip.compress(lines(20_000))
    (tmp_path / "part.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"part\.gz: is no whole \.gz file: Compressed file ended"):
        read([tmp_path / "part.gz"], kind, policy=policy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_flipped_gz_file_is_an_error(tmp_path: Path, kind: str) -> None:
    whole = bytearray(gzip.compress(lines(20_000)))
    whole[-6] ^= 1  # of the checksum: all lines are there
    (tmp_path / "part.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"part\.gz: is no whole \.gz file"):
        read([tmp_path / "part.gz"], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_commands_output_is_the_data_of_the_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "raw.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(5000))))
    assert read([tmp_path / "raw.gz"], kind, "awk '{print 1, $1, 2, $1 + 1, $1 + 2}'") == expected(5000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_failing_pipe_command_has_its_status_and_last_output(tmp_path: Path, kind: str, policy: str) -> None:
    (tmp_path / "part").write_bytes(lines(5000))
    with pytest.raises(DataError, match=r"failed with exit status 3; its last output: the disk is full"):
        read([tmp_path / "part"], kind, "cat; echo the disk is full >&2; exit 3", policy)


def test_a_failure_in_front_of_a_pipe_counts(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(lines(10))
    with pytest.raises(DataError, match=r"failed with exit status 1"):
        read([tmp_path / "part"], "QueueDataset", "false | cat")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_pipe_command_killed_within_a_line_names_the_signal(tmp_path: Path, kind: str, policy: str) -> None:
    (tmp_path / "part").write_bytes(lines(5000))
    with pytest.raises(DataError, match=r"failed with exit status (137|-9), signal SIGKILL"):
        read([tmp_path / "part"], kind, "head -c 5003; kill -9 $BASHPID", policy)


def test_a_pipe_command_that_is_killed_from_outside_is_named(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(lines(10))
    dataset = dataset_of([tmp_path / "part"], SLOTS, batch_size=10)
    dataset.set_pipe_command(f"cat; echo $BASHPID > {tmp_path}/pid; exec sleep 1000")
    run = dataset.open()
    try:
        assert run.take() is not None  # a whole batch is there while the command still runs
        pid = tmp_path / "pid"
        until(lambda: pid.exists() and pid.read_text().strip(), "the command is at its end")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        with pytest.raises(DataError, match="signal SIGKILL"):
            run.take()
    finally:
        run.close()


def test_a_pass_that_is_ended_early_ends_its_commands(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(lines(10))
    dataset = dataset_of([tmp_path / "part"], SLOTS, batch_size=2)
    dataset.set_pipe_command(f"echo $BASHPID > {tmp_path}/pid; cat; exec sleep 1000")
    run = dataset.open()
    assert run.take() is not None
    run.close()  # hangs if the command is waited for
    pid = int((tmp_path / "pid").read_text())
    until(lambda: has_ended(pid), "the end of the command")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_there_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"gone: cannot be opened: No such file"):
        read([tmp_path / "gone"], kind)


def test_a_file_that_vanishes_before_its_turn_is_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(lines(100_000))
    dataset = dataset_of([tmp_path / "first", tmp_path / "second"], SLOTS, batch_size=10)
    run = dataset.open()
    try:
        assert run.take() is not None  # the reader waits within the first file: its queue is full
        (tmp_path / "second").unlink()
        with pytest.raises(DataError, match=r"second: cannot be opened: No such file"):
            drained(run)
    finally:
        run.close()


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(lines(200_000))
    dataset = dataset_of([tmp_path / "part"], SLOTS, batch_size=10)
    run = dataset.open()
    try:
        assert run.take() is not None
        os.truncate(tmp_path / "part", 0)
        with pytest.raises(DataError, match="was cut short while it was read"):  # a mapping would end the process
            drained(run)
    finally:
        run.close()


def test_patterns_are_looked_up_and_remote_files_are_refused(tmp_path: Path) -> None:
    for n in (2, 1):
        (tmp_path / f"part-{n}").write_bytes(b"1 %d 1 0\n" % n)
    dataset = dataset_of([tmp_path / "part-*"], SLOTS)
    assert rows(dataset) == [((1,), (0,)), ((2,), (0,))]
    with pytest.raises(SpecError, match="no file is called"):
        dataset_of([tmp_path / "no-*"], SLOTS).open()
    dataset.set_filelist(["hdfs:/data/part"])
    with pytest.raises(SpecError, match=r"'hdfs:/data/part' is not a local path: .*set_download_cmd"):
        dataset.open()
