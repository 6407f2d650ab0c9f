"""Data of several trainers: shuffled among them, and made equally many batches for each, by either of two settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.endpoints import free_endpoints
from tests.support.nursery import Forked, Nursery, all_end_well

from penstock.distributed import launch_ps
from penstock.distributed.arguments import hosts_of

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("dataset_job.py")
Start = Callable[..., list[Forked]]


@pytest.fixture
def trainers(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start trainers with so many samples each, and what each is to do."""
    made: list[Forked] = []

    def start(sizes: list[int], *asked: list[object]) -> list[Forked]:
        endpoints = free_endpoints(len(sizes))
        written(tmp_path, sizes)
        for rank in range(len(sizes)):
            environ = {"PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints), "PADDLE_TRAINER_ID": str(rank), "CPU_NUM": "1"}
            argv = [str(SCRIPT), str(tmp_path), *map(str, asked[rank % len(asked)])]
            made.append(Forked(nursery, tmp_path / f"trainer{rank}", argv, environ))
        return made

    yield start
    for process in made:
        process.close()


def written(folder: Path, sizes: list[int]) -> None:
    """Write the samples of each trainer."""
    for rank, size in enumerate(sizes):
        (folder / f"part-{rank}").write_text("".join(line(1000 * rank + n) for n in range(size)))


def sample(number: int) -> list[int]:
    """Return a number and its words."""
    return [number, *(n % 10 for n in range(number, number + 1 + number % 3))]


def line(number: int) -> str:
    words = sample(number)[1:]
    return f"1 {number} {len(words)} {' '.join(map(str, words))}\n"


def everything(sizes: list[int]) -> list[list[int]]:
    return [sample(1000 * rank + n) for rank, size in enumerate(sizes) for n in range(size)]


def left(started: list[Forked], folder: Path) -> list[Any]:
    """Return what each trainer has left; all have ended well."""
    all_end_well(started)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(started))]


@pytest.mark.parametrize("sizes", [[40, 28], [0, 50, 7]], ids=str)
def test_row_89_a_global_shuffle_gives_a_sample_to_one_trainer(
    trainers: Start, tmp_path: Path, sizes: list[int]
) -> None:
    found = left(trainers(sizes, ["shuffle", 3]), tmp_path)
    for name in ("once", "twice", "drawn"):
        each = [trainer[name] for trainer in found]
        assert sorted(row for rows in each for row in rows) == everything(sizes)
        assert max(map(len, each)) - min(map(len, each)) <= 1
        assert all(rows != sorted(rows) for rows in each)
        assert all({row[0] // 1000 for row in rows} >= {i for i, n in enumerate(sizes) if n > 7} for rows in each)
    for trainer in found:
        assert trainer["again"] == trainer["once"]  # a function of the seed, also by way of a position
        assert trainer["looped"] == trainer["twice"] != trainer["once"]


def test_row_89_a_global_shuffle_is_over_the_workers_of_a_fleet(nursery: Nursery, tmp_path: Path) -> None:
    sizes = [20, 41]
    written(tmp_path, sizes)
    asked = ["--server_num", "1", "--worker_num", "2", "--log_dir", str(tmp_path), SCRIPT.name]
    args = launch_ps.parser().parse_args(asked)
    own = {"CPU_NUM": "1", "PENSTOCK_PS_START_S": "60", "PENSTOCK_PS_LEASE_S": "60"}
    plan = launch_ps.plan_of(args, hosts_of(None, args.node_ip), {**os.environ, **own})
    argv = [str(SCRIPT), str(tmp_path), "shuffle", "3"]
    started = [Forked(nursery, process.log, argv, {**own, **process.env}) for process in plan.processes]
    try:
        all_end_well(started)
    finally:
        for process in started:
            process.close()
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert sorted(row for trainer in found for row in trainer["once"]) == everything(sizes)
    assert sorted(len(trainer["once"]) for trainer in found) == [30, 31]
    assert [trainer["sizes"] for trainer in found] == [61, 61]
    assert all(trainer["again"] == trainer["once"] for trainer in found)


def test_a_trainer_that_diverges_fails_all_and_hangs_none(trainers: Start) -> None:
    first, second = trainers([8, 8], ["shuffle", 3], ["train", 1])
    assert first.end() != 0
    assert second.end() != 0
    assert "the ranks run different programs" in first.errors


def printed(process: Forked) -> list[list[list[int]]]:
    """Return the numbers of each batch of both passes."""
    found: list[list[list[int]]] = [[], []]
    for epoch, numbers in re.findall(r"^pass (\d)\t.*data: \[(.*)\]$", process.output, re.MULTILINE):
        found[int(epoch)].append([int(float(number)) for number in numbers.split()])
    return found


def test_row_81_short_trainers_complement_their_data_by_sampling(trainers: Start, tmp_path: Path) -> None:
    started = trainers([40, 26], ["train", 0])
    first, second = left(started, tmp_path)
    assert first == second  # to the bit
    for rank, size in enumerate([40, 26]):
        for batches in printed(started[rank]):
            assert [len(batch) for batch in batches] == ([4] * 10 if rank == 0 else [4] * 6 + [2] + [4] * 3)
            assert [n for batch in batches for n in batch][:size] == [1000 * rank + n for n in range(size)]
        assert "without rows" not in started[rank].errors
    drawn = [n for batch in printed(started[1])[0][7:] for n in batch]
    assert len(set(drawn)) > 4
    assert all(1000 <= n < 1026 for n in drawn)


def test_row_81_a_pass_has_a_fixed_number_of_batches(trainers: Start, tmp_path: Path) -> None:
    started = trainers([40, 28], ["train", 7])
    first, second = left(started, tmp_path)
    assert first == second
    for rank, process in enumerate(started):
        for batches in printed(process):
            assert [n for batch in batches for n in batch] == [1000 * rank + n for n in range(28)]
        assert "set_batches_per_pass has ended a pass after 7 batches" in process.errors
        assert "without rows" not in process.errors
