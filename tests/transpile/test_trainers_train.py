"""Trainers' programs run, on servers within the process: rows 48, 51, 62, 63, 71 of the table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import FakeServers, first_values
from tests.transpile.recorded import ROWS, Recorded, batch, tower, transpiled

import penstock as fluid
from penstock.errors import ProgramError
from penstock.ps.remote import SPARSE_TABLE, Descriptor

Join = Callable[[fluid.DistributeTranspiler, fluid.Program], FakeServers]


@pytest.fixture
def join() -> Iterator[Join]:
    """Let a transpiled program's remote be servers within the process; returns them."""
    opened: dict[str, FakeServers] = {}

    def opener(descriptor: Descriptor) -> FakeServers:
        return opened[str(descriptor)]

    def to(made: fluid.DistributeTranspiler, startup: fluid.Program) -> FakeServers:
        servers = FakeServers(made.descriptor, made.placement, first_values(startup, made.placement))
        opened[str(made.descriptor)] = servers
        return servers

    with remotes_of_a_test(opener):
        yield to


def locally(recorded: Recorded, steps: int) -> list[float]:
    """The losses of a run on one machine."""
    scope = fluid.Scope()
    exe = fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    return [float(exe.run(recorded.main, batch(seed=i), [recorded.loss], scope=scope)[0].item()) for i in range(steps)]


@pytest.mark.parametrize("settings", [{}, {"slice_var_up": False}, {"sync_mode": False}])
def test_one_trainer_with_servers_equals_a_run_on_one_machine(join: Join, settings: dict[str, bool]) -> None:
    expected = locally(tower(), 3)
    recorded, before = tower(), tower().startup
    made = transpiled(recorded, **settings)
    join(made, before)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    losses = [exe.run(recorded.main, batch(seed=i), [recorded.loss], scope=scope)[0].item() for i in range(3)]
    assert losses == pytest.approx(expected, rel=1e-6)  # float32; rows are added up in another order
    assert scope.find("table") is None


@pytest.mark.parametrize(("shared", "spread"), [(False, False), (True, False), (False, True), (True, True)])
def test_rows_of_ragged_ids_come_from_the_servers(
    join: Join, shared: bool, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "2")

    def losses(recorded: Recorded, *, shared: bool) -> list[float]:
        scope, exe, program = fluid.Scope(), fluid.Executor(), recorded.main
        exe.run(recorded.startup, scope=scope)
        build = fluid.BuildStrategy()
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        compiled = fluid.CompiledProgram(program).with_data_parallel(recorded.loss, build)
        found = []
        for seed, lengths in enumerate([[2, 0, 3, 1], [1, 1, 1, 1], [5, 0, 0, 1]]):
            ids = np.random.default_rng(seed).integers(0, ROWS, (sum(lengths), 1))
            feed = {**batch(4, seed), "ids": fluid.create_lod_tensor(ids, [lengths])}
            found.append(
                float(np.mean(exe.run(compiled if shared else program, feed, [recorded.loss], scope=scope)[0]))
            )
        return found

    expected = losses(tower(ragged=True), shared=False)
    recorded = tower(ragged=True, is_distributed=spread)
    join(transpiled(recorded), tower(ragged=True).startup)
    assert losses(recorded, shared=shared) == pytest.approx(expected, rel=1e-5)  # float32, in another order


def test_trainers_begin_with_the_values_of_the_servers(join: Join) -> None:
    recorded, other = tower(), tower().startup
    other.random_seed = 99
    servers = join(transpiled(recorded), other)
    scope = fluid.Scope()
    fluid.Executor().run(recorded.startup, scope=scope)
    mine = scope.find("w")
    assert mine is not None
    assert torch.equal(mine, torch.cat([servers.values["w.block0"], servers.values["w.block1"]]))


@pytest.mark.parametrize("reduce", [True, False])
def test_row_51_replicas_sum_first_and_send_each_gradient_once(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reduce: bool
) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    feed = batch(9)
    names = ["w@GRAD", "out@GRAD", "fc_0.b_0@GRAD"]
    alone, started = tower(), fluid.Scope()
    fluid.Executor().run(alone.startup, scope=started)
    expected = fluid.Executor().run(alone.main, feed, names, scope=started)
    recorded, before = tower(), tower().startup
    servers = join(transpiled(recorded), before)
    strategy, scope = fluid.BuildStrategy(), fluid.Scope()
    if reduce:
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    fluid.Executor().run(recorded.startup, scope=scope)
    servers.calls.clear()
    pe = fluid.ParallelExecutor(False, recorded.loss, recorded.main, build_strategy=strategy, scope=scope)
    pe.run([recorded.loss], feed)
    pe.close()
    sends = sorted(name for method, name in servers.calls if method.startswith("send") and name)
    assert sends == sorted(v.name for v in recorded.main.parameters())
    assert [m for m, _ in servers.calls].count("send_barrier") == 1
    for name, whole in zip(names, expected, strict=True):
        got = torch.cat(servers.sent[name.removesuffix("@GRAD")])
        np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-6)  # float32 sums in two parts
    assert ("run as Reduce" in caplog.text) is not reduce


