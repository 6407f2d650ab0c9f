"""InMemoryDataset: the same samples whatever the number of threads, in an order that files and seeds give."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.dataset.oracle import Row, batches, dataset_of, parsed, rows

from penstock.dataset import DataError, loading
from penstock.errors import SpecError

SLOTS = [(False, 1), (True, 2), (False, 0)]


def text_of(num_lines: int) -> list[bytes]:
    return [b"1 %d 2 %d.5 1 %d %s" % (n, n, n % 3 + 1, b"9 " * (n % 3 + 1)) for n in range(num_lines)]


def loaded(folder: Path, num_lines: int = 500, threads: int = 1) -> Any:
    (folder / "part").write_bytes(b"\n".join(text_of(num_lines)))
    dataset = dataset_of([folder / "part"], SLOTS, "InMemoryDataset", batch_size=16)
    dataset.set_thread(threads)
    dataset.load_into_memory()
    return dataset


def expected(num_lines: int = 500) -> list[Row | None]:
    return [parsed(line, SLOTS) for line in text_of(num_lines)]


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_a_file_are_read_by_several_threads_in_order(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PART_BYTES", 1000)  # parts of some tens of lines
    dataset = loaded(tmp_path, threads=threads)
    assert rows(dataset) == expected()
    assert dataset.get_memory_data_size() == 500
    assert rows(dataset) == expected()  # as often as one likes


@pytest.mark.parametrize("part_bytes", range(20, 30))
def test_every_line_is_in_one_part_wherever_parts_begin(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PART_BYTES", part_bytes)
    assert rows(loaded(tmp_path, 40, 2)) == expected(40)


def test_a_bad_line_in_a_later_part_has_its_line_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PART_BYTES", 1000)
    text = text_of(500)
    text[333] = b"1 1 2 0.5 x 1 9"
    (tmp_path / "part").write_bytes(b"\n".join(text))
    dataset = dataset_of([tmp_path / "part"], SLOTS, "InMemoryDataset")
    with pytest.raises(DataError, match=r"part:334:11: value 2 of slot 'slot1' is 'x'"):
        dataset.load_into_memory()
    with pytest.raises(SpecError, match="call load_into_memory first"):
        dataset.open()
    dataset.set_bad_line_policy("skip")
    dataset.load_into_memory()
    assert [error.line for error in dataset.skipped_lines] == [334]
    assert rows(dataset) == [*expected()[:333], *expected()[334:]]


def test_row_89_a_shuffle_keeps_samples_and_follows_its_seed(tmp_path: Path) -> None:
    dataset = loaded(tmp_path)
    assert dataset.get_shuffle_data_size() == 0
    dataset.local_shuffle(seed=7)
    once = rows(dataset)
    assert once != expected()
    assert Counter(once) == Counter(expected())
    assert dataset.get_shuffle_data_size() == 500
    dataset.local_shuffle(seed=7)
    assert rows(dataset) != once  # from where it was
    again = loaded(tmp_path, threads=2)
    again.local_shuffle(seed=7)
    assert rows(again) == once
    again.local_shuffle()
    assert Counter(rows(again)) == Counter(expected())


def test_a_shuffle_moves_every_sample_as_often_to_every_place(tmp_path: Path) -> None:
    dataset = loaded(tmp_path, 4)
    places: Counter[tuple[float, int]] = Counter()
    for seed in range(4000):
        dataset.local_shuffle(seed=seed)
        places.update((row[0][0], place) for place, row in enumerate(rows(dataset)))
    assert len(places) == 16
    # Binomial(4000, 1/4) has a standard deviation of 27: eight of them.
    assert all(abs(count - 1000) < 220 for count in places.values())


def test_a_global_shuffle_of_one_process_is_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = loaded(tmp_path)
    dataset.global_shuffle(seed=3)
    shuffled = rows(dataset)
    other = loaded(tmp_path)
    other.local_shuffle(seed=3)
    assert rows(other) == shuffled
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(SpecError, match="has started 2 trainers, but they have not met"):
        other.global_shuffle()


def test_preload_and_release(tmp_path: Path) -> None:
    dataset = loaded(tmp_path)
    assert dataset.memory_bytes >= 500 * (8 + 8 + 8)
    dataset.release_memory()
    assert dataset.get_memory_data_size() == dataset.memory_bytes == 0
    with pytest.raises(SpecError, match="no samples are in memory"):
        dataset.local_shuffle()
    dataset.preload_into_memory(2)
    with pytest.raises(SpecError, match="called already"):
        dataset.preload_into_memory()
    with pytest.raises(SpecError, match="being loaded"):
        dataset.open()
    dataset.wait_preload_done()
    assert rows(dataset) == expected()
    with pytest.raises(SpecError, match="without preload_into_memory"):
        dataset.wait_preload_done()


@pytest.mark.parametrize("at_most", [0, 1, 20, 32])
def test_a_resumed_pass_over_shuffled_samples_gives_the_rest(tmp_path: Path, at_most: int) -> None:
    first = loaded(tmp_path)
    first.local_shuffle(seed=1)
    first.local_shuffle(seed=2)
    whole = rows(first)
    before = [row for batch in batches(first, at_most) for row in batch]
    position = json.loads(json.dumps(first.position()))
    second = loaded(tmp_path)
    second.set_position(position)
    assert second.position() == position
    assert before + rows(second) == whole
    assert rows(second) == whole
    third = loaded(tmp_path)
    third.local_shuffle(seed=9)
    third.set_position(position)
    with pytest.raises(SpecError, match="shuffled in another way"):
        third.open()
