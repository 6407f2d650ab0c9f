"""Ranks of a collective job save and go on together: to the same bits, and with other numbers of ranks."""

from __future__ import annotations

import gc
import re
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed import nccl2_job
from tests.io.checkpoints import collective_job
from tests.io.checkpoints.conftest import Process, Start
from tests.support.endpoints import free_endpoints

import penstock as fluid
from penstock.errors import SpecError
from penstock.io.checkpoints import saving
from penstock.io.checkpoints.reading import newest, opened
from penstock.io.checkpoints.record import Kind
from penstock.io.checkpoints.saving import check_same
from penstock.io.checkpoints.team import Team
from penstock.scope import Scope

SCRIPT = Path(__file__).with_name("collective_job.py")
pytestmark = [pytest.mark.slow]
Values = dict[str, np.ndarray]


def job(start: Start, folder: Path, count: int, *options: object, into: Path) -> list[Process]:
    """Start the ranks of a job, which leave their values in a folder."""
    into.mkdir(exist_ok=True)
    endpoints = ",".join(free_endpoints(count))
    return [
        start(
            SCRIPT, into, "--checkpoints", folder, *options,
            PADDLE_TRAINER_ENDPOINTS=endpoints, PADDLE_TRAINER_ID=str(rank),
        )
        for rank in range(count)
    ]  # fmt: skip


def end_well(ranks: list[Process], into: Path) -> list[Values]:
    """Wait for the end of all; return what they left."""
    statuses = [rank.end() for rank in ranks]
    assert statuses == [0] * len(ranks), "\n".join(rank.said for rank in ranks)
    found = []
    for rank in range(len(ranks)):
        with np.load(into / f"rank{rank}.npz") as values:
            found.append(dict(values))
    return found


