"""Passes over data sets go on from checkpoints: the same bits with one thread, each sample once with several."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.io.checkpoints.folders import kills_itself, writer
from tests.property.oracle import same_bits, value

import penstock as fluid
from penstock.dataset.slots import feed_of
from penstock.errors import SpecError, UserError
from penstock.exec.dataset_pass import Saves
from penstock.io.checkpoints.fingerprint import fingerprint, normal_text
from penstock.io.checkpoints.record import RankState, rank_state
from penstock.io.checkpoints.restoring import Target, of_files, of_rank, passes_of, restore
from penstock.io.checkpoints.team import Team
from penstock.io.checkpoints.values import values_of
from penstock.io.checkpoints.writing import Contents

ROWS, BATCH = 240, 16


class Model:
    """A model that counts how often it has seen each sample; recorded anew each time."""

    def __init__(self, folder: Path) -> None:
        self.main, self.startup, self.scope = fluid.Program(seed=3), fluid.Program(seed=3), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            x = fluid.layers.data("x", [2])
            ids = fluid.layers.data("ids", [1], dtype="int64")
            seen = fluid.layers.embedding(
                ids, [ROWS, 1], is_sparse=True,
                param_attr=fluid.ParamAttr(name="seen", initializer=fluid.initializer.Constant(0.0)),
            )  # fmt: skip
            hidden = fluid.layers.dropout(fluid.layers.fc(x, 8), 0.3)
            self.loss = fluid.layers.mean(fluid.layers.fc(hidden, 1)) + seen.sum()
            fluid.optimizer.SGD(1.0).minimize(self.loss)
        self.use = [x, ids]
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)
        self.files = []
        for number in range(4):
            path = folder / f"part{number}"
            rows = range(number * ROWS // 4, (number + 1) * ROWS // 4)
            path.write_text("".join(f"2 {row / ROWS} {row % 7} 1 {row}\n" for row in rows))
            self.files.append(str(path))

    def dataset(self, kind: str, threads: int = 1) -> Any:
        """Return the data set; in memory, it is shuffled, now or ("each") for each pass."""
        dataset = fluid.DatasetFactory().create_dataset(kind.split()[0])
        dataset.set_use_var(self.use)
        dataset.set_batch_size(BATCH)
        dataset.set_thread(threads)
        dataset.set_filelist(self.files)
        if kind.startswith("InMemoryDataset"):
            dataset.load_into_memory()
            self.shuffles = "each" in kind
            if not self.shuffles:
                dataset.local_shuffle(7)
        return dataset

    shuffles = False

    def train(self, dataset: Any, folder: Path, passes: int, at_phase: Any = None, **settings: Any) -> Any:
        """Train from what there is to the end of all passes."""
        with fluid.io.CheckpointManager(folder, self.main, scope=self.scope, **settings) as manager:
            if at_phase is not None:
                manager.at_phase = at_phase
            found = manager.restore(dataset=dataset)
            for number in range(found.passes if found else 0, passes):
                if self.shuffles:
                    dataset.local_shuffle(number)
                self.exe.train_from_dataset(self.main, dataset, scope=self.scope, checkpoints=manager)
        return found

    def seen(self) -> Any:
        """How often each sample was seen: rates are 1, and each row's gradient is 1 for a sample."""
        return -value(self.scope, "seen").numpy().ravel()


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset", "InMemoryDataset each"])
def test_a_killed_pass_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = Model(tmp_path)
    whole.train(whole.dataset(kind), tmp_path / "whole", 2, every_steps=4)
    assert (whole.seen() == 2).all()

    for turn in (1, 0):  # in the second checkpoint of the first pass; in the first one after that, in the second pass
        again = Model(tmp_path)
        dataset = again.dataset(kind)

        train = partial(again.train, dataset, tmp_path / "killed", 2, every_steps=10 if turn else 6)

        def work(at_phase: Any, train: Any = train) -> Any:
            return train(at_phase=at_phase)

        assert kills_itself(work, "removal", turn=turn)
    last = Model(tmp_path)
    found = last.train(last.dataset(kind), tmp_path / "killed", 2, every_steps=4)
    assert found is not None
    assert found.passes == 1, "the first pass was over"
    for var in last.main.variables.values():
        if var.persistable:
            assert same_bits(value(last.scope, var.name), value(whole.scope, var.name)), var.name


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_a_resumed_pass_of_several_threads_has_each_sample_once(kind: str, tmp_path: Path) -> None:
    first = Model(tmp_path)
    first.train(first.dataset(kind, threads=3), tmp_path / "saves", 1, every_steps=2, keep=100)
    assert (first.seen() == 1).all()
    folders = sorted((tmp_path / "saves").glob("checkpoint.*"))
    assert len(folders) >= 4
    for folder in folders[1::2]:  # newer ones out of the way, the pass goes on from this one
        alone = tmp_path / folder.name
        alone.mkdir()
        (alone / folder.name).symlink_to(folder)
        again = Model(tmp_path)
        found = again.train(again.dataset(kind, threads=3), alone, 1)
        assert found is not None and found.passes == 0
        assert (again.seen() == 1).all(), folder


