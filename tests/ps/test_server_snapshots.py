"""Snapshots while serving: interrupted ones, damaged ones, tables that change meanwhile, other numbers of servers."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Refused, Trainer

from penstock.errors import PeerError, SpecError, Unavailable
from penstock.ps.durability.server_snapshots import ServerSnapshot, snapshots
from penstock.ps.durability.wal import AppliedIndex, log_files
from penstock.ps.persistence import recover_server, restore_from
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings

SETTINGS = ServerSettings("127.0.0.1:0", 0, 1, "async", job="j", token="t", snapshot_every_s=3600)
SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,)}
TABLES = {"t": (2, 1000)}
Start = Callable[..., tuple[ParameterServer, TorchStorage, Trainer]]


class Interrupted(Exception):
    """A crash."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[ParameterServer] = []

    def begin(**changes: Any) -> tuple[ParameterServer, TorchStorage, Trainer]:
        settings = replace(SETTINGS, state_dir=tmp_path, **changes)
        storage = TorchStorage(SHAPES, TABLES, sync=settings.mode == "sync", geo=settings.mode == "geo")
        server = ParameterServer(settings, storage)
        servers.append(server)
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        return server, storage, trainer

    yield begin
    Trainer.close_all()
    for server in servers:
        server.close()


def test_a_server_drops_old_table_rows_before_each_snapshot(tmp_path: Path) -> None:
    expired = threading.Event()

    class Noting(TorchStorage):
        def expire(self, block: str) -> int:
            super().expire(block)
            assert block not in self.inside
            expired.set()
            return 1

    storage = Noting(SHAPES, TABLES, sync=False)
    with ParameterServer(replace(SETTINGS, state_dir=tmp_path, snapshot_every_s=0.01), storage) as server:
        server.start()
        assert expired.wait(60)
    assert set(storage.expired) == {"t"}


def plain(storage: TorchStorage) -> dict[str, Any]:
    return {k: v.tolist() for k, v in storage.everything().items()}


def recovered(folder: Path, *, sync: bool = False) -> TorchStorage:
    """Return what a restart would have."""
    storage = TorchStorage(SHAPES, TABLES, sync=sync)
    recover_server(
        folder, storage, AppliedIndex(trainers=1, keeps_changes=False), job="j", blocks=list(storage.blocks())
    )
    return storage


def work(trainer: Trainer, first: int, num: int = 3) -> None:
    """Push a few steps."""
    for step in range(first, first + num):
        trainer.push("w", step, torch.full((3, 4), float(step)))
        trainer.push("t", step, torch.ones(4, 2) * step, torch.tensor([step, step + 1, 3, 3]))


def steps_of_a_snapshot(server: ParameterServer) -> list[str]:
    """Take a snapshot; return what it did."""
    steps: list[str] = []
    server.snapshotter.at_step = steps.append
    server.snapshotter.take()
    server.snapshotter.at_step = lambda step: None
    return steps


def test_an_interrupted_snapshot_leaves_the_previous_one(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    steps = steps_of_a_snapshot(server)
    assert steps[0] == "begin"
    assert steps[-3:] == ["manifest", "rename", "parent"]
    before = snapshots(tmp_path / "0")
    for number, at in enumerate(steps):
        work(trainer, 10 * (number + 1))

        def crash(step: str, at: str = at) -> None:
            if step == at:
                raise Interrupted(at)

        server.snapshotter.at_step = crash
        with pytest.raises(Interrupted):
            server.snapshotter.take()
        assert snapshots(tmp_path / "0")[: len(before)] == before
        assert plain(recovered(tmp_path / "0")) == plain(storage)


def test_a_snapshot_that_finds_no_room_is_an_os_error(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    server.snapshotter.take()
    before = snapshots(tmp_path / "0")
    work(trainer, 10)
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most))  # a file that would be larger cannot be written
    try:
        with pytest.raises(OSError, match="cannot be written"):
            server.snapshotter.take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    assert snapshots(tmp_path / "0") == before
    assert plain(recovered(tmp_path / "0")) == plain(storage)


