"""py_reader, DataFeeder, readers in processes, feeds for places, and persistable variables that are fed."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.waiting import until

import penstock as fluid
from penstock.errors import FeedError, FetchError, ProgramError, ReaderError, SpecError

NUM_BATCHES = 3
WEIGHT = np.array([[1.0], [2.0], [3.0]], "float32")


class Line:
    """Squared error of x w against y, with w = (1, 2, 3); `reader`: of a py_reader program."""

    def __init__(self, *, reader: bool = False) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.reader: Any = None
        with fluid.program_guard(self.main, startup):
            if reader:
                self.reader = fluid.layers.double_buffer(
                    fluid.layers.py_reader(4, [(-1, 3), (-1, 1)], ["float32", "float32"], name="lines")
                )
                x, y = fluid.layers.read_file(self.reader)
            else:
                x, y = fluid.layers.data("x", [3]), fluid.layers.data("y", [1])
            predict = fluid.layers.fc(x, 1, param_attr="w", bias_attr=False)
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(predict, y))
        self.use = [x, y]
        self.exe = fluid.Executor()
        self.exe.run(startup, scope=self.scope)
        self.scope.var("w").set(WEIGHT)

    def run(self, feed: Any = None, program: Any = None) -> Any:
        return self.exe.run(program or self.main, feed=feed, fetch_list=[self.loss], scope=self.scope)[0]

    def compiled(self, places: int) -> Any:
        return fluid.CompiledProgram(self.main).with_data_parallel(places=fluid.cpu_places(places))


def rows(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.full((2, 3), number, "float32")
    return x, x @ WEIGHT + np.float32(number)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from (rows(number) for number in range(1, NUM_BATCHES + 1))


def samples() -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    yield from (list(zip(*batch, strict=True)) for batch in batches())


def passed(line: Line) -> list[float]:
    found = []
    line.reader.start()
    try:
        while True:
            found.append(float(line.run()[0]))
    except fluid.core.EOFException:
        line.reader.reset()
    return found


def test_a_program_reads_from_its_py_reader() -> None:
    line = Line(reader=True)
    assert [v.name for v in line.reader.inputs] == ["lines.slot_0", "lines.slot_1"]
    line.reader.decorate_paddle_reader(samples)
    assert passed(line) == pytest.approx([1.0, 4.0, 9.0])
    line.reader.decorate_tensor_provider(batches)
    assert passed(line) == pytest.approx([1.0, 4.0, 9.0])


def test_a_reader_that_raises_ends_the_run_with_its_error() -> None:
    def broken() -> Iterator[Any]:
        yield rows(1)
        raise OSError("the disk is gone")

    line = Line(reader=True)
    line.reader.decorate_tensor_provider(broken)
    with pytest.raises(fluid.core.EnforceNotMet, match="reader of the program has raised OSError: the disk") as raised:
        passed(line)
    assert isinstance(raised.value.__cause__, OSError)


def test_a_py_reader_needs_as_many_dtypes_as_shapes() -> None:
    with fluid.program_guard(fluid.Program()), pytest.raises(ProgramError, match="2 shapes, 1 dtypes"):
        fluid.layers.py_reader(4, [(-1, 3), (-1, 1)], ["float32"])


def loader_of(line: Line, reader: Any, **more: Any) -> Any:
    loader = fluid.io.DataLoader.from_generator(line.use, capacity=2, **more)
    return loader.set_batch_generator(reader)


def test_use_multiprocess_changes_nothing() -> None:
    seen: list[int] = []

    def here() -> Iterator[Any]:
        seen.append(os.getpid())
        for x, y in batches():
            yield x * len(seen), y * len(seen)

    line = Line()
    loader = loader_of(line, here, use_multiprocess=True)
    for number in (1, 2):
        found = [float(line.run(feed)[0]) for feed in loader()]
        assert found == pytest.approx([1.0 * number**2, 4.0 * number**2, 9.0 * number**2])
    assert seen == [os.getpid()] * 2


def refilled() -> Iterator[Any]:
    x, y = rows(1)
    for number in range(1, NUM_BATCHES + 1):
        x[:], y[:] = rows(number)
        yield x, y


def refilled_tensors() -> Iterator[Any]:
    x, y = map(torch.from_numpy, rows(1))
    for number in range(1, NUM_BATCHES + 1):
        for kept, values in zip((x, y), rows(number), strict=True):
            kept.copy_(torch.from_numpy(values))
        yield x, fluid.create_lod_tensor(y, [[1, 1]])


@pytest.mark.parametrize("made", [refilled, refilled_tensors])
def test_a_generator_may_fill_one_array_again(made: Any) -> None:
    line, full = Line(), threading.Event()

    def whole() -> Iterator[Any]:
        yield from made()
        full.set()

    loader = fluid.io.DataLoader.from_generator(line.use, capacity=NUM_BATCHES + 1).set_batch_generator(whole)
    feeds = iter(loader())
    first = next(feeds)
    assert full.wait(60), "all batches are made before the first is trained on"
    assert [float(line.run(feed)[0]) for feed in (first, *feeds)] == pytest.approx([1.0, 4.0, 9.0])


def test_a_lod_tensor_keeps_no_memory_of_its_maker() -> None:
    array, tensor = np.zeros((3, 1), "int64"), torch.zeros(3, 1)
    lengths = np.array([1, 2])
    made = [fluid.create_lod_tensor(given, [lengths]) for given in (array, tensor)]
    array[:], tensor[:], lengths[:] = 7, 7, 0
    assert [np.unique(np.array(one)).tolist() for one in made] == [[0], [0]]
    assert [one.recursive_sequence_lengths() for one in made] == [[[1, 2]]] * 2


class TwoReaders:
    """The sum of two inputs, each of its own reader."""

    def __init__(self) -> None:
        self.main, self.exe = fluid.Program(), fluid.Executor()
        with fluid.program_guard(self.main, fluid.Program()):
            inputs = [fluid.layers.data(name, [1]) for name in ("x", "y")]
            self.sum = inputs[0] + 10.0 * inputs[1]
            self.readers = [fluid.io.PyReader([one], capacity=2, iterable=False) for one in inputs]

    def gives(self, *counts: int) -> None:
        for reader, count in zip(self.readers, counts, strict=True):
            batches = [[np.full((1, 1), number, "float32")] for number in range(1, count + 1)]
            reader.decorate_batch_generator(lambda batches=batches: iter(batches))

    def run(self, feed: Any = None, program: Any = None) -> list[float]:
        found: list[float] = self.exe.run(program or self.main, feed, [self.sum])[0].reshape(-1).tolist()
        return found

    def passed(self, program: Any = None) -> list[list[float]]:
        found = []
        for reader in self.readers:
            reader.start()
        try:
            while True:
                found.append(self.run(None, program))
        except fluid.core.EOFException:
            for reader in self.readers:
                reader.reset()
        return found


def test_two_readers_of_a_program_feed_their_own_inputs() -> None:
    two = TwoReaders()
    two.gives(3, 2)
    assert two.passed() == two.passed() == [[11.0], [22.0]]
    assert two.passed(two.main.clone(for_test=True)) == [[11.0], [22.0]]


def test_two_readers_give_each_replica_a_batch() -> None:
    two = TwoReaders()
    program = fluid.CompiledProgram(two.main).with_data_parallel(places=fluid.cpu_places(2))
    two.gives(4, 4)
    assert two.passed(program) == [[11.0, 22.0], [33.0, 44.0]]
    for reader in two.readers:
        reader.drop_last = False
    two.gives(2, 1)
    with pytest.raises(FeedError, match="have 1 and 2 batches left for 2 replicas"):
        two.passed(program)


def test_a_reader_that_is_not_started_is_fed_or_missed() -> None:
    two = TwoReaders()
    two.gives(2, 2)
    two.readers[0].start()
    assert two.run({"y": np.full((1, 1), 5, "float32")}) == [51.0]
    with pytest.raises(FeedError, match="'x' is fed, and read from"):
        two.run({name: np.ones((1, 1), "float32") for name in "xy"})
    with pytest.raises(SpecError, match="was not started"):
        two.run()
    two.readers[0].reset()


def test_another_reader_of_the_same_inputs_takes_over() -> None:
    line = Line()
    for value in (1, 2):
        line.reader = fluid.io.PyReader(line.use, capacity=2, iterable=False)
        line.reader.decorate_batch_generator(lambda value=value: iter([rows(value)]))
    assert passed(line) == pytest.approx([4.0])


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [2]), (False, [2, 1])])
def test_a_loader_gives_a_feed_for_each_place(drop_last: bool, sizes: list[int]) -> None:
    line = Line()
    loader = fluid.io.DataLoader.from_generator(line.use, capacity=2, drop_last=drop_last)
    loader.set_batch_generator(batches, places=fluid.cpu_places(2))
    compiled = line.compiled(2)
    found = [line.run(feeds, compiled) for feeds in loader()]
    assert [len(losses) for losses in found] == sizes
    assert np.concatenate(found).tolist() == pytest.approx([1.0, 4.0, 9.0][: sum(sizes)])


def test_a_feeder_stacks_samples_in_the_dtype_of_the_input() -> None:
    line = Line()
    feed = fluid.DataFeeder(line.use, fluid.CPUPlace()).feed([([1, 2, 3], 14), ([0, 0, 1], [4])])
    assert {name: (np.array(value).dtype.name, value.shape()) for name, value in feed.items()} == {
        "x": ("float32", [2, 3]), "y": ("float32", [2, 1]),
    }  # fmt: skip
    assert line.run(feed).tolist() == [0.5]
    by_name = fluid.DataFeeder(["x", "y"], program=line.main).feed([(np.ones((3, 1)), 6)])
    assert line.run(by_name).tolist() == [0.0]


def test_a_feeder_refuses_samples_that_do_not_fit() -> None:
    feeder = fluid.DataFeeder(Line().use)
    with pytest.raises(FeedError, match=r"a sample has 1 values; expected one for each of \['x', 'y'\]"):
        feeder.feed([([1, 2, 3],)])
    with pytest.raises(FeedError, match=r"a sample of shape \[2\]; expected \[3\]"):
        feeder.feed([([1, 2], 3)])
    with pytest.raises(FeedError, match="'x' is given samples that make no float32 array"):
        feeder.feed([([1, 2, 3], 3), ("abc", 3)])
    with pytest.raises(FeedError, match="no samples"):
        feeder.feed([])


def test_a_feeder_gives_a_feed_for_each_place() -> None:
    line = Line()
    feeder = fluid.DataFeeder(line.use)
    two = list(feeder.feed_parallel(list(samples())[:2], 2))
    assert line.run(two, line.compiled(2)).tolist() == [1.0, 4.0]
    assert [len(feeds) for feeds in feeder.decorate_reader(samples, True, 2)()] == [2]
    assert [sorted(feed) for feed in feeder.decorate_reader(samples, False)()] == [["x", "y"]] * 3
    with pytest.raises(SpecError, match="ends with 1 batches for 2 places"):
        list(feeder.decorate_reader(samples, True, 2, drop_last=False)())


@pytest.mark.parametrize("places", [0, 1, 2])
def test_a_persistable_that_is_fed_is_set_in_the_scope(places: int) -> None:
    line = Line()
    program = line.compiled(places) if places else line.main
    feed = dict(zip("xy", rows(1), strict=True))
    before = line.run(feed, program)
    after = line.run({**feed, "w": 2 * WEIGHT}, program)
    assert np.unique(before).tolist() == [1.0]
    assert np.unique(after).tolist() == [25.0]
    assert np.unique(line.run(feed, program)).tolist() == [25.0]
    with pytest.raises(FeedError, match=r"'w' has shape \[1, 3\], but the program expects float32\[3, 1\]"):
        line.run({**feed, "w": WEIGHT.T.copy()}, program)


@pytest.mark.parametrize("places", [0, 1, 2])
def test_a_feed_that_is_refused_sets_no_persistable(places: int) -> None:
    line = Line()
    program = line.compiled(places) if places else line.main
    feed = dict(zip("xy", rows(1), strict=True))
    before = line.run(feed, program)
    refused = [{**feed, "x": np.ones((1, 7), "float32")}, {"x": feed["x"]}, {**feed, "nobody": feed["x"]}]
    for given in refused:
        with pytest.raises(FeedError):
            line.run({**given, "w": 2 * WEIGHT}, program)
    line.scope.set("w", torch.zeros(4, 1))
    with pytest.raises(FeedError, match=r"'w' has shape \[3, 1\], but the variable in the scope has \[4, 1\]"):
        line.run({**feed, "w": 2 * WEIGHT}, program)
    line.scope.set("w", torch.from_numpy(WEIGHT.copy()))
    assert line.run(feed, program).tolist() == before.tolist()


@pytest.mark.parametrize("places", [0, 1, 2])
def test_an_input_of_fixed_size_may_live_in_the_scope(places: int) -> None:
    main, scope, exe = fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        rate = fluid.data("rate", [1])
        rate.persistable = True
        product = fluid.data("x", [None, 2]) * rate
    program = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()] * places) if places else main
    x = np.ones((4, 2), "float32")
    for given in ({"rate": np.array([3.0], "float32")}, {}):
        (found,) = exe.run(program, {"x": x, **given}, [product], scope=scope)
        assert found.tolist() == (3 * x).tolist()


@pytest.mark.parametrize("places", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["double", "float32"])
def test_an_input_that_nothing_reads_is_fetched_if_fed(places: int, dtype: str) -> None:
    line = Line()
    with fluid.program_guard(line.main):
        line.use.append(fluid.layers.data("weight", [1], dtype=dtype))
    program = line.compiled(places) if places else line.main
    x, y = rows(2)
    weight = np.array([[5.0], [6.0]], line.use[2].desc.dtype)
    for _ in range(3):  # observed, then planned
        found = line.exe.run(program, {"x": x, "y": y, "weight": weight}, ["weight"], scope=line.scope)
        assert found[0].tolist() == weight.tolist()
    with pytest.raises(FetchError, match="'weight'"):
        line.exe.run(program, {"x": x, "y": y}, ["weight"], scope=line.scope)


def test_a_feed_list_is_no_longer_than_the_replicas() -> None:
    line = Line()
    feed = dict(zip("xy", rows(2), strict=True))
    assert line.run([feed], line.compiled(2)).tolist() == [4.0]
    with pytest.raises(FeedError, match="a feed list has 3 dicts, but there are 2 replicas"):
        line.run([feed] * 3, line.compiled(2))


@pytest.mark.parametrize("places", [0, 1])
@pytest.mark.filterwarnings("error")
def test_a_fetched_number_is_taken_for_a_number(places: int) -> None:
    line = Line()
    loss = line.run(dict(zip("xy", rows(2), strict=True)), line.compiled(1) if places else None)
    assert (float(loss), int(loss), f"{loss:.2f}", "%.1f" % loss) == (4.0, 4, "4.00", "4.0")  # noqa: UP031 - as scripts do
    assert repr(loss) == "array([4.], dtype=float32)"
    assert f"{loss}" == "[4.]"
    assert type(pickle.loads(pickle.dumps(loss))) is np.ndarray  # noqa: S301 - what was pickled one call before
    (several,) = line.exe.run(line.main, dict(zip("xy", rows(2), strict=True)), ["x"], scope=line.scope)
    with pytest.raises(TypeError):
        float(several)


def test_a_loader_that_returns_lists_has_one_for_each_place() -> None:
    line = Line()
    loader = fluid.io.PyReader(line.use, capacity=2, return_list=True)
    assert loader.iterable
    loader.decorate_sample_list_generator(samples, fluid.CPUPlace())
    found = [line.run(dict(zip("xy", data[0], strict=True))) for data in loader()]
    assert np.concatenate(found).tolist() == pytest.approx([1.0, 4.0, 9.0])


def test_an_iterable_loader_gives_lod_tensors_for_its_places() -> None:
    line = Line()
    loader = fluid.io.DataLoader.from_generator(line.use, capacity=2)
    loader.set_sample_list_generator(samples, places=fluid.CPUPlace())
    found = [feeds[0]["x"] for feeds in loader()]
    assert [(x.shape(), x.lod()) for x in found] == [([2, 3], [])] * 3
    assert np.array(found[2]).tolist() == rows(3)[0].tolist()
    assert all(x._place()._equals(fluid.CPUPlace()) for x in found)


def test_an_iterable_loader_gives_sequences_with_their_lengths() -> None:
    with fluid.program_guard(fluid.Program()):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
    loader = fluid.io.DataLoader.from_generator([ids], capacity=2)
    loader.set_sample_list_generator(lambda: iter([[([1, 2],), ([3],)]]), places=fluid.CPUPlace())
    ((feed,),) = list(loader())
    assert feed["ids"].recursive_sequence_lengths() == [[2, 1]]
    assert np.array(feed["ids"]).tolist() == [[1], [2], [3]]


def test_a_feeder_gives_sequences_with_their_lengths() -> None:
    with fluid.program_guard(fluid.Program()):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
    feeder = fluid.DataFeeder([ids], fluid.CPUPlace())
    fed = feeder.feed([([1, 2],), ([3],)])["ids"]
    assert (fed.lod(), fed.shape(), fed._place()) == ([[0, 2, 3]], [3, 1], fluid.CPUPlace())
    with pytest.raises(FeedError, match="'ids' is given samples that are no 1-fold nests of sequences of int64"):
        feeder.feed([(["a"],)])


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [2]), (False, [2, 1])])
def test_each_replica_takes_a_batch_of_the_reader(drop_last: bool, sizes: list[int]) -> None:
    line = Line()
    loader = fluid.io.DataLoader.from_generator(line.use, capacity=2, iterable=False, drop_last=drop_last)
    loader.set_batch_generator(batches)
    compiled, found = line.compiled(2), []
    loader.start()
    with contextlib.suppress(fluid.core.EOFException):
        while True:
            found.append(line.run(program=compiled))
    assert [len(losses) for losses in found] == sizes
    assert np.concatenate(found).tolist() == pytest.approx([1.0, 4.0, 9.0][: sum(sizes)])


def test_beside_a_reader_each_replica_is_fed_a_dict_of_its_own() -> None:
    line = Line()
    loader = fluid.io.DataLoader.from_generator(line.use[:1], capacity=2, iterable=False)
    loader.set_batch_generator(lambda: ([x] for x, _ in batches()))
    compiled = line.compiled(2)
    loader.start()
    assert line.run([{"y": rows(1)[1]}, {"y": rows(2)[1]}], compiled).tolist() == [1.0, 4.0]
    with pytest.raises(FeedError, match="'y' is fed beside a reader that gives each replica a batch: feed a list"):
        line.run({"y": rows(1)[1]}, compiled)


def test_a_script_pushes_batches_into_the_queue_of_a_reader() -> None:
    line = Line(reader=True)
    queue, found = line.reader.queue, []
    for number in (2, 3):
        pushed = fluid.LoDTensorArray()
        for value in rows(number):
            tensor = fluid.LoDTensor()
            tensor.set(value, fluid.CPUPlace())
            pushed.append(tensor)
        assert queue.push(pushed)
    assert queue.size() == 2
    queue.close()
    assert not queue.push(list(rows(4)))
    with contextlib.suppress(fluid.core.EOFException):
        while True:
            found.append(float(line.run()[0]))
    assert found == pytest.approx([4.0, 9.0])
    line.reader.reset()
    assert queue.push(list(rows(1)))
    assert line.run().tolist() == [1.0]


def test_a_push_into_a_full_queue_waits_for_a_run() -> None:
    line = Line(reader=True)
    queue = line.reader.queue
    thread = threading.Thread(target=lambda: [queue.push(list(rows(n))) for n in range(1, 7)])
    thread.start()
    until(lambda: len(queue) == 4, "a full queue")
    assert [float(line.run()[0]) for _ in range(6)] == pytest.approx([n**2 for n in range(1, 7)])
    thread.join()


def test_samples_of_different_sizes_are_refused_with_advice() -> None:
    line = Line()
    loader = fluid.io.DataLoader.from_generator(line.use, capacity=2)
    loader.set_batch_generator(lambda: iter([([[1.0], [2.0, 3.0]], rows(1)[1])]))
    with pytest.raises(
        ReaderError, match=r"samples have different sizes\. For sequences declare the input with lod_level"
    ):
        list(loader())


def test_a_py_reader_takes_the_shape_of_a_variable() -> None:
    line = Line()
    with fluid.program_guard(line.main):
        reader = fluid.layers.py_reader(2, [v.shape for v in line.use], ["float32", "float32"])
        assert [v.desc.shape[1:] for v in fluid.layers.read_file(reader)] == [(3,), (1,)]
