"""Prepared steps: the same as by Python to the bit, whoever owns the round, and nothing twice or lost."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exec.ps_network import HEIGHT, OUT, WIDTH, network, placement
from tests.ps.channel_jobs import OPS, Job, Start, jobs
from tests.support.waiting import until

import penstock as fluid
from penstock.errors import OperatorError, PenstockError
from penstock.ps.communicator import remotes
from penstock.ps.durability.server_snapshots import snapshots
from penstock.ps.durability.wal import AppliedIndex, log_files, recover
from penstock.ps.persistence import recover_server
from penstock.ps.remote import PsMode
from penstock.ps.rounds.messages import Tick
from penstock.ps.storage import Gradient
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage
from penstock.transpile.partition import Partition
from penstock.transpile.pserver import pserver_program, pserver_startup

MODES: list[PsMode] = ["sync", "async", "half_async"]


def momentum() -> Any:
    return fluid.optimizer.Momentum(0.1, 0.9)


def decayed_adam() -> Any:
    return fluid.optimizer.Adam(fluid.layers.exponential_decay(0.05, 1, 0.5))


def switched_sgd() -> Any:
    step = fluid.layers.autoincreased_step_counter()
    rate = fluid.layers.create_global_var([1], 0.1, "float32", persistable=True, name="rate")
    bound = fluid.layers.fill_constant([1], "int64", 3)
    with fluid.layers.Switch() as switch:
        with switch.case(fluid.layers.less_than(step, bound)):
            fluid.layers.assign(fluid.layers.fill_constant([1], "float32", 0.2), rate)
        with switch.default():
            fluid.layers.assign(fluid.layers.fill_constant([1], "float32", 0.05), rate)
    return fluid.optimizer.SGD(rate)


def sgd() -> Any:
    return fluid.optimizer.SGD(0.1)


class ByPython(ProgramStorage):
    """Storage that native code may not touch."""

    @property
    def is_preparable(self) -> bool:
        return False


@functools.cache
def programs(make: Any, mode: PsMode, num_trainers: int) -> tuple[Any, Any]:
    net = network(make, is_sparse=True)
    partition = Partition(net.main.clone())
    where = placement(partition, 1)
    program = pserver_program(
        partition, where, where.endpoints[0], startup=net.startup, mode=mode, num_trainers=num_trainers
    )
    return program, net.startup


def stored(mode: PsMode, *, make: Any = momentum, num_trainers: int = 1, kind: type[ProgramStorage]) -> ProgramStorage:
    program, startup = programs(make, mode, num_trainers)
    scope = Scope()
    fluid.Executor().run(pserver_startup(program, startup), scope=scope)
    return kind(program, scope)


@pytest.fixture
def start() -> Iterator[Start]:
    with jobs() as begin:

        def one(
            mode: PsMode, *, num_trainers: int = 1, make: Any = momentum, natively: bool = True, **more: Any
        ) -> Job:
            kind = ProgramStorage if natively else ByPython
            storage: Any = stored(mode, make=make, num_trainers=num_trainers, kind=kind)
            return begin(mode, trainers=num_trainers, stored=[storage], **more)

        yield one


def step(job: Job, seed: int, trainer: int = 0) -> list[Any]:
    """Look up rows, push something that depends on them, and read the weight. Return what was read."""
    remote, random = job.remotes[trainer], torch.Generator().manual_seed(100 * seed + trainer)
    dense, sparse = [["weight", ["weight"], [0], 1]], [["table", ["table"], [0], []]]
    spec = json.dumps({"dense": dense, "sparse": sparse, "of": remote})
    rows = torch.randint(0, HEIGHT, (9,), generator=random)
    found = OPS.prefetch(rows, remote, "table", ["table"], [0], [], WIDTH, torch.float32, None)
    sent = OPS.send_step([torch.randn(WIDTH, OUT, generator=random)], [rows], [found * 2 - 0.5], [], remote, spec)
    out = torch.empty(WIDTH, OUT)
    OPS.recv_step([out], [sent], remote, ["weight"], ["weight"], [0])
    return [found.tolist(), out.tolist()]


def weight_step(job: Job, trainer: int) -> list[Any]:
    """Push a gradient of the weight alone, and read it."""
    remote = job.remotes[trainer]
    spec = json.dumps({"dense": [["weight", ["weight"], [0], 1]], "sparse": [], "of": remote})
    sent = OPS.send_step([torch.full((WIDTH, OUT), 1.0 + trainer)], [], [], [], remote, spec)
    out = torch.empty(WIDTH, OUT)
    OPS.recv_step([out], [sent], remote, ["weight"], ["weight"], [0])
    found: list[Any] = out.tolist()
    return found


def all_step(job: Job, seed: int, trainers: int = 2) -> list[Any]:
    with ThreadPoolExecutor(trainers) as pool:
        return [f.result(60) for f in [pool.submit(step, job, seed, t) for t in range(trainers)]]


def state_of(job: Job) -> dict[str, Any]:
    storage: Any = job.storages[0]
    return {name: {key: t.tolist() for key, t in tensors.items()} for name, tensors in storage.state()}


def num_native(job: Job) -> int:
    native = job.servers[0]._state.prepared.native
    return 0 if native is None else native.num_steps


@pytest.mark.parametrize("make", [momentum, decayed_adam])
@pytest.mark.parametrize("mode", MODES)
def test_prepared_steps_train_as_python_does_to_the_bit(start: Start, mode: PsMode, make: Any) -> None:
    found = []
    for natively in (False, True):
        job = start(mode, natively=natively, make=make)
        seen = [step(job, seed) for seed in range(6)]
        server = job.servers[0]
        with server._dispatcher.frozen():
            machine = server._dispatcher.machine
            at = [machine.open_round(), machine.version("table"), server._state.applied.round]
            newest = sorted(step for _, step in server._state.applied.applied.values())
        sums = {key: replace(row, wait_ns=0) for key, row in server.counters.rows().items()}
        found.append((seen, state_of(job), at, [n - newest[0] for n in newest], server.staleness, sums))
        assert num_native(job) >= 4 if natively else num_native(job) == 0
    assert found[0] == found[1]


def test_rounds_with_control_flow_are_pythons(start: Start) -> None:
    job = start("sync", make=switched_sgd)
    for seed in range(5):
        step(job, seed)
    assert num_native(job) == 0
    assert not job.storages[0].is_preparable  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [momentum, decayed_adam])
def test_rounds_of_two_trainers_are_as_in_python_to_the_bit(start: Start, make: Any) -> None:
    found = []
    for natively in (False, True):
        job = start("sync", num_trainers=2, natively=natively, make=make)
        found.append(([all_step(job, seed) for seed in range(8)], state_of(job)))
        merges = {key: row.merges for key, row in job.servers[0].counters.rows().items() if row.merges}
        assert set(merges.values()) == {8}
        assert num_native(job) >= 1 if natively else num_native(job) == 0
    assert found[0] == found[1]


def test_pushes_without_rounds_are_as_stale_as_in_python(start: Start) -> None:
    found = []
    for natively in (False, True):
        job = start("async", num_trainers=2, natively=natively)
        seen = [weight_step(job, trainer) for trainer in [0, 1, 0, 0, 1, 0, 1, 1, 0]]
        rows = job.servers[0].counters.rows()
        found.append((seen, state_of(job), job.servers[0].staleness, {key: row.staleness for key, row in rows.items()}))
        assert num_native(job) >= 5 if natively else num_native(job) == 0
    assert found[0] == found[1]
    assert max(found[0][2]) > 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_prepared_step_whose_answer_is_lost_is_applied_once(start: Start, mode: PsMode) -> None:
    expected, job = start(mode, natively=False), start(mode)
    for seed in range(3):
        assert step(expected, seed) == step(job, seed)
    assert step(expected, 3) == step(job, 3)
    native = job.servers[0]._state.prepared.native
    assert native is not None
    before = native.num_steps
    lock = threading.Event()

    def break_when_applied() -> None:
        until(lambda: native.num_steps > before)
        job.clients[0]._session.disarm(0)
        lock.set()

    breaking = threading.Thread(target=break_when_applied)
    breaking.start()
    seen = [step(job, seed) for seed in range(4, 40)]
    breaking.join()
    assert lock.is_set()
    assert seen == [step(expected, seed) for seed in range(4, 40)]
    assert state_of(job) == state_of(expected)


@pytest.mark.parametrize(("mode", "make"), [*((mode, momentum) for mode in MODES), ("sync", decayed_adam)])
def test_a_copy_taken_during_prepared_steps_is_of_whole_steps(
    start: Start, mode: PsMode, make: Any, tmp_path: Path
) -> None:
    num_steps = 60
    expected, job = start(mode, natively=False, make=make), start(mode, make=make)
    assert step(expected, -1) == step(job, -1), "by messages, without rounds block by block"
    states = [{}, state_of(expected)]
    for seed in range(num_steps):
        step(expected, seed)
        states.append(state_of(expected))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(lambda: [step(job, seed) for seed in range(num_steps)])
        copies = 0
        while not training.done():
            job.servers[0].snapshotter.write_at(tmp_path / str(copies))
            copies += 1
        training.result()
    assert num_native(job) >= 1
    assert state_of(job) == states[-1]
    for number in range(copies):
        again, applied = stored(mode, make=make, kind=ProgramStorage), AppliedIndex(trainers=1, keeps_changes=False)
        recover_server(tmp_path / str(number), again, applied, job="local", blocks=list(again.blocks()))
        found = {name: {key: t.tolist() for key, t in tensors.items()} for name, tensors in again.state()}
        assert found == states[applied.round] if mode == "sync" else found in states


def test_steps_wait_for_those_that_have_blocks_locked(start: Start) -> None:
    job = start("sync")
    for seed in range(4):
        step(job, seed)
    server, before = job.servers[0], num_native(job)
    machine: Any = server._dispatcher.machine
    with ThreadPoolExecutor(1) as pool:
        with server._state.locks.of(["weight"]):
            waiting = pool.submit(step, job, 4)
            until(lambda: machine._closing, "Python closes the round, and waits for the lock")
            assert num_native(job) == before
        waiting.result(60)


def test_what_is_staged_while_python_prepares_is_not_overtaken(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start("async")
    for seed in range(4):
        step(job, seed)
    server, before = job.servers[0], num_native(job)
    state, machine = server._state, server._dispatcher.machine
    standing = machine.standing

    def staged_meanwhile() -> Any:
        found = standing()
        monkeypatch.setattr(type(state), "can_prepare", property(lambda _: False))
        state.prepared.withdraw()
        return found

    monkeypatch.setattr(machine, "standing", staged_meanwhile)
    with server._dispatcher.frozen():
        pass
    step(job, 4)
    assert num_native(job) == before


def test_staged_after_prepared_rounds_belongs_to_the_next_round(start: Start) -> None:
    found, gradient = [], Gradient(torch.ones(WIDTH, OUT), None, 0)
    for natively in (False, True):
        job = start("sync", natively=natively, make=decayed_adam)
        storage: Any = job.storages[0]
        for seed in range(4):
            step(job, seed)
        with job.servers[0]._dispatcher.frozen():
            assert storage.stage("weight", gradient) is not None
        before = num_native(job)
        step(job, 4)
        assert (num_native(job) > before) == natively
        with job.servers[0]._dispatcher.frozen():
            found.append(storage.stage("weight", gradient).tolist())
    assert found[0] == found[1]


def test_trainers_that_leave_and_join_between_prepared_rounds(start: Start) -> None:
    found = []
    for natively in (False, True):
        job = start("sync", num_trainers=2, natively=natively)
        seen = [all_step(job, seed) for seed in range(3)]
        counts = [num_native(job)]
        remotes.close(job.remotes[1])  # leaves
        seen += [[step(job, seed)] for seed in range(3, 6)]
        counts.append(num_native(job))
        remotes.get(job.remotes[1])  # joins
        seen += [all_step(job, seed) for seed in range(6, 10)]
        counts.append(num_native(job))
        found.append((seen, state_of(job)))
        assert (counts[0] < counts[1] < counts[2]) == natively, f"prepared in each phase: {counts}"
    assert found[0] == found[1]


def test_a_connection_that_breaks_while_a_step_waits_for_others(start: Start) -> None:
    found = []
    for natively in (False, True):
        job = start("sync", num_trainers=2, natively=natively)
        seen = [all_step(job, seed) for seed in range(3)]
        of = {client.descriptor.trainer: client for client in job.clients}  # who connected first comes first
        session, others = of[0]._session, of[1]._session
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(step, job, 3, 0)
            until(lambda a=session, b=others: a.sent_at(0) > b.sent_at(0))  # type: ignore[misc]
            session.disarm(0)
            late = step(job, 3, 1)
            seen.append([early.result(60), late])
        seen += [all_step(job, seed) for seed in range(4, 8)]
        found.append((seen, state_of(job)))
    assert found[0] == found[1]


def test_a_step_that_waits_becomes_a_straggler_report(start: Start) -> None:
    job = start("sync", num_trainers=2)
    for seed in range(3):
        all_step(job, seed)
    server = job.servers[0]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(step, job, 3, 0)
        until(lambda: server._dispatcher.machine.waits_for() == [1], "Python knows that trainer 1 is waited for")
        step(job, 3, 1)
        early.result(60)
    with server._dispatcher.frozen():
        assert server._dispatcher.machine.open_round() == 4


def test_prepared_steps_renew_leases(start: Start) -> None:
    job = start("sync")
    for seed in range(4):
        step(job, seed)
    server = job.servers[0]
    before = num_native(job)
    with server._dispatcher.frozen():
        member = server._dispatcher.machine.members._members[0]
        member.seen_at = 0.0
    until(lambda: step(job, 9) and num_native(job) > before)
    server._dispatcher.notify(Tick())
    with server._dispatcher.frozen():
        assert server._dispatcher.machine.members.present() == {0}


def test_a_prepared_update_that_fails_ends_the_server(start: Start) -> None:
    job = start("sync", make=sgd)
    for seed in range(4):
        step(job, seed)
    storage: Any = job.storages[0]
    with job.servers[0]._state.locks.all():
        storage.value("weight").resize_(3, 1)  # an update that does not fit any more
    with pytest.raises((PenstockError, RuntimeError)):
        step(job, 4)
    with pytest.raises(PenstockError) as caught:
        job.servers[0].wait(60)
    assert isinstance(caught.value, OperatorError)
    assert job.servers[0]._state.is_torn


def logged(folder: Path) -> list[Any]:
    """What each record of a server's log says, but of reads: tensors as bytes, and steps from 0 on.

    The process numbers pushes and reads over all its jobs.
    """
    found = []
    numbers: list[Any] = []
    for one in recover(folder, since=0):
        kind, fields = one.message.kind, dict(one.message.fields)
        if kind == "applied":
            numbers += [] if fields["round"] in numbers else [fields["round"]]
            fields["round"] = numbers.index(fields["round"])
        if kind != "pulled":
            tensors = sorted((t.name, t.dtype, t.shape, bytes(t.data)) for t in one.message.tensors)
            found.append((kind, fields, tensors))
    # A block's records are in the order of its updates, so in any order with those of other blocks.
    return sorted(found, key=lambda one: (one[0], str(one[1].get("trainer", "")), str(one[1].get("block", ""))))


@pytest.mark.parametrize("num_trainers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_native_records_are_those_of_python(start: Start, tmp_path: Path, mode: PsMode, num_trainers: int) -> None:
    found = []
    for natively in (False, True):
        job = start(mode, natively=natively, num_trainers=num_trainers, state_dir=tmp_path / str(natively))
        for seed in range(6):
            if mode == "sync":
                all_step(job, seed, num_trainers)
            else:
                for trainer in range(num_trainers):
                    step(job, seed, trainer)
        assert (num_native(job) > 0) == natively
        with job.servers[0]._state.locks.all():
            found.append(logged(tmp_path / str(natively) / job.servers[0]._state.settings.name))
    assert len(found[0]) >= 6
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_server_goes_on_from_what_native_code_has_logged(start: Start, tmp_path: Path, mode: PsMode) -> None:
    job = start(mode, make=decayed_adam, state_dir=tmp_path / "state")
    for seed in range(6):
        step(job, seed)
    assert num_native(job) > 0
    server = job.servers[0]
    with server._state.locks.all():  # as after a kill: the files as they are, and no snapshot
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        expected, applied = state_of(job), dict(server._state.applied.applied)
        at = server._state.applied.round
    again = stored(mode, make=decayed_adam, kind=ProgramStorage)
    index = AppliedIndex(trainers=1, keeps_changes=False)
    folder = tmp_path / "copy" / server._state.settings.name
    recover_server(folder, again, index, job=server._state.settings.job, blocks=list(server._state.specs))
    assert {name: {key: t.tolist() for key, t in tensors.items()} for name, tensors in again.state()} == expected
    assert (index.applied, index.round) == (applied, at)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_native_step_that_cannot_be_logged_is_not_acknowledged(start: Start, tmp_path: Path, mode: PsMode) -> None:
    job = start(mode, state_dir=tmp_path)
    for seed in range(4):
        step(job, seed)
    server = job.servers[0]
    path = tmp_path / server._state.settings.name
    with server._state.locks.all():
        before = len(logged(path))
        full = os.open("/dev/full", os.O_WRONLY)
        server._state.log.file.open(full)
    with pytest.raises((PenstockError, RuntimeError)):
        step(job, 4)
    with pytest.raises(PenstockError, match="No space left"):
        server.wait(60)
    assert len(logged(path)) == before


def test_a_round_whose_native_update_fails_is_not_in_the_log(start: Start, tmp_path: Path) -> None:
    job = start("sync", make=sgd, state_dir=tmp_path)
    for seed in range(4):
        step(job, seed)
    storage: Any = job.storages[0]
    path = tmp_path / job.servers[0]._state.settings.name
    with job.servers[0]._state.locks.all():
        before = logged(path)
        storage.value("weight").resize_(3, 1)
    with pytest.raises((PenstockError, RuntimeError)):
        step(job, 4)
    with pytest.raises(PenstockError):
        job.servers[0].wait(60)
    assert logged(path) == before


def test_a_snapshot_comes_early_when_the_log_is_large(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ps.persistence.LOG_BYTES", 4000)
    monkeypatch.setattr("penstock.ps.server.LOOK_S", 0.01)
    job = start("sync", state_dir=tmp_path)  # its snapshots are a minute apart
    folder = tmp_path / job.servers[0]._state.settings.name
    for seed in range(4):
        step(job, seed)
    until(lambda: step(job, 5) and len(snapshots(folder)) > 1 and snapshots(folder)[0][0] > 0, "the first is gone")
    assert log_files(folder)[0][0] > 0
