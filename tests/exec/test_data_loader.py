"""DataLoader: feeds from a generator or a data set; a program that takes its batches from a reader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, ReaderError, SpecError

NUM_BATCHES = 10


class Model:
    """A line through points; programs and a scope of its own."""

    def __init__(self) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = self.startup.random_seed = 3
        with fluid.program_guard(self.main, self.startup):
            x, y = fluid.layers.data("x", [3]), fluid.layers.data("y", [1])
            self.predict = fluid.layers.fc(x, 1)
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(self.predict, y))
            fluid.optimizer.SGD(0.1).minimize(self.loss)
        self.use = [x, y]
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def run(self, program: Any, **more: Any) -> float:
        return float(self.exe.run(program, fetch_list=[self.loss], scope=self.scope, **more)[0].mean())

    def runner(self, kind: str, iterations: int) -> Callable[[], float]:
        """Return what makes a run without feed, as `kind` says."""
        execution = fluid.ExecutionStrategy()
        execution.num_iteration_per_run = iterations
        if kind == "ParallelExecutor":
            executor = fluid.ParallelExecutor(
                False, self.loss.name, self.main, exec_strategy=execution, scope=self.scope
            )
            return lambda: float(executor.run([self.loss])[0].mean())
        compiled = fluid.CompiledProgram(self.main).with_data_parallel(self.loss.name, exec_strategy=execution)
        return lambda: self.run(compiled)


@pytest.fixture
def model() -> Model:
    return Model()


def batch(number: int) -> dict[str, Any]:
    x = np.random.default_rng(number).normal(size=(4, 3)).astype("float32")
    return {"x": x, "y": x.sum(1, keepdims=True)}


def batches() -> Iterator[list[Any]]:
    for number in range(NUM_BATCHES):
        yield list(batch(number).values())


def stepwise(num_replicas: int = 1) -> list[float]:
    """Return the loss of each batch, or of as many together as there are replicas, by single runs."""
    model, losses = Model(), []
    for first in range(0, NUM_BATCHES, num_replicas):
        parts = [batch(number) for number in range(first, first + num_replicas)]
        losses.append(model.run(model.main, feed={n: np.concatenate([part[n] for part in parts]) for n in "xy"}))
    return losses


def passed(run: Callable[[], float], loader: Any) -> list[float]:
    """Return what the runs of a pass have fetched."""
    found = []
    loader.start()
    try:
        while True:
            found.append(run())
    except fluid.core.EOFException:
        loader.reset()
    return found


@pytest.mark.parametrize("kind", ["ParallelExecutor", "CompiledProgram"])
@pytest.mark.parametrize("cpu_num", ["1", "2"])
def test_row_35_a_run_is_several_reader_iterations_fetching_last(
    model: Model, kind: str, cpu_num: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CPU_NUM", cpu_num)
    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2, iterable=False)
    loader.set_batch_generator(batches)
    run = model.runner(kind, 5)
    losses = stepwise(int(cpu_num))
    assert passed(run, loader) == pytest.approx(losses[4::5], rel=1e-4)
    assert len(passed(run, loader)) == len(losses[4::5])  # another pass
    assert "no effect" not in caplog.text


def test_row_35_iterations_behind_the_last_batch_are_not_made(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2, iterable=False)
    loader.set_batch_generator(batches)
    run = model.runner("CompiledProgram", 4)
    losses = stepwise()
    assert passed(run, loader) == pytest.approx([losses[3], losses[7]], rel=1e-4)
    other = Model()
    for number in range(NUM_BATCHES):  # the two that were left have been trained on
        other.run(other.main, feed=batch(number))
    name = model.main.all_parameters()[0].name
    np.testing.assert_allclose(model.scope.find_var(name), other.scope.find_var(name), rtol=1e-4)


def test_row_35_a_data_set_is_such_a_reader(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    lines = []
    for number in range(NUM_BATCHES):
        fed = batch(number)
        lines += [f"3 {' '.join(map(str, x))} 1 {y[0]}\n" for x, y in zip(fed["x"], fed["y"], strict=True)]
    (tmp_path / "part").write_text("".join(lines))
    dataset: Any = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var(model.use)
    dataset.set_batch_size(4)
    dataset.set_filelist([str(tmp_path / "part")])
    dataset.load_into_memory()
    loader = fluid.io.DataLoader.from_dataset(dataset, iterable=False)
    losses = stepwise()
    loader.start()
    model.run(model.main.clone(for_test=True))
    assert dataset.position()["samples"] == 4  # what was made ahead does not count
    loader.reset()
    assert passed(model.runner("CompiledProgram", 5), loader) == pytest.approx([losses[4], losses[9]], rel=1e-4)


def test_a_plain_program_and_its_clone_read_from_the_reader(model: Model) -> None:
    loader = fluid.io.PyReader(model.use, capacity=2, iterable=False)
    loader.decorate_batch_generator(batches)
    test = model.main.clone(for_test=True)
    assert passed(lambda: model.run(model.main), loader) == pytest.approx(stepwise(), rel=1e-4)
    assert len(passed(lambda: model.run(test), loader)) == NUM_BATCHES
    model.run(test, feed=batch(0))  # a reader that was not started leaves a run what it is fed
    with pytest.raises(SpecError, match="a DataLoader that was not started"):
        model.run(model.main)
    loader.start()
    with pytest.raises(SpecError, match="started already"):
        loader.start()
    with pytest.raises(FeedError, match="'x' is fed, and read from the program's DataLoader"):
        model.run(model.main, feed=batch(0))


@pytest.mark.parametrize("setter", ["sample", "sample_list", "batch"])
def test_an_iterable_loader_gives_feeds(model: Model, setter: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2)
    if setter == "sample":
        samples = [(x, y) for fed in map(batch, range(3)) for x, y in zip(fed["x"], fed["y"], strict=True)]
        loader.set_sample_generator(lambda: iter(samples[:11]), batch_size=4, drop_last=False)
    elif setter == "sample_list":
        loader.set_sample_list_generator(lambda: [list(zip(*batch(n).values(), strict=True)) for n in range(3)])
    else:
        loader.set_batch_generator(lambda: map(batch, range(3)))
    for _ in range(2):
        found = list(loader())
        assert [len(feed["x"]) for feed in found] == ([4, 4, 3] if setter == "sample" else [4, 4, 4])
        np.testing.assert_array_equal(found[1]["x"], batch(1)["x"])
        np.testing.assert_array_equal(found[1]["y"], batch(1)["y"])
    if setter == "sample":
        loader.set_sample_generator(lambda: iter(samples[:11]), batch_size=4)
        assert [len(feed["x"]) for feed in loader] == [4, 4]
        assert "left out 3 samples that fill no batch of 4" in caplog.text
    loader.set_batches_per_pass(1)
    assert len(list(loader)) == 1
    with pytest.raises(SpecError, match="an iterable loader is not started"):
        loader.start()


def test_row_81_reader_passes_have_a_fixed_number_of_batches(model: Model) -> None:
    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2, iterable=False)
    loader.set_batch_generator(batches)
    loader.set_batches_per_pass(7)
    assert passed(lambda: model.run(model.main), loader) == pytest.approx(stepwise()[:7], rel=1e-4)
    assert len(passed(lambda: model.run(model.main), loader)) == 7


def test_a_generators_error_ends_the_pass_after_its_batches(model: Model) -> None:
    def fails() -> Iterator[list[Any]]:
        yield list(batch(0).values())
        raise OSError("the disk is gone")

    loader = fluid.io.DataLoader.from_generator(model.use, capacity=4, iterable=False)
    loader.set_batch_generator(fails)
    loader.start()
    model.run(model.main)
    for _ in range(2):
        with pytest.raises(ReaderError, match="OSError: the disk is gone"):
            model.run(model.main)
    loader.reset()


def test_a_pass_that_is_left_ends_its_thread_and_its_generator(model: Model) -> None:
    ended, others = threading.Event(), set(threading.enumerate())

    def endless() -> Iterator[list[Any]]:
        try:
            while True:
                yield list(batch(0).values())
        finally:
            ended.set()

    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2).set_batch_generator(endless)
    for _ in loader:
        break
    assert ended.wait(60)
    until = time.monotonic() + 60
    while set(threading.enumerate()) - others:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_settings_are_checked(model: Model) -> None:
    with pytest.raises(SpecError, match="expected inputs of the program"):
        fluid.io.DataLoader.from_generator([model.predict], capacity=2)
    with pytest.raises(SpecError, match="capacity is given 0"):
        fluid.io.DataLoader.from_generator(model.use, capacity=0)
    loader = fluid.io.DataLoader.from_generator(model.use, capacity=2)
    with pytest.raises(SpecError, match="has no generator"):
        list(loader)
    loader.set_batch_generator(lambda: [[batch(0)["x"]]])
    with pytest.raises(FeedError, match=r"the generator gives 1 values; expected one for each of \['x', 'y'\]"):
        list(loader)


def test_samples_of_sequences_are_not_stacked() -> None:
    layers, main = fluid.layers, fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids, x = layers.data("ids", [1], dtype="int64", lod_level=1), layers.data("x", [1])
        pooled = layers.sequence_pool(ids.to(torch.float32), "sum") + x
        loader = fluid.io.DataLoader.from_generator([ids, x], iterable=False)
    samples, exe = [([1, 2], [0.5]), ([], [0.5]), ([3], [0.25])], fluid.Executor(fluid.CPUPlace())
    lod = fluid.create_lod_tensor([[1, 2], [], [3]], [[2, 0, 1]])
    dense = np.array([[0.5], [0.5], [0.25]], "float32")
    loader.set_sample_list_generator(lambda: iter([samples]))
    for generator in (None, loader.set_batch_generator):
        if generator is not None:
            generator(lambda: iter([(lod, dense)]))
        loader.start()
        assert exe.run(main, fetch_list=[pooled])[0].tolist() == [[3.5], [0.5], [3.25]]
        with pytest.raises(fluid.core.EOFException):
            exe.run(main, fetch_list=[pooled])
        loader.reset()


def test_the_queue_of_a_loader_counts_what_was_made(model: Model) -> None:
    made = threading.Semaphore(0)

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield batch(number)
        made.release()

    with fluid.program_guard(model.main, model.startup):
        loader = fluid.io.DataLoader.from_generator(model.use, capacity=5, iterable=False)
    loader.set_batch_generator(batches)
    assert loader.queue.size() == 0
    loader.start()
    assert made.acquire(timeout=30)
    assert loader.queue.size() >= 3
    loader.reset()
