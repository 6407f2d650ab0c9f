"""train_from_dataset and infer_from_dataset: one pass, to the bit with one thread, Hogwild with several."""

from __future__ import annotations

import io
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.process_state import session_of
from tests.support.waiting import until

import penstock as fluid
from penstock.dataset.slots import feed_of
from penstock.errors import OperatorError, SpecError
from penstock.exec import dataset_reports
from penstock.exec.dataset_reports import PassProgress
from penstock.telemetry.unwatched import Unwatched

NUM_IDS = 50
ROWS = 400


class Model:
    """A small click model: dense numbers, an id, words of any number; programs and a scope of its own."""

    def __init__(self, folder: Path) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = self.startup.random_seed = 3
        with fluid.program_guard(self.main, self.startup):
            dense = fluid.layers.data("dense", [3])
            ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
            words = fluid.layers.data("words", [-1, -1], dtype="int64", lod_level=1)
            label = fluid.layers.data("label", [1], dtype="int64")
            embedded = [fluid.layers.embedding(x, size=[NUM_IDS, 4], is_sparse=True) for x in (ids, words)]
            pooled = fluid.layers.sequence_pool(embedded[1], "sum")
            hidden = fluid.layers.fc(fluid.layers.concat([dense, embedded[0], pooled], 1), 8, act="relu")
            self.predict = fluid.layers.fc(hidden, 2, act="softmax")
            self.loss = fluid.layers.mean(fluid.layers.cross_entropy(self.predict, label))
            fluid.optimizer.Adam(0.05).minimize(self.loss)
        self.use = [dense, ids, words, label]
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.files = _files(folder)
        self.start()

    def start(self) -> None:
        self.exe.run(self.startup, scope=self.scope)

    def dataset(self, kind: str = "QueueDataset", threads: int = 1, batch_size: int = 32) -> Any:
        dataset = fluid.DatasetFactory().create_dataset(kind)
        dataset.set_use_var(self.use)
        dataset.set_batch_size(batch_size)
        dataset.set_thread(threads)
        dataset.set_filelist([str(file) for file in self.files])
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        return dataset

    def feeds(self, dataset: Any) -> Iterator[dict[str, Any]]:
        run = dataset.open()
        while (batch := run.take()) is not None:
            yield feed_of(batch, run.slots, {v.name for v in self.main.feeds()})
        run.close()

    def parameters(self) -> dict[str, Any]:
        names = [v.name for v in self.main.variables.values() if v.persistable]
        return {name: np.array(self.scope.find_var(name)) for name in names if self.scope.find_var(name) is not None}

    def mean_loss(self) -> float:
        test = self.main.clone(for_test=True)
        losses = [
            float(self.exe.run(test, feed=feed, fetch_list=[self.loss], scope=self.scope)[0][0])
            for feed in self.feeds(self.dataset(batch_size=ROWS))
        ]
        return float(np.mean(losses))