def alone(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> Values:
    """Go on in this process, on the whole batches."""
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID"):
        monkeypatch.delenv(name, raising=False)
    into.mkdir()
    asked = collective_job.options([str(into), "--checkpoints", str(folder), "--every_steps", "2"])
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(Scope()):
        collective_job.train(asked, 0, ["127.0.0.1:1"])
    with np.load(into / "rank0.npz") as values:
        return dict(values)


def test_a_job_with_a_killed_rank_resumes_to_the_same_bits(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job(start, tmp_path / "a", 2, "--every_steps", 3, into=tmp_path / "whole")
    killed = job(start, tmp_path / "b", 2, "--every_steps", 2, "--die", 5, into=tmp_path / "killed")
    assert killed[1].end() == -signal.SIGKILL
    assert killed[0].end() == 1, killed[0].said
    expected = end_well(whole, tmp_path / "whole")
    found = newest(tmp_path / "b", strict=True, sets_aside=False)
    assert found is not None
    assert (found.record.step, found.record.num_ranks, found.record.kind) == (4, 2, "collective")

    one = alone(tmp_path / "b", tmp_path / "alone", monkeypatch)
    for name, value in expected[0].items():
        assert np.abs(one[name] - value).max(initial=0) <= 1e-12, name

    for newer in sorted((tmp_path / "b").glob("checkpoint.000002.*")):  # what went on alone
        newer.rename(newer.with_name("damaged." + newer.name))
    again = job(start, tmp_path / "b", 2, "--every_steps", 2, into=tmp_path / "again")
    got = end_well(again, tmp_path / "again")
    assert all("from 4" in rank.said for rank in again)
    for rank in range(2):
        assert expected[rank].keys() == got[rank].keys()
        for name, value in expected[rank].items():
            assert got[rank][name].tobytes() == value.tobytes(), name


def test_three_ranks_resume_a_timed_save_of_two_unequal_ranks(start: Start, tmp_path: Path) -> None:
    # By time, at every step that it can; rank 1 has data for 5 steps, and its last word stands for it after that.
    folder = tmp_path / "checkpoints"
    first = job(start, folder, 2, "--every_s", 0.001, "--short", 8, 5, "--executor", into=tmp_path / "first")
    values = end_well(first, tmp_path / "first")
    found = newest(folder, strict=True, sets_aside=False)
    assert found is not None
    assert found.record.step >= 6, first[0].said
    assert [state.position["batch"] for state in found.ranks()] == [found.record.step, 5]
    for name, value in values[0].items():
        assert values[1][name].tobytes() == value.tobytes(), name

    more = job(start, folder, 3, "--steps", 10, "--every_steps", 5, into=tmp_path / "more")
    got = end_well(more, tmp_path / "more")
    assert all(f"from {found.record.step}" in rank.said for rank in more)
    for name, value in got[0].items():
        assert all(other[name].tobytes() == value.tobytes() for other in got[1:]), name
    last = newest(folder, strict=True, sets_aside=False)
    assert last is not None
    assert (last.record.step, last.record.num_ranks) == (10, 3)


def positions(folder: Path) -> dict[int, list[tuple[int, Any]]]:
    """Return passes and positions of all ranks, by the step of the checkpoint."""
    found = [opened(path) for path in sorted(folder.glob("checkpoint.*"))]
    return {one.record.step: [(state.passes, state.position) for state in one.ranks()] for one in found}


def at(rank: int, batch: int) -> dict[str, int]:
    return {"rank": rank, "batch": batch}


def test_ranks_of_unequal_data_save_the_same_steps(start: Start, tmp_path: Path) -> None:
    # Rank 0, which writes, has 3 batches a pass and rank 1 has 5: 5 steps a pass, of both.
    ranks = job(start, tmp_path / "a", 2, "--every_steps", 2, "--short", 3, 5, "--passes", 2, into=tmp_path / "values")
    values = end_well(ranks, tmp_path / "values")
    for name, value in values[0].items():
        assert values[1][name].tobytes() == value.tobytes(), name
    assert all("pass 0 over after 5\npass 1 over after 10\n" in rank.said for rank in ranks), ranks[0].said
    assert positions(tmp_path / "a") == {
        2: [(0, at(0, 2)), (0, at(1, 2))],
        4: [(1, None), (0, at(1, 4))],
        6: [(1, at(0, 1)), (1, at(1, 1))],
        8: [(1, at(0, 3)), (1, at(1, 3))],
        10: [(2, None), (1, at(1, 5))],
    }
    last = newest(tmp_path / "a", strict=True, sets_aside=False)
    assert last is not None
    stored = {v.name: (v.dtype, v.shape) for shard in last.record.shards for v in shard.variables}
    for name, tensor in last.values(stored, lambda name: "").items():
        assert tensor.numpy().tobytes() == values[0][name].tobytes(), name


def test_a_rank_that_ends_without_leaving_is_not_awaited(start: Start, tmp_path: Path) -> None:
    options = ("--every_steps", 2, "--steps", 7, "--short", 5, 3, "--leaves")
    ranks = job(start, tmp_path / "a", 3, *options, into=tmp_path / "values")
    end_well(ranks, tmp_path / "values")
    assert positions(tmp_path / "a") == {
        2: [(0, at(0, 2)), (0, at(1, 2)), (0, at(2, 2))],
        4: [(0, at(0, 4)), (0, at(1, 3)), (0, at(2, 4))],
    }
    said = "rank 0 has closed its CheckpointManager of .* and others go on.*Call collective.join"
    assert [len(re.findall(said, rank.said)) for rank in ranks] == [1, 0, 0], ranks[0].said


class OfARank(Team):
    kind: Kind = "collective"


def test_a_closed_manager_is_not_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "team_of", lambda program, folder: OfARank())
    program = fluid.Program()
    manager = fluid.io.CheckpointManager(tmp_path, program)
    manager.restore()
    manager.close()
    alive = weakref.ref(manager)
    del manager
    gc.collect()
    assert alive() is None
    (warn,) = program.after_steps_without_rows.values()
    for _ in range(2):
        warn()
    assert len(caplog.messages) == 1
    assert f"rank 0 has closed its CheckpointManager of {tmp_path}" in caplog.text


def test_a_process_outside_the_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    with pytest.raises(SpecError, match="has not met the others"):
        fluid.io.CheckpointManager(tmp_path, fluid.Program()).restore()


@pytest.mark.parametrize("mode", ["local_sgd", "grad_allreduce"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_that_each_keep_moments_of_their_own_are_refused(mode: str, optimizer: str) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        nccl2_job.optimizer(optimizer).minimize(nccl2_job.network(sparse=True, dropout=0.3))
    if (mode, optimizer) == ("local_sgd", "adam"):
        with pytest.raises(SpecError, match=r"local_sgd.*each trainer has 'adam_\d+\.\w+.*' of its own.*Use SGD"):
            check_same(main, mode)
    else:
        check_same(main, mode)


def test_a_manager_for_local_sgd_is_refused_before_rendezvous(tmp_path: Path) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        nccl2_job.optimizer("adam").minimize(nccl2_job.network(sparse=False, dropout=0.0))
        config = fluid.DistributeTranspilerConfig()
        config.mode, config.collective_mode = "collective", "local_sgd"
        ends = "127.0.0.1:1,127.0.0.1:2"
        fluid.DistributeTranspiler(config=config).transpile(
            1, main, trainers=ends, startup_program=startup, current_endpoint=ends[12:]
        )
    with pytest.raises(SpecError, match="local_sgd"):
        fluid.io.CheckpointManager(tmp_path, main).restore()
