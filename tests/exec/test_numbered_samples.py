"""DataLoader over numbered samples: batches of a sampler, as they are, in processes, for several places."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, ReaderError, SpecError
from penstock.io import Dataset

NUM = 10


class Samples(Dataset):
    """Sample i: three times i, and the process that has read it."""

    def __getitem__(self, index: int) -> Any:
        if index >= NUM:
            raise LookupError(f"no sample {index}")
        return np.full(3, index, "float64"), np.array([os.getpid()])

    def __len__(self) -> int:
        return NUM


def inputs() -> list[Any]:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        return [fluid.data("x", [None, 3]), fluid.data("process", [None, 1], "int64")]


def loader(**given: Any) -> fluid.io.DataLoader:
    return fluid.io.DataLoader(Samples(), inputs(), **given)


def rows(feeds: Iterable[Any]) -> list[list[int]]:
    return [np.asarray(feed["x"])[:, 0].astype(int).tolist() for feed in feeds]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("drop_last", "last"), [(False, [[8, 9]]), (True, [])])
def test_batches_are_in_order_and_have_the_inputs_dtype(workers: int, drop_last: bool, last: list[list[int]]) -> None:
    made = loader(batch_size=4, drop_last=drop_last, num_workers=workers)
    feeds = list(made())
    assert rows(feeds) == [[0, 1, 2, 3], [4, 5, 6, 7], *last]
    assert (len(made), np.asarray(feeds[0]["x"]).dtype) == (len(feeds), np.dtype("float32"))
    assert rows(made) == rows(feeds)  # the next pass
    processes = {process for feed in feeds for process in np.asarray(feed["process"])[:, 0]}
    assert (os.getpid() in processes, len(processes)) == ((False, 2) if workers else (True, 1))


def test_shuffled_passes_follow_numpy_s_seed() -> None:
    made = loader(batch_size=3, shuffle=True)
    np.random.seed(7)
    passes = [rows(made), rows(made)]
    assert passes[0] != passes[1]
    order = [number for numbers in passes[0] for number in numbers]
    assert sorted(order) == list(range(NUM))
    numbers = list(range(NUM))
    np.random.seed(7)
    np.random.shuffle(numbers)
    assert order == numbers


def test_a_sampler_and_a_collate_fn_of_the_script_are_used() -> None:
    sampler = fluid.io.BatchSampler(indices=(9, 1, 1), batch_size=2)
    made = loader(batch_sampler=sampler, collate_fn=lambda samples: [np.stack([2 * s[0] for s in samples]), [[0]] * 2])
    assert [np.asarray(feed["x"])[:, 0].tolist() for feed in made] == [[18, 2], [2]]


def test_with_places_an_item_has_a_feed_for_each() -> None:
    made = loader(batch_size=3, places=[fluid.CPUPlace()] * 2)
    assert [rows(item) for item in made] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9]]]
    made = loader(batch_size=4, places=[fluid.CPUPlace()] * 2)
    assert [rows(item) for item in made] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]  # the third is left out, as in Fluid


def test_lists_need_no_inputs() -> None:
    made = fluid.io.DataLoader(Samples(), places=fluid.CPUPlace(), return_list=True, batch_size=5)
    assert [[np.asarray(value).shape for value in feed] for item in made for feed in item] == [[(5, 3), (5, 1)]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_sample_names_its_cause(workers: int) -> None:
    made = loader(batch_sampler=[[0], [99]], num_workers=workers)
    with pytest.raises(ReaderError, match=r"LookupError[\s\S]*no sample 99"):
        list(made)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_values_by_name_come_whether_arrays_or_tensors(workers: int, shares: bool) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        weight = torch.ones(1, requires_grad=True)  # so that a product is no leaf, which torch does not send
        return {
            "process": np.stack([s[1] for s in samples]),
            "x": weight * torch.tensor(np.stack([s[0] for s in samples])),
        }

    made = loader(batch_size=5, collate_fn=collate, num_workers=workers, use_shared_memory=shares, timeout=20 * workers)
    feeds = list(made)
    assert rows(feeds) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert {np.asarray(feed["process"]).dtype for feed in feeds} == {np.dtype("int64")}
    lists = fluid.io.DataLoader(
        Samples(),
        return_list=True,
        batch_size=5,
        num_workers=workers,
        collate_fn=lambda s: {"a": s[0][0], "b": s[0][1]},
    )
    assert [[np.asarray(value).shape for value in feed] for feed in lists] == [[(3,), (1,)]] * 2


def raises_unsendable(samples: list[Any]) -> Any:
    class Local(Exception):
        pass

    raise Local("of a function")


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda samples: [memoryview(b"12"), [[0]]], r"\['list', 'memoryview'\] that cannot be pickled"),
        (lambda samples: {"x": np.zeros((1, 3)), "process": lambda: 0}, "'function'.* that cannot be pickled"),
        (raises_unsendable, "Local: of a function"),
    ],
)
def test_what_cannot_be_pickled_is_an_error_of_the_batch(collate: Any, said: str, shares: bool) -> None:
    made = loader(collate_fn=collate, num_workers=1, use_shared_memory=shares, timeout=20)
    with pytest.raises(ReaderError, match=said):
        list(made)


def test_a_worker_that_hangs_is_reported_after_the_timeout() -> None:
    made = loader(batch_size=5, num_workers=1, timeout=0.2, worker_init_fn=lambda number: time.sleep(1))
    with pytest.raises(ReaderError, match="timed out"):
        list(made)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="feed_list is None"):
        fluid.io.DataLoader(Samples())
    with pytest.raises(SpecError, match="__getitem__"):
        fluid.io.DataLoader(iter([]), inputs())
    with pytest.raises(SpecError, match="beside a batch_sampler"):
        loader(batch_sampler=[[0]], batch_size=2)
    with pytest.raises(SpecError, match="either dataset or indices, and got none"):
        fluid.io.BatchSampler()
    with pytest.raises(FeedError, match=r"shapes \[\(1,\), \(2,\)\]"):
        fluid.io.default_collate_fn([np.zeros(1), np.zeros(2)])
    with pytest.raises(FeedError, match=r"the data set gives 1 values; expected one for each of \['x', 'process'\]"):
        list(loader(collate_fn=lambda samples: [samples[0][0]]))


def test_a_program_trains_from_it() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 3])
        loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(x, 1) - 1.0))
        fluid.optimizer.SGD(0.01).minimize(loss)
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    compiled = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=[fluid.CPUPlace()] * 2)
    data = [(np.full(3, number / 10, "float32"),) for number in range(8)]
    made = fluid.io.DataLoader(data, [x], [fluid.CPUPlace()] * 2, batch_size=2, num_workers=1)
    losses = [
        float(np.mean(exe.run(compiled, feed=item, fetch_list=[loss], scope=scope)[0]))
        for _ in range(6)
        for item in made
    ]
    assert len(losses) == 12
    assert sum(losses[-2:]) < sum(losses[:2])
