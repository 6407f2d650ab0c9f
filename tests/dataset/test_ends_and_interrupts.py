"""However a pass ends, it ends: nobody waits for ever, nothing is lost in silence, and half a line is no line."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dataset.oracle import batches, dataset_of, drained, has_ended, rows
from tests.support.waiting import until

from penstock.dataset import DataError, loading, sources, streaming
from penstock.dataset.sources import Source, opened
from penstock.errors import SpecError

SLOTS = [(False, 1)]
KINDS = ["QueueDataset", "InMemoryDataset"]


def numbers(path: Path, count: int) -> Path:
    path.write_text("".join(f"1 {n}\n" for n in range(count)))
    return path


def piped(path: Path, command: str, kind: str = "QueueDataset", batch_size: int = 1) -> Any:
    dataset = dataset_of([path], SLOTS, kind, batch_size)
    dataset.set_pipe_command(command)
    return dataset


class FailsBetweenLooks:
    """A queue whose reader fails after somebody has waited in vain, and before it looks whether there is an end."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def pop(self, _: float) -> None:
        return None

    @property
    def finished(self) -> bool:
        self._run._error = DataError("the reader has failed", file="a", line=1, column=1, reason="bad")
        return True


def test_an_error_during_a_poll_is_not_taken_for_the_end(tmp_path: Path) -> None:
    run = dataset_of([numbers(tmp_path / "part", 3)], SLOTS).open()
    run.close()
    run._queue = FailsBetweenLooks(run)
    with pytest.raises(DataError, match="the reader has failed"):
        run.take()


@pytest.mark.timeout(60)
def test_closing_a_pass_while_a_command_starts_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    runs: list[Any] = []

    @contextlib.contextmanager
    def slowly(path: str, command: str) -> Iterator[Source]:
        with opened(path, command) as source:
            started.set()
            while not runs or not runs[0]._closed:
                time.sleep(0.01)
            yield source

    monkeypatch.setattr(streaming, "opened", slowly)
    run = piped(numbers(tmp_path / "part", 1), "exec sleep 1000").open()
    assert started.wait(30)
    runs.append(run)
    run.close()


