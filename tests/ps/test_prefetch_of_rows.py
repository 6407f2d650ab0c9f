"""Passes over data sets ask servers for the next batch's rows while a step runs. Servers run on threads."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.endpoints import free_endpoint
from tests.support.remotes import remotes_of_a_test
from tests.support.waiting import until

import penstock as fluid
from penstock.dataset.prefetch import RunAhead
from penstock.dataset.slots import feed_of
from penstock.errors import UserError
from penstock.exec.rows_ahead import RowsAhead
from penstock.ps.channel_requests import ChannelRequests
from penstock.ps.communicator import Communicator, remotes
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import Gradient
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage

NUM_BATCHES, ROWS, IDS_A_BATCH = 8, 4, 5
HANGS_S = 60.0


class Job:
    """One trainer whose two lookups of a table are joined, a server, and lines of ids that no two batches share."""

    def __init__(
        self, folder: Path, *, sync: bool = False, half: bool = False, distributed: bool = False, server: bool = True
    ) -> None:
        self.main, startup = fluid.Program(), fluid.Program()
        self.main.random_seed = startup.random_seed = 5
        with fluid.program_guard(self.main, startup):
            ids = [fluid.layers.data(name, [1], dtype="int64") for name in ("a", "b")]
            label = fluid.layers.data("label", [1])
            rows: list[Any] = [
                fluid.embedding(x, [100, 4], True, distributed, padding_idx=0, param_attr="table") for x in ids
            ]
            out = fluid.layers.fc(fluid.layers.concat(rows, 1), 1, param_attr="weight")
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(out, label))
            fluid.optimizer.SGD(0.1).minimize(self.loss)
        endpoint = free_endpoint()
        config = fluid.DistributeTranspilerConfig()
        config.sync_mode = sync
        config.runtime_split_send_recv = config.half_async = half
        made = fluid.DistributeTranspiler(config)
        made.transpile(0, self.main, endpoint, 1, sync_mode=sync, startup_program=startup)
        self.trainer, self.descriptor = made.get_trainer_program(), str(made.descriptor)
        self.use, self.startup, self.scope, self.exe = [*ids, label], startup, Scope(), fluid.Executor()
        self.file = folder / "lines"
        self.file.write_text("".join(self._line(n) for n in range(NUM_BATCHES * ROWS)))
        if server:
            program, begin = made.get_pserver_programs(endpoint)
            scope = Scope()
            self.exe.run(begin, scope=scope)
            self.storage = ProgramStorage(program, scope)
            mode = made.descriptor.mode
            self.server = ParameterServer(
                ServerSettings(endpoint, 0, 1, mode, start_s=HANGS_S, lease_s=20.0), self.storage
            )
            self.server.start()
            self.communicator = Communicator(self.trainer) if half else None
            if self.communicator is not None:
                self.communicator.start()
            self.exe.run(startup, scope=self.scope)

    @staticmethod
    def _line(n: int) -> str:
        first = 1 + n // ROWS * IDS_A_BATCH
        a, b = first + n % ROWS, (first + IDS_A_BATCH - 1) * (n % ROWS > 1)  # half of b is padding
        return f"1 {a} 1 {b} 1 {n % 3}.5\n"

    def dataset(self) -> Any:
        dataset = fluid.DatasetFactory().create_dataset()
        dataset.set_use_var(self.use)
        dataset.set_batch_size(ROWS)
        dataset.set_filelist([str(self.file)])
        return dataset

    def learned(self) -> dict[str, torch.Tensor]:
        ids = torch.arange(1, NUM_BATCHES * IDS_A_BATCH)
        blocks = {name: self.storage.value(name) for name in self.storage.blocks() if "table" not in name}
        (table,) = (name for name in self.storage.blocks() if "table" in name)
        return {**blocks, "table": self.storage.rows(table, ids, create=False)}

    def close(self) -> None:
        remotes.close(self.descriptor)
        self.server.close()


def feeds_of(job: Job) -> list[dict[str, Any]]:
    return [
        {"a": x[:, 1:2].astype("int64"), "b": x[:, 3:4].astype("int64"), "label": x[:, 5:].astype("float32")}
        for x in np.loadtxt(job.file).reshape(NUM_BATCHES, ROWS, 6)
    ]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_PS_START_S", "60")
    # These tests watch what Python does for a request, and make it fail there.
    monkeypatch.setattr(ProgramStorage, "is_preparable", False)
    monkeypatch.delenv("PENSTOCK_PS_STATE_DIR", raising=False)
    with remotes_of_a_test():
        yield


class Watched:
    """The batches whose rows a server was asked for, and pushes that wait for those of the next one."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._rows, self._step, self._num_steps = job.storage.rows, ChannelRequests._step, 0
        self.too_late: list[int] = []
        monkeypatch.setattr(job.storage, "rows", self.rows)
        watched, look_up = self, ChannelRequests._look_up

        def looked_up(requests: ChannelRequests, request: Any, *args: Any) -> Any:
            block, ids = request.ids()
            if not requests._state.specs[requests._names[block]].is_table:  # else `rows` is called
                watched.ask(ids)
            return look_up(requests, request, *args)

        monkeypatch.setattr(ChannelRequests, "_look_up", looked_up)

        def step(requests: ChannelRequests, *args: Any) -> Any:
            watched.wait_for_next()
            return watched._step(requests, *args)

        monkeypatch.setattr(ChannelRequests, "_step", step)

    def rows(self, block: str, ids: torch.Tensor, *, create: bool) -> torch.Tensor:
        self.ask(ids)
        return self._rows(block, ids, create=create)

    def ask(self, ids: torch.Tensor) -> None:
        with self._changed:
            self.asked.update({(int(ids.min()) - 1) // IDS_A_BATCH})
            self._changed.notify_all()

    def wait_for_next(self) -> None:
        """At the end of a step: the rows of the next are asked for. The first cannot know where the rows are."""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if 1 <= step < NUM_BATCHES - 1:
            with self._changed:
                if not self._changed.wait_for(lambda: self.asked[step + 1] > 0, HANGS_S):
                    self.too_late.append(step)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_rows_of_the_next_batch_are_asked_for_before_a_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: bool, half: bool
) -> None:
    plain = Job(tmp_path, distributed=distributed)
    run = plain.dataset().open()
    while (batch := run.take()) is not None:
        feed = feed_of(batch, run.slots, {v.name for v in plain.trainer.feeds()})
        plain.exe.run(plain.trainer, feed=feed, scope=plain.scope)
    run.close()
    expected = plain.learned()
    plain.close()
    job = Job(tmp_path, distributed=distributed, half=half)
    watched = Watched(job, monkeypatch)
    job.exe.train_from_dataset(job.trainer, job.dataset(), scope=job.scope)
    if job.communicator is not None:
        job.communicator.stop()  # a last push may be on its way
    assert not watched.too_late
    assert watched.asked == dict.fromkeys(range(NUM_BATCHES), 1)  # and the step takes that answer
    learned = job.learned()
    assert learned.keys() == expected.keys()
    for name, value in learned.items():  # no two batches have a row in common, so nothing is older than it would be
        # Rows that repeat in a batch are summed here or there, so the last bits may differ.
        np.testing.assert_allclose(value.numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-7)
    job.close()


@pytest.mark.timeout(600)
def test_a_loop_says_its_next_feed_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    watched, ahead = Watched(job, monkeypatch), RowsAhead(job.trainer)
    for feed, following in itertools.pairwise(feeds_of(job)):
        ahead.start(following)
        job.exe.run(job.trainer, feed=feed, scope=job.scope)
    assert not watched.too_late
    assert watched.asked == dict.fromkeys(range(NUM_BATCHES), 1)
    job.close()


@pytest.mark.timeout(300)
def test_a_pass_that_ends_early_discards_prefetched_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    watched = Watched(job, monkeypatch)

    def fail(block: str, gradient: Gradient) -> None:
        if watched._num_steps == 4:
            raise UserError("enough")

    monkeypatch.setattr(job.storage, "check_room", fail)
    with pytest.raises(Exception, match="enough"):
        job.exe.train_from_dataset(job.trainer, job.dataset(), scope=job.scope)
    assert watched.asked[4] == 1
    assert not remotes.client(job.descriptor).rows._prefetcher._waiting
    job.close()


def lookups_of(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Lookups that servers answer over channels, from now on."""
    asked, look_up = Counter[str](), ChannelRequests._look_up

    def counted(requests: ChannelRequests, *args: Any) -> Any:
        asked["lookups"] += 1
        return look_up(requests, *args)

    monkeypatch.setattr(ChannelRequests, "_look_up", counted)
    return asked


@pytest.mark.timeout(600)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("distributed", [False, True])
def test_in_sync_rows_are_looked_up_when_the_round_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: bool, replicas: int
) -> None:
    """All batches have the same rows, so those of before a round would show."""
    monkeypatch.setattr(Job, "_line", staticmethod(lambda n: f"1 {1 + n % 2} 1 {3 + n % 2} 1 {n % 3}.5\n"))
    monkeypatch.setenv("CPU_NUM", str(replicas))
    asked = lookups_of(monkeypatch)

    def learned(way: str) -> list[Any]:
        job = Job(tmp_path, sync=True, distributed=distributed)
        compiled: Any = fluid.CompiledProgram(job.trainer).with_data_parallel(loss_name=job.loss.name)
        asked.clear()
        if way == "a pass":
            job.exe.train_from_dataset(compiled, job.dataset(), scope=job.scope)
        else:
            ahead = RowsAhead(job.trainer, replicas)
            for step, (feed, following) in enumerate(itertools.pairwise([*feeds_of(job), feeds_of(job)[0]])):
                if way == "ahead":
                    ahead.start(following)
                job.exe.run(compiled, feed=feed, scope=job.scope)
                if way == "ahead" and step:  # in the first step Python looks up for one replica, in the second none
                    so_far = replicas - 1 + replicas * (step + 1)
                    until(lambda so_far=so_far: asked["lookups"] == so_far)  # type: ignore[misc]
            took = replicas * (NUM_BATCHES - 2) if way == "ahead" else 0
            assert remotes.client(job.descriptor)._session.num_taken == took
        (table,) = (name for name in job.storage.blocks() if "table" in name)
        found = job.storage.rows(table, torch.arange(1, 5), create=False)
        job.close()
        return [found.tolist(), job.storage.value("weight").tolist()]

    expected = learned("alone")
    assert learned("ahead") == expected
    assert learned("a pass") == expected


@pytest.mark.timeout(300)
def test_in_sync_rows_of_an_earlier_round_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is not compiled makes a round between two compiled steps, and changes the same rows."""
    monkeypatch.setattr(Job, "_line", staticmethod(lambda n: f"1 {1 + n % 2} 1 {3 + n % 2} 1 {n % 3}.5\n"))
    monkeypatch.setenv("CPU_NUM", "1")
    asked = lookups_of(monkeypatch)

    def learned(*, ahead: bool) -> list[Any]:
        job, feeds = Job(tmp_path, sync=True), feeds_of(Job(tmp_path, server=False))
        compiled: Any = fluid.CompiledProgram(job.trainer).with_data_parallel(loss_name=job.loss.name)
        rows, losses = RowsAhead(job.trainer, 1), []
        for feed in feeds[:2]:
            job.exe.run(compiled, feed=feed, scope=job.scope)
        so_far = asked["lookups"]
        if ahead:
            rows.start(feeds[3])
        job.exe.run(compiled, feed=feeds[2], scope=job.scope)
        until(lambda: asked["lookups"] == so_far + 1 + ahead)
        other = {name: value[::-1].copy() for name, value in feeds[4].items()}  # the same rows, but not the same lookup
        job.exe.run(job.trainer, feed=other, scope=job.scope)
        losses.append(job.exe.run(compiled, feed=feeds[3], fetch_list=[job.loss], scope=job.scope)[0].item())
        assert remotes.client(job.descriptor)._session.num_taken == 0
        (table,) = (name for name in job.storage.blocks() if "table" in name)
        found = job.storage.rows(table, torch.arange(1, 5), create=False)
        job.close()
        return [losses, found.tolist(), job.storage.value("weight").tolist()]

    assert learned(ahead=True) == learned(ahead=False)


@pytest.mark.timeout(300)
def test_in_sync_a_batch_is_wanted_whole_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    asked, job = lookups_of(monkeypatch), Job(tmp_path, sync=True)
    feeds = feeds_of(job)
    compiled: Any = fluid.CompiledProgram(job.trainer).with_data_parallel(loss_name=job.loss.name)
    for feed in feeds[:2]:
        job.exe.run(compiled, feed=feed, scope=job.scope)
    client = remotes.client(job.descriptor)
    (table,) = client.rows._tables
    client.rows.begin_ahead()
    assert client.rows.prefetch_ahead(table, torch.tensor([7]))
    client.rows.begin_ahead()  # another batch replaces it
    wanted = {(n % 30, n) for n in range(100)}  # of tables and replicas: none is left out
    for ids in wanted:
        assert client.rows.prefetch_ahead(table, torch.tensor(ids))
    job.exe.run(compiled, feed=feeds[2], scope=job.scope)
    until(lambda: asked["lookups"] >= len(wanted))
    assert not client.rows.prefetch_ahead(table, torch.tensor([1])), "too late: its step may have begun"
    assert not client._session.take_next(table, torch.tensor([7]), torch.empty(1, 4))
    job.close()


def test_only_lookups_of_inputs_are_foreseen(tmp_path: Path) -> None:
    ahead = RowsAhead(Job(tmp_path, server=False).trainer)
    assert ahead
    assert ahead.inputs == {"a", "b"}
    assert not RowsAhead(Job(tmp_path, server=False).trainer, 2), "on several replicas in sync mode alone"


class Batches:
    """A pass of numbers."""

    slots, gathers = (), False

    def __init__(self, numbers: list[Any]) -> None:
        self.numbers, self.taken = numbers, 0
        self.stopped = threading.Event()

    def take(self) -> Any:
        if self.taken == len(self.numbers):
            return None
        self.taken += 1
        found = self.numbers[self.taken - 1]
        if isinstance(found, Exception):
            raise found
        if found == "wait":
            assert self.stopped.wait(HANGS_S)
            return None
        return found

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.timeout(120)
def test_one_batch_is_prefetched_and_errors_keep_their_place() -> None:
    seen: list[int] = []
    looked = threading.Semaphore(0)

    def see(batch: Any) -> None:
        seen.append(batch)
        looked.release()

    ahead: Any = RunAhead(Batches([1, 2, 3, UserError("bad")]), see)  # type: ignore[arg-type]  # numbers
    for number in (1, 2, 3):
        assert looked.acquire(timeout=HANGS_S)
        assert seen == list(range(1, number + 1)), "one is ahead, not more"
        assert ahead.take() == number
    with pytest.raises(UserError, match="bad"):
        ahead.take()
    ahead.close()


@pytest.mark.timeout(120)
def test_a_batch_that_is_waited_for_is_not_prefetched() -> None:
    seen: list[int] = []
    go_on = threading.Event()

    class Slow(Batches):
        def take(self) -> Any:
            if self.taken == 1:
                assert go_on.wait(HANGS_S)
            return super().take()

    ahead: Any = RunAhead(Slow([1, 2]), seen.append)  # type: ignore[arg-type]  # numbers
    assert ahead.take() == 1
    seen.clear()
    waits = threading.Thread(target=ahead.take)
    waits.start()
    until(lambda: ahead._is_late)
    go_on.set()
    waits.join()
    assert ahead.take() is None
    assert not seen, "its step begins at once"
    ahead.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("numbers", [[1, "wait"], [1, 2, 3], ["wait"]])
def test_a_pass_that_is_closed_leaves_no_thread(numbers: list[Any]) -> None:
    before = set(threading.enumerate())
    ahead: Any = RunAhead(Batches(numbers), lambda batch: None)  # type: ignore[arg-type]  # numbers
    if numbers[0] == 1:
        assert ahead.take() == 1
    ahead.close()
    assert not {thread for thread in threading.enumerate() if thread not in before}
