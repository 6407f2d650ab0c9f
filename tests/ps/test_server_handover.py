"""Servers without a configured folder that are stopped, and started again at the same endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Refused, Trainer
from tests.support.waiting import until

from penstock.errors import SpecError, Unavailable
from penstock.ps import persistence
from penstock.ps.durability.server_snapshots import snapshots
from penstock.ps.handover import Handover
from penstock.ps.rounds.messages import TrainerIncarnation
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings, handover_dir
from penstock.ps.transport.local import LineServer
from penstock.serving.server import warn_of_unread

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,)}
TABLES = {"t": (2, 100)}
SETTINGS = ServerSettings("127.0.0.1:0", 0, 2, "sync", job="j", token="t", snapshot_every_s=3600)
Start = Callable[..., "Server"]


class Server:
    """One start of a server, whose trainers are of epoch 1 unless a test says otherwise."""

    def __init__(self, folder: Path, storage: TorchStorage, **changes: Any) -> None:
        self.storage = storage
        self.server = ParameterServer(replace(SETTINGS, handover_dir=folder, **changes), storage)
        self.server.start()

    def trainer(self, number: int, epoch: int = 1) -> Trainer:
        return Trainer(f"127.0.0.1:{self.server.port}", number, epoch=epoch)

    @property
    def values(self) -> dict[str, Any]:
        return {name: value.tolist() for name, value in self.storage.everything().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "penstock_state" / "127.0.0.1_1"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(storage: TorchStorage | None = None, **changes: Any) -> Server:
        sync = changes.get("mode", "sync") == "sync"
        servers.append(Server(folder, storage or TorchStorage(SHAPES, TABLES, sync=sync), **changes))
        return servers[-1]

    yield begin
    Trainer.close_all()
    for one in servers:
        one.server.close()


def gradient(block: str, trainer: int, step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * trainer + step)
    if block == "t":
        return {"rows": torch.tensor([step, 7]), "values": torch.randn(2, 2, generator=source)}
    return {"values": torch.randn(SHAPES[block], generator=source)}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60) for one in [pool.submit(call) for call in calls]]


def rounds(trainers: list[Trainer], steps: range) -> None:
    """Train in sync mode."""
    for step in steps:
        for number, trainer in enumerate(trainers):
            for block in ("w", "b", "t"):
                trainer.push(block, step, **gradient(block, number, step))
        assert at_once(*(partial(trainer.barrier, step) for trainer in trainers)) == [step + 1] * len(trainers)


def joined(server: Server, *, epoch: int = 1) -> tuple[list[Trainer], list[int]]:
    trainers = [server.trainer(number, epoch) for number in (0, 1)]
    return trainers, at_once(*(trainer.join for trainer in trainers))


def test_a_stopped_server_goes_on_with_the_trainers_it_had(start: Start, folder: Path) -> None:
    first = start()
    trainers, _ = joined(first)
    rounds(trainers, range(3))
    trainers[0].push("w", 3, **gradient("w", 0, 3))  # of a round that is open when it is stopped
    assert not folder.parent.exists(), "nothing is written before it is stopped"
    first.server.close()
    assert len(snapshots(folder)) == 1
    second = start()
    assert second.values != first.values
    trainers, at = joined(second)
    assert at == [3, 3]
    assert second.values == first.values
    assert not folder.parent.exists(), "what the updates that follow make old is removed"
    rounds(trainers, range(3, 5))
    whole = start()
    rounds(joined(whole)[0], range(5))
    assert second.values == whole.values
    for trainer in trainers:
        trainer.leave()
    assert second.server.wait(60)
    second.server.close()
    assert not folder.parent.exists(), "a job that ends leaves nothing"


def test_a_push_that_was_applied_is_not_applied_again(start: Start) -> None:
    first = start(mode="async")
    one, other = (first.trainer(number) for number in (0, 1))
    for trainer in (one, other):
        trainer.join()
    for step in (1, 2):
        one.push("t", step, **gradient("t", 0, step))
    first.server.close()
    second = start(mode="async")
    again = second.trainer(0)
    assert again.join() == 2, "its newest push that was applied"
    again.push("t", 2, **gradient("t", 0, 2))
    assert second.values == first.values
    again.push("t", 3, **gradient("t", 0, 3))
    assert second.values != first.values


def test_another_run_begins_anew_and_removes_what_was_left(start: Start, folder: Path) -> None:
    first = start()
    rounds(joined(first)[0], range(2))
    first.server.close()
    second = start()
    anew = second.values
    assert second.server._handover is not None
    second.server._handover._hold_s = 3600.0
    trainers, at = joined(second, epoch=2)  # both are replaced, so neither waits for former members
    assert at == [0, 0]
    assert second.values == anew
    assert not folder.parent.exists()
    rounds(trainers, range(2))
    assert second.values == first.values


def test_a_new_trainer_waits_for_one_that_was_a_member(start: Start) -> None:
    first = start()
    rounds(joined(first)[0], range(2))
    first.server.close()
    second = start()
    new, former = second.trainer(0, 2), second.trainer(1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(new.join)
        handover = second.server._handover
        assert handover is not None
        until(lambda: handover._new)
        assert not waits.done()
        assert former.join() == 2
        assert waits.result(60) == 2
    assert second.values == first.values


def test_a_server_that_ends_before_joins_leaves_the_state(start: Start, folder: Path) -> None:
    first = start()
    rounds(joined(first)[0], range(2))
    first.server.close()
    left = sorted(folder.iterdir())
    waiting = start()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(waiting.trainer(0, 2).join)
        handover = waiting.server._handover
        assert handover is not None
        until(lambda: handover._new)
        waiting.server.close()
        with pytest.raises(Unavailable):
            waits.result(60)
    assert sorted(folder.iterdir()) == left
    third = start()
    assert joined(third)[1] == [2, 2]
    assert third.values == first.values


def test_the_state_of_other_blocks_ends_the_server_alone(start: Start, folder: Path) -> None:
    first = start()
    joined(first)
    first.server.close()
    other = start(TorchStorage({"w": (3, 4)}, {}, sync=True))
    with pytest.raises(Unavailable):
        other.trainer(0).join()
    with pytest.raises(SpecError, match="has the state of job 'j' with the blocks w, b, t"):
        other.server.wait(60)
    other.server.close()
    assert len(snapshots(folder)) == 1


def test_nothing_is_left_for_trainers_that_have_ended(start: Start, folder: Path) -> None:
    first = start()
    trainers, _ = joined(first)
    rounds(trainers, range(1))
    for trainer in trainers:  # without leaving
        trainer.client.close()
    until(lambda: not any(isinstance(one, LineServer) and one.num_clients for one in first.server._transports))
    first.server.close()
    assert not folder.parent.exists()
    second = start()
    over_grpc = Trainer(f"127.0.0.1:{second.server.port}", 0, local=False, epoch=1)
    over_grpc.join()
    over_grpc.client.close()
    second.server.close()
    assert len(snapshots(folder)) == 1, "over gRPC a server does not know whether a trainer has ended"


class Failing(TorchStorage):
    """Its updates fail in the middle of a round."""

    def update_all(self, gradients: Any) -> None:
        self.values["w"] += 1
        raise RuntimeError("half done")


def test_a_round_that_failed_half_done_is_not_left(start: Start, folder: Path) -> None:
    broken = start(Failing(SHAPES, TABLES, sync=True))
    trainers, _ = joined(broken)
    for number, trainer in enumerate(trainers):
        trainer.push("w", 0, **gradient("w", number, 0))
    with pytest.raises(Unavailable):
        at_once(*(partial(trainer.barrier, 0) for trainer in trainers))
    broken.server._failure = None  # as if a signal had come between the update and its report
    broken.server.close()
    assert not folder.parent.exists()


def test_a_folder_that_cannot_be_written_is_reported(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("no folder")
    first = start()
    trainers, _ = joined(first)
    rounds(trainers, range(1))
    first.server.close()
    assert "cannot be used" in caplog.text
    assert f"{folder.parent} is no folder" in caplog.text
    folder.parent.unlink()
    caplog.clear()
    second = start()
    joined(second)

    def full(step: str) -> None:
        if step == "manifest":
            raise OSError("the disk is full")

    second.server.snapshotter.at_step = full
    second.server.close()
    (failed,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the disk is full" in failed.getMessage()
    assert not folder.parent.exists()


def test_memory_that_runs_out_is_reported(start: Start, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    joined(first)

    def full(step: str) -> None:
        if step == "manifest":
            raise RuntimeError("not enough memory")

    first.server.snapshotter.at_step = full
    first.server.close()
    (failed,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "not enough memory" in failed.getMessage()
    assert not folder.parent.exists()


def test_what_was_not_written_whole_is_removed(start: Start, folder: Path) -> None:
    first = start()
    joined(first)
    first.server.close()
    ((_, path),) = snapshots(folder)
    (path / "manifest.json").write_text(json.dumps({"body": "{}", "crc32": 0}))
    (folder / "unfinished.snapshot.1").mkdir()
    reports: list[str] = []
    handover = Handover(folder, reports.append)
    handover.look()
    assert not handover.is_open
    assert "is damaged" in reports[0]
    assert not folder.parent.exists()


def test_former_members_are_waited_for_once(start: Start, folder: Path) -> None:
    first = start()
    joined(first)
    first.server.close()
    reports: list[str] = []
    handover = Handover(folder, reports.append, hold_s=0.01)
    handover.admit(TrainerIncarnation(0, 2), lambda _: pytest.fail("it is not of this run"))
    handover.admit(TrainerIncarnation(1, 1), lambda _: pytest.fail("it comes too late"))
    assert "have not come back" in reports[0]
    assert len(reports) == 1


def test_a_join_waits_while_the_server_before_writes(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = start()
    rounds(joined(first)[0], range(2))
    is_writing, may_end = Event(), Event()

    def at_step(step: str) -> None:
        if step == "manifest":
            is_writing.set()
            assert may_end.wait(60)

    first.server.snapshotter.at_step = at_step
    with ThreadPoolExecutor(3) as pool:
        closed = pool.submit(first.server.close)
        assert is_writing.wait(60)
        second = start()  # while the first is still writing
        try:
            with pytest.raises(Unavailable):
                second.trainer(0).join()
            assert caplog.text.count("is still writing") == 1
            assert any(folder.glob("unfinished.*")), "what is being written is left alone"
        finally:
            may_end.set()
        closed.result(60)
        trainers = [second.trainer(number) for number in (0, 1)]
        assert [one.result(60) for one in [pool.submit(trainer.join) for trainer in trainers]] == [2, 2]
    assert second.values == first.values


def test_a_join_that_is_refused_decides_nothing(start: Start, folder: Path) -> None:
    first = start()
    rounds([first.trainer(0, 3), first.trainer(1, 3)], range(0))
    at_once(*(first.trainer(number, 3).join for number in (0, 1)))
    first.server.close()
    second = start()
    handover = second.server._handover
    assert handover is not None
    handover._hold_s = 0.0
    with pytest.raises(Refused, match="fanin is 2"):
        second.trainer(2, 9).join()
    with pytest.raises(Refused, match="was started again"):
        second.trainer(0, 2).join()
    assert len(snapshots(folder)) == 1
    assert second.trainer(1, 3).join() == 0
    assert second.values == first.values
    assert not folder.parent.exists()


def test_another_servers_state_is_not_removed(start: Start, folder: Path) -> None:
    first = start()
    rounds(joined(first)[0], range(1))
    second = start()  # of the same folder: nothing is there yet
    trainers, _ = joined(second, epoch=2)
    first.server.close()
    for trainer in trainers:
        trainer.leave()
    assert second.server.wait(60)
    second.server.close()
    assert len(snapshots(folder)) == 1


def test_copies_are_written_in_pieces(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "_AT_ONCE", 1)
    first = start()
    rounds(joined(first)[0], range(2))
    first.server.close()
    ((_, path),) = snapshots(folder)
    assert len(list(path.glob("*.safetensors"))) > 3
    second = start()
    joined(second)
    assert second.values == first.values


def test_a_state_that_is_not_read_is_warned_of(
    folder: Path, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    rounds(joined(first)[0], range(1))
    first.server.close()
    caplog.clear()
    monkeypatch.chdir(folder.parent.parent)
    warn_of_unread(replace(SETTINGS, endpoint="127.0.0.1:1"))
    assert not caplog.text, "no folder is configured"
    warn_of_unread(replace(SETTINGS, endpoint="127.0.0.1:1", state_dir=folder.parent / "configured"))
    assert f"{folder} is not read, because PENSTOCK_PS_STATE_DIR" in caplog.text


def test_only_servers_started_by_hand_hand_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def of(**environ: str) -> Path | None:
        return handover_dir("[::1]:6174", environ)

    assert of() == of(PENSTOCK_JOB_ID="", PENSTOCK_PS_STATE_DIR="") == tmp_path / "penstock_state" / "___1__6174"
    assert of(PENSTOCK_JOB_ID="x") is of(PENSTOCK_EPOCH="1") is of(PENSTOCK_PS_STATE_DIR="/state") is None
