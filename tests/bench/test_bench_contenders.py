"""Contenders in processes of their own: they start, train the same, and end, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from bench.ctr import chosen
from bench.peers import PeerMissing, environment
from bench.peers.agreement import check_same_training
from bench.peers.contender import COLLECTIVE, CONTENDERS, OURS, ROOF
from bench.peers.kernels import Column, preloaded
from bench.peers.race import check_losses, race
from bench.peers.remote import PeerFailed, Remote, child_environment, session_members
from bench.workloads import Workload

from bench import peers, workloads


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Criteo-shaped workload with a small table and small batches."""
    path = tmp_path_factory.mktemp("workload") / "small.npz"
    workloads.criteo(num_batches=4, batch_size=16, rows=101).save(path)
    return path


def start(key: str, workload: Path, folder: Path) -> Remote:
    one = Remote(key, workload=workload, folder=folder, cores=2, column="installed")
    try:
        one.wait_ready()
    except BaseException:
        one.close()
        raise
    return one


def ended(processes: Iterable[int], *, limit_s: float = 20.0) -> bool:
    """Wait until processes, children or not, have ended: the kernel says so by a file descriptor of each."""
    deadline, opened = time.monotonic() + limit_s, list[int]()
    try:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                opened.append(os.pidfd_open(pid))
        return all(select.select([one], [], [], max(0.0, deadline - time.monotonic()))[0] for one in opened)
    finally:
        for one in opened:
            os.close(one)


def test_a_workload_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    made = workloads.criteo(num_batches=2, batch_size=8, rows=50)
    made.save(tmp_path / "w.npz")
    kept = Workload.load(tmp_path / "w.npz")
    assert (kept.name, kept.optimizer, kept.product, kept.num_batches, kept.batch_size) == (
        "criteo", "sgd", (8, 400, 400), 2, 8,
    )  # fmt: skip
    for name, values in made.weights.items():
        np.testing.assert_array_equal(kept.weights[name], values)
    np.testing.assert_array_equal(kept.batch(3)["ids"], made.feeds["ids"][1])
    assert kept.feeds["ids"].max() < 50


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes import torch one after another, and a busy machine takes its time
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("slots", {"num_slots": 9}, marks=pytest.mark.soak),
        pytest.param("ragged_slots", {"num_slots": 9}, marks=pytest.mark.soak),
        ("din", {"longest": 9}),
    ],
)
def test_a_network_of_tables_is_trained_the_same(name: str, options: dict[str, int], tmp_path: Path) -> None:
    made = workloads.build(name, num_batches=3, batch_size=16, **options)
    made.save(tmp_path / "small.npz")
    keys = [OURS, "torch_eager"]
    results = race(
        keys, workload=tmp_path / "small.npz", cores=2, column="equal", num_rounds=1, num_steps=3, needed=keys
    )
    assert list(results.seconds) == keys
    assert all(len(turns) == 1 and turns[0] > 0 for turns in results.seconds.values())
    check_losses(results.losses, 1e-4)  # float32 sums of 16 rows in another order
    with pytest.raises(PeerFailed, match="learned something else"):
        check_losses({**results.losses, "wrong": [results.losses[OURS][-1] + 1.0]}, 1e-4)
    assert check_same_training(results, made) == []
    assert results.movements[OURS].keys() == made.weights.keys()


def test_histories_are_cut_to_the_longest_of_their_batch() -> None:
    made = workloads.build("din", num_batches=8, batch_size=4)
    lengths = [made.batch(step)["history"].shape[1] for step in range(8)]
    assert len(set(lengths)) > 2
    for step, length in enumerate(lengths):
        whole = made.feeds["history"][step]
        assert whole[:, length - 1].any()
        assert not whole[:, length:].any()


def test_closing_ends_every_process_of_a_contender(small: Path, tmp_path: Path) -> None:
    one = start("torch_ddp_gloo", small, tmp_path)
    members = session_members(one.session)
    assert len(members) == 2
    one.kill()
    assert ended(members)


def test_a_contender_that_dies_is_an_error_with_its_last_words(small: Path, tmp_path: Path) -> None:
    one = start("torch_eager", small, tmp_path)
    os.kill(one.session, signal.SIGKILL)
    with pytest.raises(PeerFailed, match="contender torch_eager ended"):
        one.run(1)
    one.close()


def test_a_contender_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"torch_eager FileNotFoundError: .*none\.npz"):
        start("torch_eager", tmp_path / "none.npz", tmp_path)


def test_contenders_end_when_the_benchmark_is_killed(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bench.peers.remote import Remote\n"
        "one = Remote('torch_eager', workload=Path(sys.argv[1]), folder=Path(sys.argv[2]), cores=1, "
        "column='installed')\n"
        "one.wait_ready(); print(one.session, flush=True); one.run(10**9)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, str(small), str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        members = session_members(int(parent.stdout.readline()))
        assert members
        parent.kill()
    assert ended(members)


def test_a_missing_peer_is_skipped_with_the_command_to_build_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    with pytest.raises(PeerMissing, match=r"python -m bench\.peers setup paddle"):
        environment("paddle")
    results = race(["paddle_pe_reduce"], workload=small, cores=1, column="installed", num_rounds=1, num_steps=1)
    assert "make peers" in results.missing["paddle_pe_reduce"]
    with pytest.raises(PeerMissing):
        race(
            ["paddle_pe_reduce"],
            workload=small,
            cores=1,
            column="installed",
            num_rounds=1,
            num_steps=1,
            needed=["paddle_pe_reduce"],
        )


def test_nobody_inherits_a_setting_that_favours_one_side() -> None:
    settings = (
        "OMP_NUM_THREADS", "CPU_NUM", "LD_PRELOAD", "PENSTOCK_MATRIX_KERNELS", "FLAGS_eager_delete_tensor_gb",
        "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "KMP_AFFINITY", "TORCH_LOGS", "PYTHONPATH",
    )  # fmt: skip
    given = dict.fromkeys(settings, "1") | {"HOME": "here", "LC_ALL": "C"}
    made = child_environment(given, "installed")
    assert made == {"HOME": "here", "LC_ALL": "C", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert child_environment(given, "equal")["LD_PRELOAD"] == str(preloaded("equal"))


@pytest.mark.parametrize(("column", "answer"), [("equal", 1), ("foreign", 0)])
def test_a_column_answers_the_vendor_check(column: Column, answer: int) -> None:
    library = ctypes.CDLL(str(preloaded(column)))
    assert library.mkl_serv_intel_cpu_true() == library.mkl_serv_intel_cpu() == answer
    assert preloaded("installed") is None


def test_peers_are_chosen_by_name() -> None:
    assert chosen("torch_eager,paddle_pe", "criteo") == ["torch_eager", "paddle_pe_all_reduce", "paddle_pe_reduce"]
    served = {key for key, kind in CONTENDERS.items() if kind.served or kind.hosts}
    assert set(chosen(None, "slots")) == set(CONTENDERS) - served - {OURS, ROOF, COLLECTIVE, "penstock_padded"}
    with pytest.raises(SystemExit, match="unknown peer torch_lazy"):
        chosen("torch_lazy", "criteo")


def test_a_peer_races_only_where_it_can_train() -> None:
    assert {"torch_fbgemm"}.isdisjoint([*chosen(None, "flights"), *chosen(None, "criteo")])
    with pytest.raises(SystemExit, match="torch_fbgemm cannot train the workload flights"):
        chosen("torch_eager,torch_fbgemm", "flights")