def test_the_log_before_the_older_of_two_snapshots_is_removed(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    for turn in range(4):
        work(trainer, 1 + 10 * turn)
        server.snapshotter.take()
        server.snapshotter.take()
    kept = snapshots(tmp_path / "0")
    assert len(kept) == 2
    assert log_files(tmp_path / "0")[0][0] == kept[0][0]
    assert plain(recovered(tmp_path / "0")) == plain(storage)


@pytest.mark.parametrize("harm", ["size", "byte", "manifest", "missing"])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(start: Start, tmp_path: Path, harm: str) -> None:
    server, storage, trainer = start()
    for turn in range(2):
        work(trainer, 1 + 10 * turn)
        server.snapshotter.take()
    work(trainer, 50)
    path = snapshots(tmp_path / "0")[-1][1]
    file = path / ("manifest.json" if harm == "manifest" else "000000.safetensors")
    data = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data[:-1] if harm == "size" else data)
    assert plain(recovered(tmp_path / "0")) == plain(storage)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_table_changing_between_parts_is_restored_bit_for_bit(start: Start, tmp_path: Path, mode: str) -> None:
    server, storage, trainer = start(mode=mode)
    step = 0

    def one_step() -> None:
        nonlocal step
        ids = torch.tensor([*range(step, step + 6), 3, 3])
        trainer.push("w", step, torch.full((3, 4), 0.5 * step))
        trainer.push("t", step, torch.full((8, 2), 0.1 * step), ids)
        if mode == "sync":
            trainer.barrier(step)
        step += 1

    for _ in range(5):
        one_step()
    server.snapshotter.at_step = lambda name: one_step() if name.endswith(".safetensors") else None
    server.snapshotter.take()
    server.snapshotter.at_step = lambda name: None
    taken = ServerSnapshot(snapshots(tmp_path / "0")[-1][1])
    assert len({item.at for item in taken.items()}) > 2, "parts were taken at different times"
    one_step()
    assert step > 8
    assert plain(recovered(tmp_path / "0", sync=mode == "sync")) == plain(storage)


def test_a_round_that_cannot_be_applied_does_not_block_restarts(start: Start, tmp_path: Path) -> None:
    def fails(block: str) -> None:
        raise SpecError("this program cannot be run any more")

    server, storage, trainer = start(mode="sync")
    trainer.push("t", 0, torch.ones(10, 2), torch.arange(10))
    trainer.barrier(0)
    before = plain(storage)
    trainer.push("t", 1, torch.ones(10, 2), torch.arange(10))
    storage.before = fails
    with pytest.raises(Refused, match="has ended"):
        trainer.barrier(1)
    with pytest.raises(SpecError, match="cannot be run any more"):
        server.wait(60)
    server.close()
    _, restored, trainer = start(mode="sync")
    assert plain(restored)["t 5"] == before["t 5"]
    assert trainer.join() == 1
    trainer.push("t", 1, torch.ones(1, 2), torch.tensor([5]))
    assert trainer.barrier(1) == 2


