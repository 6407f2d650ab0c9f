"""The fleet of jobs without servers, in one worker: its order, its strategies, its checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.distributed.fs_wrapper import LocalFS
from penstock.errors import SpecError
from penstock.fleet import collective
from penstock.fleet.collective import CollectiveFleet, DistributedStrategy, TrainStatus
from penstock.fleet.order import OrderError
from penstock.fleet.roles import Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from penstock.fleet.strategy import StrategyFactory, StrategyTypeError

WORKERS = ["127.0.0.1:6174", "127.0.0.1:6175"]


@pytest.fixture(autouse=True)
def fresh_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CPU_NUM", "1")
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        yield


def worker(index: int = 1, endpoints: Sequence[str] = WORKERS) -> CollectiveFleet:
    made = CollectiveFleet()
    made.init(UserDefinedCollectiveRoleMaker(index, endpoints))
    return made


def minimized(fleet: CollectiveFleet, **fields: Any) -> CollectiveFleet:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    x = fluid.layers.data("x", [4])
    loss = fluid.layers.mean(fluid.layers.fc(x, 3, param_attr="w"))
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), strategy).minimize(loss)
    return fleet


@pytest.mark.parametrize("call", ["main_program", "startup_program", "save_persistables"])
def test_what_needs_a_program_comes_after_minimize(call: str) -> None:
    with pytest.raises(OrderError, match=f"{call} comes before minimize"):
        getattr(worker(), call)(fluid.Executor(), "folder")


def test_a_fleet_is_of_workers_and_takes_its_own_strategy() -> None:
    with pytest.raises(OrderError, match=r"call fleet.init\(role\) first"):
        CollectiveFleet().distributed_optimizer(fluid.optimizer.SGD(0.1))
    with pytest.raises(SpecError, match="describes a job with parameter servers"):
        CollectiveFleet().init(UserDefinedRoleMaker(0, Role.WORKER, 2, WORKERS))
    strategy: Any = StrategyFactory.create_sync_strategy()
    with pytest.raises(StrategyTypeError, match=r"expected fleet.collective.DistributedStrategy"):
        worker().distributed_optimizer(fluid.optimizer.SGD(0.1), strategy)


def test_a_worker_runs_a_compiled_program_that_knows_the_others() -> None:
    fleet = minimized(worker())
    assert isinstance(fleet.main_program, fluid.CompiledProgram)
    build = fleet.main_program._build
    assert (build.num_trainers, build.trainer_id, build.trainers_endpoints) == (2, 1, WORKERS)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.split_files(["a", "b", "c"])) == (1, 2, ["c"])


@pytest.mark.parametrize(
    "fields",
    [
        {"use_local_sgd": True},
        {"_ut4grad_allreduce": True},
        {"mode": "collective", "collective_mode": "local_sgd"},
    ],
    ids=str,
)
def test_collective_modes_mark_the_program_itself(fields: dict[str, Any]) -> None:
    fleet = minimized(worker(), **fields)
    assert fleet.main_program is fluid.default_main_program()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dist_fc": True}, "use_dist_fc is not supported"),
        ({"collective_mode": "local_sgd"}, 'it needs mode = "collective"'),
        ({"forward_recompute": True}, "needs recompute_checkpoints"),
    ],
    ids=str,
)
def test_what_a_strategy_cannot_is_refused_and_undone(fields: dict[str, Any], words: str) -> None:
    fleet = worker()
    with pytest.raises(SpecError, match=words):
        minimized(fleet, **fields)
    assert not any(op.type.startswith("penstock.sgd") for op in fluid.default_main_program().operators)
    with pytest.raises(OrderError):
        _ = fleet.main_program


def test_a_strategy_decorates_for_mixed_precision() -> None:
    minimized(worker(), use_amp=True, amp_loss_scaling=64)
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    assert "bfloat16" in {var.dtype for var in main.variables.values()}
    factor = next(op for op in startup.operators if op.outputs == ("loss_scaling_0",))
    assert factor.args[1] == 64.0


def test_strategies_share_no_execution_strategy() -> None:
    first, second = DistributedStrategy(), DistributedStrategy()
    first.exec_strategy.num_threads = 3
    assert second.exec_strategy.num_threads == 0
    with pytest.raises(SpecError, match="has no field 'nccl_com_num'"):
        setattr(first, "nccl_com_num", 2)  # noqa: B010 - mypy knows no such field


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., CollectiveFleet]:
    fleet, exe = minimized(worker(0, WORKERS[:1])), fluid.Executor()
    exe.run(fleet.startup_program)

    def save(value: float, **options: Any) -> CollectiveFleet:
        fluid.global_scope().var("w").set(np.full((4, 3), value, "float32"))
        fleet.save_check_point(exe, tmp_path, TrainStatus(int(value)), **options)
        return fleet

    return save


def test_the_last_whole_checkpoint_is_loaded(saved: Callable[..., CollectiveFleet], tmp_path: Path) -> None:
    saved(1.0)
    fleet = saved(2.0)
    (tmp_path / "__paddle_fleet_checkpoint__.7.tmp").mkdir()  # of a process that was killed
    fluid.global_scope().var("w").set(np.zeros((4, 3), "float32"))
    found = fleet.load_check_point(fluid.Executor(), tmp_path, 0)
    assert found == TrainStatus(2)
    assert found.next() == 3
    assert np.unique(np.array(fluid.global_scope().find_var("w"))).tolist() == [2.0]


def test_only_the_last_checkpoints_stay(saved: Callable[..., CollectiveFleet], tmp_path: Path) -> None:
    saved(1.0), saved(2.0), saved(3.0)
    fleet = saved(4.0, remain_all_checkpoint=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["__paddle_fleet_checkpoint__.3"]
    with pytest.raises(SpecError, match="mount the file system"):
        fleet.save_check_point(fluid.Executor(), tmp_path, TrainStatus(), fs=object())


def test_workers_with_one_folder_save_one_after_another(
    saved: Callable[..., CollectiveFleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[bool] = []
    write = fluid.io.save_persistables

    def writing(*args: Any) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(True)
        except BlockingIOError:
            free.append(False)
        finally:
            os.close(descriptor)
        write(*args)

    monkeypatch.setattr(collective, "save_persistables", writing)
    saved(1.0, remain_all_checkpoint=False)
    saved(2.0).clean_redundant_check_points(tmp_path)
    assert free == [False, False]
    assert [entry.name for entry in tmp_path.iterdir()] == ["__paddle_fleet_checkpoint__.1"]


def test_programs_have_the_names_that_scripts_use(tmp_path: Path) -> None:
    assert worker()._origin_program is None
    fleet = minimized(worker())
    assert fleet._transpiled_program is fluid.default_main_program()
    origin: Any = fleet._origin_program
    assert [v.name for v in origin.list_vars() if v.persistable][:1] == ["w"]


def test_files_of_this_machine_are_a_file_system(saved: Callable[..., CollectiveFleet], tmp_path: Path) -> None:
    fs, folder = LocalFS(), tmp_path / "below" / "folder"
    for _ in range(2):
        fs.mkdir(folder)
    (folder / "file").write_text("x")
    fs.mv(folder, tmp_path / "other")
    assert (fs.stat(folder), fs.list_dirs(folder), fs.list_dirs(tmp_path / "other")) == (False, [], [])
    assert (sorted(fs.list_dirs(tmp_path)), fs.ls_dir(tmp_path / "other")) == (["below", "other"], ["file"])
    fs.rm(tmp_path / "other" / "file")
    for _ in range(2):
        fs.delete(tmp_path / "other")
    assert fs.ls_dir(tmp_path) == ["below"]
    assert not fs.need_upload_download()
    assert saved(1.0, fs=fs).load_check_point(fluid.Executor(), tmp_path, 0, fs=fs) == TrainStatus(1)


def test_a_folder_without_checkpoints_is_a_beginning(tmp_path: Path) -> None:
    fleet = minimized(worker())
    assert fleet.load_check_point(fluid.Executor(), tmp_path / "none", 0) is None
    with pytest.raises(SpecError, match="holds no checkpoint"):
        fleet.load_check_point(fluid.Executor(), tmp_path, 0, ignore_empty=False)
