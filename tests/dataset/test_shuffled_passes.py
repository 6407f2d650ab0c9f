"""A loop that shuffles for each pass goes on in the order that it would have had, whatever it was interrupted in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as fluid
from penstock.dataset.shuffles import Shuffles
from penstock.dataset.slots import feed_of
from penstock.errors import SpecError

ROWS, BATCH, PASSES = 23, 4, 3
Shuffle = Callable[[Any, int], None]


def loaded(folder: Path, *, loads: bool = True) -> Any:
    """Return a data set of numbers in memory, unshuffled."""
    path = folder / "part"
    path.write_text("".join(f"1 {row}\n" for row in range(ROWS)))
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        inputs = [fluid.layers.data("number", [1], dtype="int64")]
    dataset: Any = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var(inputs)
    dataset.set_batch_size(BATCH)
    dataset.set_filelist([str(path)])
    if loads:
        dataset.load_into_memory()
    return dataset


def numbers(run: Any, at_most: int = ROWS, *, closes: bool = True) -> list[int]:
    """Use so many batches, and return what is in them."""
    found: list[int] = []
    while at_most and (batch := run.take()) is not None:
        found += feed_of(batch, run.slots, {"number"})["number"].ravel().tolist()
        run.used(batch)
        at_most -= 1
    if closes:
        run.close()
    return found


def by_number(dataset: Any, number: int) -> None:
    dataset.local_shuffle(seed=100 + number)


def twice(dataset: Any, number: int) -> None:
    dataset.local_shuffle(seed=number)
    dataset.global_shuffle()  # of one process


def once(dataset: Any, number: int) -> None:
    if not number:
        dataset.local_shuffle(seed=5)


def loads_anew(dataset: Any, number: int) -> None:
    dataset.load_into_memory()
    dataset.local_shuffle(seed=number)


def drawn(dataset: Any, number: int) -> None:
    dataset.local_shuffle()


@pytest.mark.parametrize("used", [0, 2, 6])
@pytest.mark.parametrize("shuffle", [by_number, once, loads_anew, twice, drawn])
def test_a_loop_with_a_shuffle_a_pass_resumes_in_the_same_order(shuffle: Shuffle, used: int, tmp_path: Path) -> None:
    dataset = loaded(tmp_path)
    passes, within, between = [], [], []
    for number in range(PASSES):
        shuffle(dataset, number)
        run = dataset.open()
        passes.append(numbers(run, used, closes=False))
        within.append(json.loads(json.dumps(dataset.position())))
        passes[-1] += numbers(run)
        between.append(json.loads(json.dumps(dataset.between_passes())))
        assert sorted(passes[-1]) == list(range(ROWS))

    follows = shuffle not in (twice, drawn)  # seeds that were drawn are known of what has begun alone
    for number in range(PASSES):
        again = loaded(tmp_path)
        again.set_position(within[number])
        assert again.position() == within[number]
        shuffle(again, number)
        assert numbers(again.open()) == passes[number][used * BATCH :]
        for following in range(number + 1, PASSES if follows else 0):
            shuffle(again, following)
            assert numbers(again.open()) == passes[following], f"pass {following} after {number}"
    for number in range(1, PASSES):
        again = loaded(tmp_path)
        again.set_position(between[number - 1])
        shuffle(again, number)
        got = numbers(again.open())
        assert sorted(got) == list(range(ROWS))
        assert got == passes[number] or not follows


def test_shuffles_unlike_those_of_the_interrupted_pass_fail(tmp_path: Path) -> None:
    dataset = loaded(tmp_path)
    for number in range(2):
        by_number(dataset, number)
        numbers(dataset.open(), 3)
    position = dataset.position()
    again = loaded(tmp_path)
    again.set_position(position)
    with pytest.raises(SpecError, match="expected seed 101, got local_shuffle with seed 9"):
        again.local_shuffle(seed=9)
    again.local_shuffle()
    with pytest.raises(SpecError, match="has begun after 2 shuffles since the load, and this is one more"):
        again.local_shuffle()
    again.infer = numbers(again.open_for_inference())
    assert sorted(again.infer) == list(range(ROWS)), "an evaluation leaves the position"
    assert numbers(again.open()) == again.infer[12:]
    again.local_shuffle(seed=102)


def test_initial_shuffles_may_precede_or_follow_set_position(tmp_path: Path) -> None:
    def shuffle(dataset: Any) -> None:
        dataset.local_shuffle(seed=5)
        dataset.local_shuffle(seed=6)

    dataset = loaded(tmp_path)
    shuffle(dataset)
    whole = numbers(dataset.open())
    numbers(dataset.open(), 2)
    for calls in (["shuffle", "set"], ["set", "shuffle"], ["set"]):
        again = loaded(tmp_path)
        for call in calls:
            shuffle(again) if call == "shuffle" else again.set_position(dataset.position())
        assert numbers(again.open()) == whole[2 * BATCH :], calls
    again = loaded(tmp_path)
    again.set_position(dataset.position())
    with pytest.raises(SpecError, match="expected seed 5, got local_shuffle with seed 6"):
        again.local_shuffle(seed=6)


def test_global_shuffles_are_matched_by_seed_and_place() -> None:
    shuffles = Shuffles()
    shuffles.restore({"seeds": [7, [3, 1, 2], [4, 1, 2]], "before": 2, "samples": 5})
    assert shuffles.before_next() == [7, [3, 1, 2]]
    shuffles.made(7)
    assert shuffles.before_next() == [[3, 1, 2]]
    shuffles.made([3, 1, 2])
    for given, trainers in ((None, None), (4, (0, 2)), (4, (1, 3)), (5, (1, 2))):
        with pytest.raises(SpecError, match=r"expected seed 4 \(of a global_shuffle, rank 1 of 2\), got"):
            shuffles.next_seed(given, trainers)
    assert shuffles.next_seed(None, (1, 2)) == 4
    assert shuffles.next_seed(4, (1, 2)) == 4
    assert shuffles.missing() == [[4, 1, 2]]
    shuffles.made([4, 1, 2])
    assert shuffles.begin() == 5
    assert shuffles.as_position(6) == {"kind": "memory", "seeds": [7, [3, 1, 2], [4, 1, 2]], "before": 2, "samples": 6}
    assert shuffles.next_seed(8) == 8, "the next pass is the loop's own"