def test_what_is_saved_is_a_moment_between_all_threads_steps() -> None:
    class Manager:
        program, num_steps, at_work, saved = fluid.Program(), 0, 0, 0

        def advance(self) -> bool:
            self.num_steps += 1
            return self.num_steps % 5 == 0

        def save(self, *, position: Any = None) -> None:
            assert self.at_work == 0
            assert position == self.num_steps, "each batch that was used is counted"
            self.saved += 1

        def data_ended(self, *, position: Any) -> None: ...

        def pass_ended(self, *, position: Any = None) -> None: ...

    manager, lock = Manager(), threading.Lock()
    used = 0
    saves = Saves(manager, manager.program, lambda: used)

    def train() -> None:
        nonlocal used
        for _ in range(400):
            saves.begin()
            with lock:
                manager.at_work += 1
            with lock:
                manager.at_work -= 1
                used += 1
            saves.end(trained=True)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager.num_steps == 1600
    assert manager.saved >= 100
    with pytest.raises(SpecError, match="of another program"):
        Saves(manager, fluid.Program(), lambda: None)


def place(path: str, offset: int) -> list[Any]:
    """Return where a reader is in a file."""
    return [path, offset, offset // 10, False]


def test_files_go_to_other_readers_with_their_places() -> None:
    two = [{"kind": "files", "files": [place("a", 10), place("b", 0)]}, {"kind": "files", "files": [place("c", 30)]}]
    fresh = {"kind": "files", "files": [place("c", 0), place("a", 0)]}
    assert of_files(two, fresh) == {"kind": "files", "files": [place("c", 30), place("a", 10)]}
    with pytest.raises(UserError, match="'d' was no file"):
        of_files(two, {"kind": "files", "files": [place("d", 0)]})
    with pytest.raises(UserError, match=r"several of the 2 readers.*'a'"):
        of_files([two[0], two[0]], fresh)
    for wrong in (None, {"kind": "memory", "seeds": [], "samples": 3}):
        with pytest.raises(UserError, match="only a QueueDataset"):
            of_files([two[0], wrong], fresh)
    assert of_rank([1, 2], 1, 2) == 2
    assert of_rank([1, 2], 1, 3) is None
    assert of_rank([5, 5], 2, 3) == 5


def test_a_rank_goes_on_in_its_own_pass() -> None:
    states = [rank_state(RankState(9, 1, passes, None, {}).text(), "") for passes in (1, 3, 2)]
    assert [passes_of(states, rank, 3) for rank in range(3)] == [1, 3, 2]
    assert [passes_of(states, rank, 2) for rank in range(2)] == [1, 1], "nothing of a pass is left out"
    lost = [*states, rank_state("", "")]
    assert [passes_of(lost, rank, 4) for rank in range(4)] == [1, 3, 2, 1]
    assert passes_of([rank_state("", "")], 0, 2) == 0


def test_ranks_of_unequal_data_restore_their_own_passes(tmp_path: Path) -> None:
    model = Model(tmp_path)
    text, values = normal_text(model.main), values_of(model.main, model.scope, "collective")
    states = [RankState(8, 3, passes, None, {}).text() for passes in (1, 2)]
    writer(tmp_path / "saves").write(Contents("collective", 8, fingerprint(text), text, values, states))
    for rank in range(2):
        team = Team()
        team.rank, team.num_ranks = rank, 2  # of a job, whose ranks all read
        found = restore(tmp_path / "saves", team, Target(model.main, text, model.scope, None), strict=True)
        assert found is not None
        assert found.passes == 1 + rank


def test_one_reader_resumes_from_two_with_the_rest_of_each_file(tmp_path: Path) -> None:
    two = Model(tmp_path)
    states = []
    for files, num_batches in ((two.files[:2], 3), (two.files[2:], 5)):
        dataset = two.dataset("QueueDataset")
        dataset.set_filelist(files)
        run = dataset.open()
        for _ in range(num_batches):
            batch = run.take()
            two.exe.run(two.main, feed_of(batch, run.slots, {"x", "ids"}), [], scope=two.scope)
            run.used(batch)
        run.close()
        states.append(RankState(8, 3, 0, dataset.position(), {}).text())
    text = normal_text(two.main)
    values = values_of(two.main, two.scope, "collective")
    writer(tmp_path / "saves").write(Contents("collective", 8, fingerprint(text), text, values, states))
    assert sorted(set(two.seen())) == [0, 1]

    one = Model(tmp_path)
    found = one.train(one.dataset("QueueDataset"), tmp_path / "saves", 1)
    assert found is not None
    assert (found.step, found.position["kind"], len(found.positions)) == (8, "files", 2)
    assert (one.seen() == 1).all()


def test_a_reader_of_other_files_restores_nothing(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.train(model.dataset("QueueDataset"), tmp_path / "saves", 1, every_steps=4)
    other = Model(tmp_path)
    dataset = other.dataset("QueueDataset")
    dataset.set_filelist(other.files[:2])
    before = np.copy(other.seen())
    with pytest.raises(SpecError, match="not one of this file list"):
        other.train(dataset, tmp_path / "saves", 1)
    assert (other.seen() == before).all()
