"""The server over a pserver program with a distributed table: recovered to the bit, whatever was updated meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exec.ps_network import HEIGHT, WIDTH, network, placement
from tests.ps.trainer_calls import Refused, Trainer
from torch import Tensor

import penstock as fluid
from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.persistence import recover_server
from penstock.ps.remote import PsMode
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import Gradient
from penstock.scope import Scope
from penstock.serving import blocks, server
from penstock.serving import staged as copies
from penstock.serving import storage as stored
from penstock.serving.storage import ProgramStorage
from penstock.transpile.partition import Partition
from penstock.transpile.pserver import pserver_program, pserver_startup


def adam() -> fluid.optimizer.Optimizer:
    return fluid.optimizer.Adam(0.05)


def decayed_adam() -> fluid.optimizer.Optimizer:
    return fluid.optimizer.Adam(fluid.layers.exponential_decay(0.05, 1, 0.5))


def storage_of(mode: PsMode, optimizer: Callable[[], fluid.optimizer.Optimizer] = adam, **kept: Any) -> ProgramStorage:
    """Return what the only server of a network with a distributed table begins with."""
    net = network(optimizer, is_sparse=True)
    main = net.main.clone()
    main.variables["table"] = replace(main.variables["table"], distributed=True, **kept)
    partition = Partition(main)
    where = placement(partition, 1)
    program = pserver_program(partition, where, where.endpoints[0], startup=net.startup, mode=mode, num_trainers=1)
    scope = Scope()
    fluid.Executor().run(pserver_startup(program, net.startup), scope=scope)
    return ProgramStorage(program, scope)


def everything(storage: ProgramStorage) -> dict[str, Any]:
    """Return all of a storage; tables row by row, since parts may be cut in any way."""
    out: dict[str, Any] = {}
    for name, tensors in storage.state():
        if "ids" in tensors:
            out |= {f"row {i}": row.tolist() for i, row in zip(tensors["ids"].tolist(), tensors["rows"], strict=True)}
        else:
            out |= {
                f"{name} {key}": t.tolist() if t.numel() < 10**6 else t.numpy().tobytes() for key, t in tensors.items()
            }
    return out


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_updates_during_a_snapshot_are_recovered_bit_for_bit(tmp_path: Path, mode: PsMode) -> None:
    storage = storage_of(mode)
    settings = ServerSettings("127.0.0.1:0", 0, 1, mode, job="j", token="t", state_dir=tmp_path)
    dense = [b for b in storage.blocks() if b != "table"]
    source = torch.Generator().manual_seed(0)
    step = 0

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float32)

    def one_step() -> None:
        nonlocal step
        for block in dense:
            trainer.push(block, step, random(*storage.value(block).shape))
        ids = torch.randint(0, 20, (20,), generator=source) * 2**58
        trainer.push("table", step, random(24, WIDTH), torch.cat([ids, torch.tensor([1, 1, 2, 3])]))
        if mode == "sync":
            trainer.barrier(step)
        step += 1

    with ParameterServer(settings, storage) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        for _ in range(3):
            one_step()
        server.snapshotter.at_step = lambda name: one_step() if name.endswith(".safetensors") else None
        server.snapshotter.take()
        one_step()
        Trainer.close_all()
    again = storage_of(mode)
    found = recover_server(
        tmp_path / "0", again, AppliedIndex(trainers=1, keeps_changes=False), job="j", blocks=list(again.blocks())
    )
    assert found.num_records
    assert everything(again) == everything(storage)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_table_refuses_new_rows_and_a_restart_recovers(tmp_path: Path, mode: PsMode) -> None:
    settings = ServerSettings("127.0.0.1:0", 0, 1, mode, job="j", token="t", state_dir=tmp_path)
    storage = storage_of(mode)

    def update(step: int, *ids: int) -> None:
        trainer.push("table", step, torch.ones(len(ids), WIDTH), torch.tensor(ids))
        if mode == "sync":
            trainer.barrier(step)

    with ParameterServer(settings, storage) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        update(0, *range(HEIGHT - 1))
        before = everything(storage)
        full = f"table 'table': the table is full: an update needs 2 new rows, but {HEIGHT - 1} of {HEIGHT} are taken"
        with pytest.raises(Refused, match=full + r".*dict_size"):
            update(1, 0, -5, 2**62)
        assert everything(storage) == before, "not even the row that there is was updated"
        Trainer.close_all()
    again = storage_of(mode)
    with ParameterServer(settings, again) as server:
        server.start()
        assert everything(again) == before
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        update(1, 0, 2**62)
        assert {f"row {2**62}"} == {n for n in everything(again) if n.startswith("row")} - before.keys()
        Trainer.close_all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ids_seen_before_a_restart_are_admitted_as_without_it(tmp_path: Path, mode: PsMode) -> None:
    settings = ServerSettings("127.0.0.1:0", 0, 1, mode, job="j", token="t", state_dir=tmp_path)
    straight, storage = (storage_of(mode, admit_after=3) for _ in range(2))
    pushes = [[1, 2**62], [1, 2**62], [1], [1, 2**62, -4]]

    def update(trainer: Trainer, step: int) -> None:
        trainer.push("table", step, torch.ones(len(pushes[step]), WIDTH), torch.tensor(pushes[step]))
        if mode == "sync":
            trainer.barrier(step)

    with ParameterServer(settings, storage) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        update(trainer, 0)
        update(trainer, 1)
        server.snapshotter.take()
        update(trainer, 2)  # it makes a row, of which only the log knows
        Trainer.close_all()
    again = storage_of(mode, admit_after=3)
    with ParameterServer(settings, again) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        update(trainer, 3)
        Trainer.close_all()
    for ids in pushes:
        if mode == "sync":
            straight.begin_round()
        straight.update("table", Gradient(torch.ones(len(ids), WIDTH), torch.tensor(ids)))
    assert {name for name in everything(again) if name.startswith("row")} == {"row 1", f"row {2**62}"}
    assert everything(again) == everything(straight)


def test_a_dense_block_refuses_wrong_rows_and_keeps_serving() -> None:
    storage = storage_of("sync")
    block = next(b for b in storage.blocks() if b != "table" and storage.value(b).dim() == 2)
    with ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "sync", job="j", token="t"), storage) as server:
        server.start()
        trainer = Trainer(f"127.0.0.1:{server.port}", 0)
        trainer.join()
        with pytest.raises(Refused, match="expected a tensor of shape"):
            trainer.push(block, 0, storage.value(block)[:1].clone(), torch.tensor([0]))
        assert trainer.barrier(0) == 1
        Trainer.close_all()


def test_an_update_of_no_rows_only_advances_the_table() -> None:
    storage = storage_of("async")
    storage.update("table", Gradient(torch.ones(1, WIDTH), torch.tensor([5])))
    before = everything(storage)
    storage.update("table", Gradient(torch.empty(0, WIDTH), torch.empty(0, dtype=torch.int64)))
    after = everything(storage)
    changed = {name for name in after if after[name] != before[name]}
    assert changed, "the step count"
    assert not any(name.startswith("row ") for name in changed)


@pytest.mark.parametrize(("most", "expected"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_updates_have_at_most_as_many_threads_as_set(
    monkeypatch: pytest.MonkeyPatch, most: int | None, expected: int
) -> None:
    for module in (stored, blocks):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    if most is not None:
        monkeypatch.setenv("FLAGS_rpc_send_thread_num", str(most))
    storage = storage_of("sync")
    dense = {b: Gradient(torch.ones_like(storage.value(b)), None) for b in storage.blocks() if b != "table"}
    seen = []

    def serve(settings: ServerSettings, served: ProgramStorage) -> None:
        served.begin_round()
        served.update_all(dense)
        assert served._plans._engine is not None
        table: Any = served._blocks["table"]
        seen.extend([served._plans._engine.num_workers, table._block._num_threads])
        assert most is None or settings.num_threads == most

    monkeypatch.setattr(server, "serve", serve)
    scope = Scope()
    scope.prepared[program := fluid.Program()] = storage
    server.serve_program(program, scope)
    assert seen == [expected, expected]


def test_blocks_beyond_the_memory_for_copies_are_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = []
    for limit in (1 << 20, 0):
        monkeypatch.setattr(copies, "MOST_BYTES", limit)
        storage = storage_of("sync")
        dense = [b for b in storage.blocks() if b != "table"]
        staged.append([storage.stage(b, Gradient(torch.ones(storage.value(b).shape))) is not None for b in dense])
    assert staged == [[True] * len(dense), [False] * len(dense)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("optimizer", [adam, decayed_adam])
def test_a_staged_update_is_the_update_to_the_bit(mode: PsMode, optimizer: Any) -> None:
    apart, whole = storage_of(mode, optimizer), storage_of(mode, optimizer)
    dense = [b for b in whole.blocks() if b != "table"]
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        gradients = {b: Gradient(torch.randn(whole.value(b).shape, generator=random)) for b in dense}
        before = everything(apart)
        staged = {block: apart.stage(block, gradient) for block, gradient in gradients.items()}
        assert everything(apart) == before, "nothing is changed"
        for storage in (apart, whole) if mode == "sync" else ():
            storage.begin_round()
        for block, gradient in gradients.items():
            if seed == 1:  # the round was another one
                apart.update(block, gradient)
            else:
                apart.take_staged(block)
            whole.update(block, gradient)
            value = staged[block]
            assert value is not None
            assert torch.equal(value, whole.value(block))
        assert everything(apart) == everything(whole)
    assert apart.stage("table", Gradient(torch.ones(1, WIDTH), torch.tensor([1]))) is None


def test_updates_staged_in_two_slots_are_updates_to_the_bit() -> None:
    for taken in (0, 1):
        apart, whole = storage_of("async", adam), storage_of("async", adam)
        block = next(b for b in whole.blocks() if b != "table")
        random = torch.Generator().manual_seed(taken)
        gradients = [Gradient(torch.randn(whole.value(block).shape, generator=random)) for _ in range(2)]
        for slot, gradient in enumerate(gradients):
            assert apart.stage(block, gradient, slot) is not None
        apart.take_staged(block, taken)
        whole.update(block, gradients[taken])
        assert everything(apart) == everything(whole)