def _files(folder: Path) -> list[Path]:
    random = np.random.default_rng(0)
    files = [folder / f"part-{i}" for i in range(2)]
    for file in files:
        text = []
        for _ in range(ROWS // 2):
            dense, words = random.normal(size=3), random.integers(1, NUM_IDS, random.integers(1, 6))
            label = int(dense[0] + 0.2 * (words % 2 * 2 - 1).sum() > 0)
            numbers = " ".join(f"{x:.4f}" for x in dense)
            text.append(
                f"3 {numbers} 1 {random.integers(NUM_IDS)} {len(words)} {' '.join(map(str, words))} 1 {label}\n"
            )
        file.write_text("".join(text))
    return files


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
@pytest.mark.parametrize("compiled", [False, True])
def test_row_90_one_thread_equals_runs_over_the_same_batches(model: Model, kind: str, compiled: bool) -> None:
    program: Any = fluid.CompiledProgram(model.main) if compiled else model.main
    for feed in model.feeds(model.dataset(kind)):
        model.exe.run(program, feed=feed, fetch_list=[model.loss], scope=model.scope)
    expected = model.parameters()
    model.scope.set_steps(model.main, 0)
    model.start()
    assert not equal(model.parameters(), expected)
    model.exe.train_from_dataset(model.main, model.dataset(kind), scope=model.scope)
    assert equal(model.parameters(), expected)


def test_row_90_hogwild_threads_share_parameters_and_learn(model: Model) -> None:
    before = model.mean_loss()
    dataset = model.dataset("InMemoryDataset", threads=3)
    tables = {name: model.scope.find(name) for name in model.parameters()}
    for epoch in range(5):
        dataset.local_shuffle(seed=epoch)
        model.exe.train_from_dataset(model.main, dataset, scope=model.scope)
    assert model.mean_loss() < 0.6 * before
    assert all(model.scope.find(name) is tensor for name, tensor in tables.items())  # nobody trained a copy


def test_row_90_fetched_variables_are_printed_each_period(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    model.exe.train_from_dataset(
        model.main, model.dataset(), scope=model.scope,
        fetch_list=[model.loss, model.predict], fetch_info=["the loss", "predicted"], print_period=5,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (13 // 5)
    form = r"the loss\t%s\tdim: \[1\]\tdtype: float32\tdata: \[0\.\d+\]"
    assert re.fullmatch(form % re.escape(model.loss.name), lines[0])
    assert re.fullmatch(r"predicted\t\S+\tdim: \[32, 2\]\tdtype: float32\tdata: \[([0-9.e-]+ ){20}…\]", lines[1])


def test_row_90_settings_are_checked(model: Model) -> None:
    train = model.exe.train_from_dataset
    with pytest.raises(SpecError, match="dataset is None"):
        train(model.main, None)
    with pytest.raises(SpecError, match="fetch_info has 1 texts for the 2 variables"):
        train(model.main, model.dataset(), fetch_list=[model.loss, model.loss], fetch_info=["one"])
    with pytest.raises(SpecError, match="fetch_info has 0 texts for the 1 variables"):
        train(model.main, model.dataset(), fetch_list=[model.loss], fetch_info=[])
    with pytest.raises(SpecError, match="fetch_info has 1 texts for the 0 variables"):
        train(model.main, model.dataset(), fetch_info=["one"])
    with pytest.raises(SpecError, match="thread is -1"):
        train(model.main, model.dataset(), thread=-1)
    with pytest.raises(SpecError, match="print_period is 0"):
        train(model.main, model.dataset(), print_period=0)


def test_progress_is_told_to_the_jobs_page_until_all_is_read(model: Model) -> None:
    class Session(Unwatched):
        def progress(self, done: int, total: int, unit: str = "steps") -> None:
            told.append((done, total, unit))

    told: list[tuple[int, int, str]] = []
    with session_of(Session()):
        model.exe.train_from_dataset(model.main, model.dataset("InMemoryDataset", batch_size=200), scope=model.scope)
    assert len(told) >= 2
    assert told == sorted(told)
    assert told[-1] == (1000, 1000, "per mille of the data")


class Terminal(io.StringIO):
    """A stream whose reader waits."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("share", "text"), [(0.25, "25.0 % of the data, "), (None, "")])
def test_progress_is_one_line_a_second_on_a_terminal(
    share: float | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, now = Terminal(), [10.0]
    monkeypatch.setattr("sys.stderr", terminal)
    shown = PassProgress(lambda: share, shows_line=True, clock=lambda: now[0])
    for seconds in (0.5, 1.5, 0.5, 0.5):
        now[0] += seconds
        shown.trained(100)
        shown.update()
    shown.close()
    lines = [
        f"\rpenstock: {text}{samples}/s\x1b[K" for samples in ("200 samples, 100 samples", "400 samples, 133 samples")
    ]
    assert terminal.getvalue() == "".join([*lines, lines[1], "\n"])


def test_a_pass_shows_no_line_beside_what_it_prints_or_to_files(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataset_reports, "_LINE_S", 0.0)
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope)
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope, fetch_list=[model.loss])
    assert terminal.getvalue() == ""
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope)
    assert re.search(r"\rpenstock: 100.0 % of the data, 400 samples, \d+ samples/s\x1b\[K\n$", terminal.getvalue())


def test_row_91_inference_changes_no_variable(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.parameters()
    for threads in (2, 1):  # the first thread prints its batches, and of two it may have none
        model.exe.infer_from_dataset(
            model.main, model.dataset(threads=threads), scope=model.scope, fetch_list=[model.loss], print_period=1
        )
        assert equal(model.parameters(), before)
    assert "data: [" in capsys.readouterr().out


def test_row_92_debug_says_where_the_time_goes(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    model.exe.train_from_dataset(model.main, model.dataset(batch_size=2), scope=model.scope, debug=True)
    said = capsys.readouterr().err
    assert len(re.findall(r"mean read time: [\d.]+ ms, IO percent: [\d.]+ %, \d+ instances/s", said)) == 2
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope, debug=True)
    assert "(thread 0, 13 batches)" in capsys.readouterr().err  # fewer than a hundred are shown at the end
    assert re.search(r"\S+: [\d.]+ us a step", said)


class Seen(fluid.FetchHandler):  # type: ignore[misc]  # loaded lazily
    """Keeps what it is given."""

    def __init__(self, variables: dict[str, Any], period_secs: float) -> None:
        super().__init__(variables, period_secs)
        self.found: list[dict[str, Any]] = []
        self.threads: set[str] = set()

    def handler(self, res_dict: dict[str, Any]) -> None:
        self.found.append(res_dict)
        self.threads.add(threading.current_thread().name)


@pytest.mark.parametrize("period_secs", [0.001, 3600.0])
def test_row_93_a_fetch_handler_is_called_each_period_and_at_end(model: Model, period_secs: float) -> None:
    seen = Seen({"loss": model.loss}, period_secs)
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope, fetch_handler=seen)
    assert len(seen.found) == 1 if period_secs > 1 else len(seen.found) >= 1
    assert seen.found[-1]["loss"].shape == (1,)
    assert seen.threads == {"penstock-fetch-handler"}


def test_a_fetch_handler_of_a_name_is_refused() -> None:
    with pytest.raises(SpecError, match=r"such as \{'loss': loss\}; got 'fc_0.tmp_0'"):
        fluid.FetchHandler("fc_0.tmp_0")


def test_a_fetch_handler_is_called_while_a_pass_runs(model: Model, tmp_path: Path) -> None:
    called = tmp_path / "called"

    class Touches(Seen):
        def handler(self, res_dict: dict[str, Any]) -> None:
            super().handler(res_dict)
            called.touch()

    dataset, seen = model.dataset(), Touches({"loss": model.loss}, 0.01)
    dataset.set_pipe_command(f"for i in $(seq 6000); do [ -e {called} ] && break; sleep 0.01; done; cat")
    model.exe.train_from_dataset(model.main, dataset, scope=model.scope, fetch_handler=seen)
    assert [seen.found[0]["loss"] is None, seen.found[-1]["loss"] is None] == [True, False]


def test_a_pass_that_cannot_begin_leaves_no_thread(model: Model) -> None:
    dataset, before = model.dataset(), set(threading.enumerate())
    model.files[1].unlink()
    with pytest.raises(fluid.dataset.DataError, match="part-1: cannot be opened"):
        model.exe.train_from_dataset(
            model.main, dataset, scope=model.scope, fetch_handler=Seen({"loss": model.loss}, 3600.0)
        )
    assert not set(threading.enumerate()) - before


def test_a_handler_that_fails_does_not_end_the_training(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Seen):
        def handler(self, res_dict: dict[str, Any]) -> None:
            raise ValueError("no")

    model.exe.train_from_dataset(
        model.main, model.dataset(), scope=model.scope, fetch_handler=Failing({"loss": model.loss}, 0.001)
    )
    assert "the fetch handler failed and is not called again: ValueError('no')" in caplog.text


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_a_step_ends_the_pass_and_names_the_operator(model: Model, threads: int) -> None:
    model.files[1].write_text(f"3 0 0 0 1 {NUM_IDS} 1 1 1 0\n" * 10)
    before = set(threading.enumerate())
    with pytest.raises(OperatorError, match="lookup_table"):
        model.exe.train_from_dataset(model.main, model.dataset(threads=threads), scope=model.scope)
    begun = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in begun if "hogwild" in name or "reader" in name]


@pytest.mark.timeout(120)
def test_an_error_of_a_step_ends_the_pass_of_waiting_threads(model: Model) -> None:
    for file in model.files:
        file.write_text(f"3 0 0 0 1 {NUM_IDS} 1 1 1 0\n" * 4)
    dataset = model.dataset(threads=2, batch_size=3)
    dataset.set_pipe_command("cat; exec sleep 1000")
    with pytest.raises(OperatorError, match="lookup_table"):
        model.exe.train_from_dataset(model.main, dataset, scope=model.scope, thread=3)


@pytest.mark.timeout(120)
def test_an_interrupt_ends_a_pass_whose_threads_wait_for_data(model: Model, tmp_path: Path) -> None:
    dataset = model.dataset(threads=2)
    dataset.set_pipe_command(f"touch {tmp_path}/waits; exec sleep 1000")
    main = threading.get_ident()

    def interrupt() -> None:
        until((tmp_path / "waits").exists, "the pass waits for its commands")
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        model.exe.train_from_dataset(model.main, dataset, scope=model.scope, thread=3)
    interrupting.join()
    assert not [thread.name for thread in threading.enumerate() if "hogwild" in thread.name]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_a_reader_ends_the_pass(model: Model, threads: int) -> None:
    model.files[1].write_text("bad\n")
    with pytest.raises(fluid.dataset.DataError, match="part-1:1:1"):
        model.exe.train_from_dataset(model.main, model.dataset(threads=threads), scope=model.scope)


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_an_interrupted_and_resumed_pass_trains_like_a_whole_one(model: Model, kind: str) -> None:
    model.exe.train_from_dataset(model.main, model.dataset(kind), scope=model.scope)
    expected = model.parameters()
    model.scope.set_steps(model.main, 0)
    model.start()
    dataset = model.dataset(kind)
    run = dataset.open()
    for _ in range(5):
        batch = run.take()
        feed = feed_of(batch, run.slots, {v.name for v in model.main.feeds()})
        model.exe.run(model.main, feed=feed, scope=model.scope)
        run.used(batch)
    run.close()
    resumed = model.dataset(kind)
    resumed.set_position(json.loads(json.dumps(dataset.position())))
    model.exe.train_from_dataset(model.main, resumed, scope=model.scope)
    assert equal(model.parameters(), expected)


def test_a_pass_ended_by_a_bad_line_resumes_like_a_whole_one(model: Model) -> None:
    model.exe.train_from_dataset(model.main, model.dataset(), scope=model.scope)
    expected = model.parameters()
    model.scope.set_steps(model.main, 0)
    model.start()
    good = model.files[1].read_text()
    model.files[1].write_text(good[: good.index("\n", 5000)] + "x\n" + good[5000:])
    dataset = model.dataset()
    with pytest.raises(fluid.dataset.DataError, match="part-1"):
        model.exe.train_from_dataset(model.main, dataset, scope=model.scope)
    position = dataset.position()
    model.files[1].write_text(good)
    dataset.set_position(position)
    model.exe.train_from_dataset(model.main, dataset, scope=model.scope)
    assert equal(model.parameters(), expected)
    assert all(ended for _, _, _, ended in dataset.position()["files"])


def test_a_compiled_program_runs_each_batch_on_its_replicas(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    compiled = fluid.CompiledProgram(model.main).with_data_parallel(loss_name=model.loss.name)
    seen = Seen({"loss": model.loss}, 3600.0)
    model.exe.train_from_dataset(compiled, model.dataset(), scope=model.scope, thread=2, fetch_handler=seen)
    assert seen.found[-1]["loss"].shape == (2,)