def test_a_step_sends_pulls_and_ends_in_order_on_two_replicas(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    recorded, before = tower(), tower().startup
    servers = join(transpiled(recorded), before)
    scope = fluid.Scope()
    fluid.Executor().run(recorded.startup, scope=scope)
    expected = locally(tower(), 3)
    pe = fluid.ParallelExecutor(False, recorded.loss, recorded.main, scope=scope)
    servers.calls.clear()
    losses = [float(np.mean(pe.run([recorded.loss], batch(seed=i))[0])) for i in range(3)]
    pe.close()
    assert losses == pytest.approx(expected, rel=1e-5)  # float32; means of halves
    step = [m for m, _ in servers.calls[: len(servers.calls) // 3]]
    barrier = step.index("send_barrier")
    assert step[0] == "prefetch"
    assert step[step.index("send_step") : barrier].count("send_step") == 1
    assert set(step[:barrier]) == {"prefetch", "send_step", "send", "send_rows"}
    assert step[barrier + 1 :] == ["recv_step"]


def test_one_thread_trains_from_a_dataset_with_servers(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched() -> None:
        names.update(thread.name for thread in threading.enumerate())
        FakeServers.send_barrier(servers)

    names: set[str] = set()
    recorded, before = tower(), tower().startup
    servers = join(transpiled(recorded), before)
    monkeypatch.setattr(servers, "send_barrier", watched)
    file, feed = tmp_path / "part-0", batch(32)
    rows = zip(feed["ids"], feed["x"], feed["y"], strict=True)
    file.write_text("".join(f"1 {i[0]} 128 {' '.join(map(str, x))} 1 {y[0]}\n" for i, x, y in rows))
    dataset = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var([recorded.main.handle(name) for name in ("ids", "x", "y")])
    dataset.set_batch_size(2)
    dataset.set_filelist([str(file)])
    dataset.load_into_memory()
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    exe.train_from_dataset(recorded.main, dataset, scope=scope, thread=3)
    assert [method for method, _ in servers.calls].count("send_barrier") == 16
    assert not [name for name in names if "hogwild" in name]


def test_row_71_gradients_are_sent_whole_after_memory_optimize(join: Join) -> None:
    expected = locally(tower(), 3)
    recorded, before = tower(), tower().startup
    fluid.memory_optimize(recorded.main, skip_grads=True)
    servers = join(transpiled(recorded), before)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    losses = [exe.run(recorded.main, batch(seed=i), [recorded.loss], scope=scope)[0].item() for i in range(3)]
    assert losses == pytest.approx(expected, rel=1e-6)
    fetched = exe.run(recorded.main, batch(seed=9), ["w@GRAD"], scope=scope)[0]
    np.testing.assert_array_equal(torch.cat(servers.sent["w"]), fetched)


def test_a_program_for_test_looks_up_in_the_servers_table(join: Join) -> None:
    recorded, before = tower(), tower().startup
    servers = join(transpiled(recorded), before)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    test = recorded.main.clone(for_test=True)
    servers.calls.clear()
    exe.run(test, batch(), [recorded.loss], scope=scope)
    assert servers.calls == [("prefetch", "table")]


def test_row_62_a_distributed_table_without_servers_is_refused() -> None:
    recorded = tower(is_distributed=True)
    scope, exe = fluid.Scope(), fluid.Executor()
    for program in (recorded.startup, recorded.main):
        with pytest.raises(ProgramError, match=r"table 'table', which is distributed.*DistributeTranspiler"):
            exe.run(program, batch(), scope=scope)
    with pytest.raises(ProgramError, match="is distributed"):
        fluid.ParallelExecutor(False, recorded.loss, recorded.main, scope=scope).run([recorded.loss], batch())
    assert scope.find("table") is None


def test_a_distributed_table_may_be_whole_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOCAL_TABLES", "1")
    trained = []
    for is_distributed in (False, True):
        recorded, scope, exe = tower(is_distributed=is_distributed), fluid.Scope(), fluid.Executor()
        exe.run(recorded.startup, scope=scope)
        for _ in range(3):
            exe.run(recorded.main, batch(), [recorded.loss], scope=scope)
        trained.append(np.array(scope.find_var("table")))
    np.testing.assert_array_equal(trained[0], trained[1])


def test_row_63_a_distributed_table_has_to_be_sparse() -> None:
    with pytest.raises(ProgramError, match=r"is_distributed=True\) needs is_sparse=True"):
        tower(is_sparse=False, is_distributed=True)


def embed(**said: Any) -> fluid.Program:
    """Record a lookup of a table."""
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids: Any = fluid.layers.data("ids", [1], dtype="int64")
        fluid.layers.embedding(ids, [10, 2], is_sparse=True, param_attr="table", **said)
    return main


def test_a_server_program_states_admission_and_expiry_of_ids() -> None:
    made = transpiled(tower(is_distributed=True, admit_after=3, expire_after_s=90))
    for endpoint in made.placement.endpoints:
        (table,) = [op for op in made.get_pserver_program(endpoint).operators if op.type == SPARSE_TABLE]
        said = dict(table.kwargs)
        assert (said["admit_after"], said["expire_after_s"]) == (3, 90.0)


def test_admission_and_expiry_of_ids_survive_the_text_form() -> None:
    main = embed(is_distributed=True, admit_after=3, expire_after_s=90)
    again = fluid.Program.parse(str(main)).variables["table"]
    assert (again.admit_after, again.expire_after_s) == (3, 90.0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"admit_after": 2}, "needs is_distributed=True"),
        ({"expire_after_s": 60.0}, "needs is_distributed=True"),
        ({"is_distributed": True, "admit_after": 256}, r"admit_after=256\).*0 to 255"),
        ({"is_distributed": True, "admit_after": -1}, r"admit_after=-1\)"),
        ({"is_distributed": True, "expire_after_s": 0.5}, r"expire_after_s=0\.5\).*at least 1"),
        ({"is_distributed": True, "expire_after_s": float("inf")}, r"expire_after_s=inf\)"),
    ],
)
def test_impossible_admission_or_expiry_fails_where_recorded(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        embed(**said)


def test_lookups_of_one_table_say_the_same_of_its_ids() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids: Any = fluid.layers.data("ids", [1], dtype="int64")
        for _ in range(2):
            fluid.layers.embedding(ids, [10, 2], is_sparse=True, is_distributed=True, param_attr="table", admit_after=2)
        with pytest.raises(ProgramError, match=r"'table' has admit_after=2 .* looked up with 4 and None"):
            fluid.layers.embedding(ids, [10, 2], is_sparse=True, is_distributed=True, param_attr="table", admit_after=4)


def test_a_distributed_table_is_on_every_server_with_hashed_ids() -> None:
    recorded = tower(is_distributed=True)
    made = transpiled(recorded)
    assert [p.endpoint for p in made.placement.of_parameter("table")] == list(made.placement.endpoints)
    lookup = next(op for op in recorded.main.operators if op.type == "penstock.prefetch.default")
    assert lookup.args[2:6] == ("table", ("table", "table"), (0, 1), ())
    push = next(op for op in recorded.main.operators if op.type == "penstock.send_rows.default")
    assert push.args[3:] == ("table", ("table", "table"), (0, 1), ())
    assert recorded.main.variables["table"].shape == (ROWS, 16)


def test_a_distributed_table_cannot_be_trained_in_geo_mode() -> None:
    with pytest.raises(ProgramError, match="GEO"):
        transpiled(tower(is_distributed=True), sync_mode=False, geo_sgd_mode=True)


def test_geo_passes_on_parameter_and_touched_rows_after_updates(join: Join) -> None:
    recorded, before = tower(), tower().startup
    servers = join(transpiled(recorded, sync_mode=False, geo_sgd_mode=True), before)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    feed = batch()
    exe.run(recorded.main, feed, scope=scope)
    table, rows = servers.sent["table"]
    mine = scope.find("table")
    assert mine is not None
    assert torch.equal(table, mine)
    assert rows.tolist() == feed["ids"].reshape(-1).tolist()
    assert servers.sent["w"][1] is None


def test_a_server_program_does_not_run_as_a_graph() -> None:
    made = transpiled(tower())
    program = made.get_pserver_program(made.placement.endpoints[0])
    with pytest.raises(ProgramError, match=r"run it with fluid\.Executor"):
        fluid.ParallelExecutor(False, main_program=program, scope=fluid.Scope()).run([], {})


def test_an_older_program_for_test_is_refused_with_advice(join: Join) -> None:
    recorded, before = tower(), tower().startup
    for_test = recorded.main.clone(for_test=True)
    join(transpiled(recorded), before)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    exe.run(recorded.main.clone(for_test=True), batch(), [recorded.loss], scope=scope)
    with pytest.raises(ProgramError, match=r"'table'.*use the transpiled program, or its clone\(for_test=True\)"):
        exe.run(for_test, batch(), [recorded.loss], scope=scope)
    with pytest.raises(ProgramError, match=r"'table'.*has no value here: its rows are on parameter servers alone"):
        exe.run(recorded.main, batch(), ["table"], scope=scope)
