"""A server takes what it keeps of a checkpoint, or says why not; in this process, without a job."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fleet.test_loading_of_saves import ENDPOINTS, Model
from tests.io.checkpoints.folders import contents, writer

import penstock as fluid
from penstock.errors import ProgramError, SpecError, UserError
from penstock.io.saves.manifest import ServersPart
from penstock.ps.durability.server_snapshots import Cut, Item, SnapshotWriter, snapshot_path
from penstock.serving.storage import ProgramStorage, prepared_storage, storage_to_serve


def checkpoint(folder: Path, model: Model) -> None:
    """Write what the two servers of a model keep."""
    made = writer(folder)
    work = made.begin(7)
    for index, storage in enumerate(model.storages):
        part = work / "servers" / f"{index}-of-2"
        part.parent.mkdir(exist_ok=True)
        snapshot = SnapshotWriter(part)
        snapshot.add([Item(name, tensors, 0) for name, tensors in storage.state()])
        snapshot.finish(Cut("job", index, "sync", 0, list(storage.blocks())), {})
    made.write(replace(contents(7, 0.5), kind="pserver", tensors={}, servers=ServersPart("servers", 2)))


def restored(folder: Path, model: Model, index: int) -> ProgramStorage:
    """Restore a server by the call that a script makes; return what it will serve."""
    program, scope = model.programs[index], model.scopes[index]
    found = fluid.io.CheckpointManager(folder, program, scope=scope).restore()
    assert found is not None
    assert (found.step, found.metric) == (7, 0.5)
    return storage_to_serve(program, scope)


def all_restored(folder: Path, model: Model) -> list[ProgramStorage]:
    """Restore all servers."""
    return [restored(folder, model, index) for index in range(len(ENDPOINTS))]


def test_servers_take_their_rows_and_serve_them(tmp_path: Path) -> None:
    saved, other = Model(seed=1), Model(seed=2)
    checkpoint(tmp_path, saved)
    assert not torch.equal(saved.value("table.block0"), other.value("table.block0"))
    for storage in all_restored(tmp_path, other):
        for block in storage.blocks():
            assert torch.equal(storage.value(block), saved.value(block)), block
    program, scope = other.programs[0], other.scopes[0]
    kept = prepared_storage(program, scope)
    assert prepared_storage(program, scope) is kept


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (lambda: Model(has_more=True), UserError, r"has 0 rows of 'more'"),
        (lambda: Model(rows=2500), UserError, r"has 2000 rows of 'table', of which this server keeps those up to"),
        (lambda: Model(is_distributed=True), ProgramError, "another program wrote it"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_program_is_refused_by_a_server(
    model: object, error: type[Exception], said: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, Model())
    other: Model = model()  # type: ignore[operator]
    with pytest.raises(error, match=said):
        all_restored(tmp_path, other)


OPTIMIZERS = {
    "sgd": lambda: fluid.optimizer.SGD(0.1), "momentum": lambda: fluid.optimizer.Momentum(0.1, 0.9),
    "adagrad": lambda: fluid.optimizer.Adagrad(0.1), "adam": lambda: fluid.optimizer.Adam(0.1),
    "slower": lambda: fluid.optimizer.Adam(fluid.layers.exponential_decay(0.02, decay_steps=3, decay_rate=0.9)),
}  # fmt: skip


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize(
    ("wrote", "restores", "said"),
    [
        ("sgd", "adam", r"has nothing beside '(w|table)', .* keeps 'adam_0.moment1.(w|table)', 'adam_0.moment2"),
        ("adam", "sgd", r"has 'adam_0.moment1.*, and this program keeps nothing: it was trained by another optimizer"),
        ("momentum", "adagrad", "has 'momentum_0.velocity.*keeps 'adagrad_0.moment"), ("adam", "slower", ""),
    ],
)  # fmt: skip
def test_what_another_optimizer_has_kept_is_refused(
    wrote: str, restores: str, said: str, is_distributed: bool, tmp_path: Path
) -> None:
    checkpoint(tmp_path, Model(is_distributed=is_distributed, optimizer=OPTIMIZERS[wrote]))
    other = Model(is_distributed=is_distributed, optimizer=OPTIMIZERS[restores])
    with pytest.raises(UserError, match=said) if said else nullcontext():
        all_restored(tmp_path, other)


def test_a_server_with_a_state_of_its_own_goes_on_from_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    model = Model()
    checkpoint(tmp_path / "saves", model)
    monkeypatch.setenv("PENSTOCK_PS_STATE_DIR", str(tmp_path / "state"))
    manager = fluid.io.CheckpointManager(tmp_path / "saves", model.programs[0], scope=model.scopes[0])
    assert manager.restore() is not None, "it has none yet"
    path = snapshot_path(tmp_path / "state" / "0-of-2", 0)
    path.parent.mkdir(parents=True)
    SnapshotWriter(path).finish(Cut("local", 0, "sync", 0, []), {})
    assert manager.restore() is None
    assert "which is newer than any checkpoint" in caplog.text


def test_servers_neither_restore_a_local_training_nor_save(tmp_path: Path) -> None:
    model = Model()
    manager = fluid.io.CheckpointManager(tmp_path, model.programs[0], scope=model.scopes[0])
    assert manager.restore() is None
    writer(tmp_path).write(contents(1))
    with pytest.raises(UserError, match="without servers"):
        manager.restore()
    with pytest.raises(SpecError, match="it only restores"):
        manager.save()