def test_a_storage_that_gives_tables_first_is_read_in_one_go(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    straight = TorchStorage.state
    monkeypatch.setattr(TorchStorage, "state", lambda self: reversed(list(straight(self))))
    server.snapshotter.take()
    work(trainer, 10)
    assert plain(recovered(tmp_path / "0")) == plain(storage)


def test_a_restarted_server_has_the_pending_geo_deltas(start: Start, tmp_path: Path) -> None:
    server, _, trainer = start(mode="geo", fanin=2)
    other = Trainer(f"127.0.0.1:{server.port}", 1)
    other.join()
    trainer.push("w", 1, torch.ones(1, 4), torch.tensor([2]))
    server.snapshotter.take()
    trainer.push("w", 2, torch.ones(1, 4), torch.tensor([0]))
    server.close()
    again, _, _ = start(mode="geo", fanin=2)
    other = Trainer(f"127.0.0.1:{again.port}", 1)
    with pytest.raises(Refused) as refused:
        other.changed("w")
    assert refused.value.rejoin
    other.join()
    assert other.changed("w")[0] == [0, 2]


def test_a_finished_server_starts_another_run_from_its_values(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    trainer.leave()
    assert server.wait(60)
    server.close()
    again, restored, _ = start()
    assert plain(restored) == plain(storage)
    assert not again.wait(0.6), "it waits for the new run's trainers"


def test_two_servers_of_one_folder_or_another_job_are_refused(start: Start, tmp_path: Path) -> None:
    server, _, trainer = start()
    with pytest.raises(Unavailable, match="another server uses"):
        start()
    work(trainer, 1)
    server.snapshotter.take()
    server.close()
    with pytest.raises(SpecError, match="has the state of job 'j'"):
        ParameterServer(replace(SETTINGS, state_dir=tmp_path, job="x"), TorchStorage(SHAPES, TABLES)).start()


# -- save and other numbers of servers -------------------------------------------------------------


def test_a_trainer_saves_below_the_state_folder_only(start: Start, tmp_path: Path) -> None:
    _, storage, trainer = start(save_dirs=())
    work(trainer, 1)
    (tmp_path / "out").symlink_to("/")
    for path in ["/", "..", str(tmp_path), "0", "0/x", "../x", "out/tmp", "a/../../b", "0-of-2", "x\0y"]:
        with pytest.raises(Refused):
            trainer.ask("save", path=path)
    trainer.ask("save", path="kept/first")
    trainer.ask("save", path=str(tmp_path / "kept/first"))
    other = TorchStorage(SHAPES, TABLES, sync=False)
    (tmp_path / "kept/first/0").rename(tmp_path / "snapshot.00000000000000000000")
    assert [s.cut.round for s in restore_from([tmp_path], other)] == [0]
    assert plain(other) == plain(storage)


def test_a_save_that_fails_is_refused_and_names_the_path(start: Start, tmp_path: Path) -> None:
    _, _, trainer = start(save_dirs=())
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Refused, match=f"{tmp_path}/file/0 cannot be saved: .*Not a directory"):
        trainer.ask("save", path="file", deadline_s=5)
    trainer.ask("save", path="folder")


def test_a_copy_has_the_state_at_its_request_and_blocks_nothing(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    at_cut = plain(storage)
    goes_on, names = threading.Event(), list[str]()

    def wait(step: str) -> None:
        names.append(step)
        if step == "manifest":
            assert goes_on.wait(60)

    server.snapshotter.at_step = wait
    trainer.ask("cut", path="kept")
    trainer.ask("cut", path="kept")  # its answer was lost
    work(trainer, 10)
    assert plain(storage) != at_cut
    assert not (tmp_path / "kept/0").exists()
    goes_on.set()
    for _ in range(2):
        trainer.ask("written", path="kept")
    assert names.count("begin") == 1
    other = TorchStorage(SHAPES, TABLES, sync=False)
    for item in ServerSnapshot(tmp_path / "kept/0").items():
        other.restore(item.name, item.tensors)
    assert plain(other) == at_cut
    with pytest.raises(Refused, match="another/0 is not being saved here"):
        trainer.ask("written", path="another")


def test_a_copy_that_cannot_be_written_fails_when_awaited(start: Start, tmp_path: Path) -> None:
    server, _, trainer = start()
    work(trainer, 1)

    def full(step: str) -> None:
        if step == "manifest":
            raise OSError(28, "No space left on device")

    server.snapshotter.at_step = full
    with suppress(Refused):  # if the writer has failed by then
        trainer.ask("cut", path="kept")
    with pytest.raises(Refused, match=r"kept/0 cannot be saved: .*No space left"):
        trainer.ask("written", path="kept")
    server.snapshotter.at_step = lambda step: None
    trainer.ask("cut", path="next")
    trainer.ask("written", path="next")
    assert ServerSnapshot(tmp_path / "next/0").cut.index == 0


def test_a_copy_is_replaced_in_one_step(start: Start, tmp_path: Path) -> None:
    server, _, trainer = start()
    work(trainer, 1)
    server.snapshotter.save("kept")
    kept, aside = tmp_path / "kept/0", tmp_path / "kept/replaced.0"
    at = ServerSnapshot(kept).cut.sequence
    seen: list[tuple[str, bool]] = []

    def look(step: str) -> None:
        whole = [ServerSnapshot(p).cut.sequence for p in (kept, aside) if p.exists()]
        assert at in whole
        seen.append((step, kept.exists()))

    work(trainer, 10)
    server.snapshotter.at_step = look
    server.snapshotter.save("kept")
    assert ("replace", False) in seen
    assert ServerSnapshot(kept).cut.sequence > at
    assert not aside.exists()


def test_a_crash_between_two_renames_leaves_the_snapshot_before(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start()
    work(trainer, 1)
    server.snapshotter.take()
    folder, before = tmp_path / "0", snapshots(tmp_path / "0")
    before[0][1].rename(folder / f"replaced.{before[0][1].name}")
    (folder / "unfinished.snapshot.x").mkdir()
    assert plain(recovered(folder)) == plain(storage)
    assert snapshots(folder) == before
    assert not [p for p in folder.iterdir() if p.name.startswith(("unfinished.", "replaced."))]


def test_a_restarted_server_does_not_take_a_snapshot_twice(start: Start, tmp_path: Path) -> None:
    server, _, trainer = start()
    work(trainer, 1)
    server.snapshotter.take()
    server.close()
    again = ParameterServer(replace(SETTINGS, state_dir=tmp_path), TorchStorage(SHAPES, TABLES))
    again.start()
    try:
        assert steps_of_a_snapshot(again) == []
    finally:
        again.close()


def test_more_servers_go_on_from_what_fewer_left(start: Start, tmp_path: Path) -> None:
    server, storage, trainer = start(num_servers=1)
    work(trainer, 1)
    server.snapshotter.take()
    work(trainer, 10)
    server.close()
    with pytest.raises(PeerError, match="has 6 updates after its last snapshot"):
        start(num_servers=2)
    server, storage, trainer = start(num_servers=1)
    trainer.leave()
    assert server.wait(60)
    server.close()
    again, restored, trainer = start(num_servers=2)
    assert plain(restored) == plain(storage)
    work(trainer, 1)
    again.close()
    assert plain(recovered(tmp_path / "0-of-2")) == plain(restored), "it has a state of its own now"