@pytest.mark.parametrize("command", ["printf '1 1\\n1 12'; exit 3", "printf '1 1\\n1 12'; kill -9 $BASHPID"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_partial_line_of_a_failed_command_is_not_trained_on(tmp_path: Path, command: str, policy: str) -> None:
    dataset = piped(numbers(tmp_path / "part", 1), command)
    dataset.set_bad_line_policy(policy)
    seen: list[Any] = []
    with pytest.raises(DataError, match="failed with exit status"):
        seen.extend(row for batch in batches(dataset) for row in batch)
    assert seen in ([], [((1,),)])  # the 12 may be the beginning of 123
    assert dataset.num_skipped_lines == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_line_without_newline_is_read_if_the_command_ends(tmp_path: Path, kind: str) -> None:
    dataset = piped(numbers(tmp_path / "part", 1), "printf '1 1\\n1 12'", kind)
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
    assert rows(dataset) == [((1,),), ((12,),)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_background_processes_of_a_command_are_not_awaited(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_TRAILING_S", 0.3)
    dataset = piped(numbers(tmp_path / "part", 5), f"cat; sleep 1000 >&- & echo $! >{tmp_path}/pid", kind)
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
    assert rows(dataset) == [((n,),) for n in range(5)]
    pid = int((tmp_path / "pid").read_text())
    until(lambda: has_ended(pid), "the end of the background process")


def test_what_a_command_has_started_may_write_a_little_longer(tmp_path: Path) -> None:
    dataset = piped(numbers(tmp_path / "part", 5), f"tee >(sleep 0.3; cat >{tmp_path}/copy)")
    assert rows(dataset) == [((n,),) for n in range(5)]
    assert (tmp_path / "copy").read_text() == (tmp_path / "part").read_text()


def test_a_bad_command_line_is_named_with_1000_files_open(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(DataError, match=r"part:2:3: value 1 of slot 'slot0' is 'x'"):
            rows(piped(numbers(tmp_path / "part", 1), "printf '1 1\\n1 x\\n1 2\\n'"))
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path / "fifo", "a pipe or device"), (tmp_path, "a folder")):
        dataset = dataset_of([path], SLOTS, kind)
        with pytest.raises(DataError, match=f"is {what}, not a file"):
            dataset.load_into_memory() if kind == "InMemoryDataset" else rows(dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_gz_file_is_truncated_an_empty_text_is_not(tmp_path: Path, kind: str) -> None:
    for name in ("part.gz", "part"):
        (tmp_path / name).write_bytes(b"")
    dataset = dataset_of([tmp_path / "part.gz"], SLOTS, kind)
    with pytest.raises(DataError, match=r"is no whole \.gz file: it is empty"):
        dataset.load_into_memory() if kind == "InMemoryDataset" else rows(dataset)
    dataset.set_filelist([str(tmp_path / "part")])
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
    assert rows(dataset) == []


def test_a_file_that_is_cut_after_it_was_parted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = numbers(tmp_path / "part", 100)

    def cut(name: str, command: str) -> Any:
        os.truncate(path, path.stat().st_size - 5)  # whole lines: what is left is good text
        return opened(name, command)

    monkeypatch.setattr(loading, "opened", cut)
    with pytest.raises(DataError, match="was cut short while it was read"):
        dataset_of([path], SLOTS, "InMemoryDataset").load_into_memory()


def test_samples_keep_their_order_while_a_pass_is_under_way(tmp_path: Path) -> None:
    dataset = dataset_of([numbers(tmp_path / "part", 9)], SLOTS, "InMemoryDataset")
    dataset.load_into_memory()
    run = dataset.open()
    assert run.take() is not None
    with pytest.raises(SpecError, match="while a pass over them is under way"):
        dataset.local_shuffle(seed=1)
    run.close()
    dataset.local_shuffle(seed=1)
    assert sorted(rows(dataset)) == [((n,),) for n in range(9)]


def test_after_a_shuffle_the_position_is_the_next_pass(tmp_path: Path) -> None:
    dataset = dataset_of([numbers(tmp_path / "part", 9)], SLOTS, "InMemoryDataset")
    dataset.load_into_memory()
    dataset.local_shuffle(seed=1)
    assert len(rows(dataset)) == 9
    dataset.local_shuffle(seed=2)
    position = dataset.position()
    expected = rows(dataset)
    again = dataset_of([tmp_path / "part"], SLOTS, "InMemoryDataset")
    again.load_into_memory()
    again.set_position(position)
    assert rows(again) == expected


def test_progress_of_a_resumed_pass_counts_what_was_read_before(tmp_path: Path) -> None:
    dataset = dataset_of([numbers(tmp_path / "part", 10)], SLOTS, batch_size=5)
    assert len(list(batches(dataset, 1))) == 1
    dataset.set_position(dataset.position())
    run = dataset.open()
    assert drained(run) == 5
    assert run.fraction() == 1.0
    run.close()
    assert piped(tmp_path / "part", "cat -").open().fraction() is None


def test_a_batch_of_all_there_is_costs_what_is_there(tmp_path: Path) -> None:
    dataset = dataset_of([numbers(tmp_path / "part", 10)], SLOTS, batch_size=1 << 45)
    assert rows(dataset) == [((n,),) for n in range(10)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("receiver", ["main", "another thread"])
def test_an_interrupt_ends_a_load_that_waits_for_a_command(tmp_path: Path, receiver: str) -> None:
    waits = tmp_path / "waits"
    dataset = piped(numbers(tmp_path / "part", 1), f"touch {waits}; exec sleep 1000", "InMemoryDataset")
    main = threading.get_ident()

    def interrupt() -> None:
        until(waits.exists, "the load waits for its command")
        signal.pthread_kill(main if receiver == "main" else threading.get_ident(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        dataset.load_into_memory()
    interrupting.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-loader")]


_LEFT = """
import sys
from tests.dataset.oracle import dataset_of
from pathlib import Path
loading = dataset_of([Path(sys.argv[1])], [(False, 1)], "InMemoryDataset")
loading.set_pipe_command("cat; exec sleep 1000")
loading.preload_into_memory()
run = dataset_of([Path(sys.argv[1])], [(False, 1)], batch_size=1).open()
run.take()
print("the end")
"""


def test_a_process_exits_cleanly_with_a_pass_and_load_running(tmp_path: Path) -> None:
    numbers(tmp_path / "part", 300_000)
    done = subprocess.run(
        [sys.executable, "-c", _LEFT, str(tmp_path / "part")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_most", [0, 2, 3])
def test_a_resumed_pass_of_fixed_length_has_the_rest_of_batches(
    tmp_path: Path, kind: str, at_most: int, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> Any:
        dataset = dataset_of([numbers(tmp_path / "part", 20)], SLOTS, kind, batch_size=4)
        dataset.set_batches_per_pass(3)
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        return dataset

    def trained(dataset: Any, most: int = 100) -> list[int]:
        run, seen = dataset.open_for_training(), list[int]()
        for _ in range(most):
            if (batch := run.take()) is None:
                break
            seen += batch.values(0, 1, False)[:, 0].tolist()
            run.used(batch)
        run.close()
        return seen

    first, second = made(), made()
    before = trained(first, at_most)
    second.set_position(json.loads(json.dumps(first.position())))
    assert second.position() == first.position()
    assert before + trained(second) == list(range(12))
    assert trained(second) == list(range(12))  # the next pass is a whole one
    assert "set_batches_per_pass has ended a pass after 3 batches" in caplog.text
    second.set_batches_per_pass(6)
    assert len(trained(second)) == 20
    assert "asks for 6 batches in a pass, and the data has fewer" in caplog.text
