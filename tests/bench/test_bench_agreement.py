"""A race is refused in which a contender did not train what the others did, even where its loss does not show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from bench.peers.agreement import check_movements, check_same_training
from bench.peers.contender import OURS
from bench.peers.penstock_executor import PenstockTrainer
from bench.peers.race import Results
from bench.peers.remote import PeerFailed
from bench.peers.torch_single import TorchTrainer
from bench.workloads import Workload, build, criteo
from bench.workloads.fingerprint import Movement, looked_up

STEPS = 5


@pytest.fixture(scope="module")
def workload() -> Workload:
    """CTR-DNN over a table of 500 rows, two batches of 64."""
    return criteo(num_batches=2, batch_size=64, rows=500)


@pytest.fixture(scope="module")
def ours(workload: Workload) -> Iterator[PenstockTrainer]:
    """Our contender on two replicas, after STEPS steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM", "2")
        trainer = PenstockTrainer(workload, mode="reduce", cores=2)
    trainer.run(STEPS)
    yield trainer
    trainer.close()


def raced(workload: Workload, ours: PenstockTrainer, spoil: Callable[[TorchTrainer], None]) -> Results:
    """What a race of ours and of a spoiled eager contender comes to; its loss is within the band."""
    eager = TorchTrainer(workload, mode="eager", cores=2)
    spoil(eager)
    losses = {OURS: [0.69], "torch_eager": [eager.run(STEPS)]}
    losses[OURS] = losses["torch_eager"]
    movements = {OURS: dict(ours.movements()), "torch_eager": eager.movements()}
    return Results(STEPS, losses=losses, movements=movements)


def drop_table_update(trainer: TorchTrainer) -> None:
    trainer.optimizers = trainer.optimizers[:1]


def halve_the_rate(trainer: TorchTrainer) -> None:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] /= 2


def test_contenders_that_train_the_same_agree(workload: Workload, ours: PenstockTrainer) -> None:
    results = raced(workload, ours, lambda trainer: None)
    check_same_training(results, workload)
    assert all(moved.norm > 0 for moved in results.movements[OURS].values())
    check_movements(results.movements, 1e-2, STEPS)


def test_a_table_that_is_never_updated_is_refused(workload: Workload, ours: PenstockTrainer) -> None:
    with pytest.raises(PeerFailed, match=r"torch_eager table: moved by 0, not \d"):
        check_same_training(raced(workload, ours, drop_table_update), workload)


def test_half_the_learning_rate_is_refused(workload: Workload, ours: PenstockTrainer) -> None:
    with pytest.raises(PeerFailed, match=r"torch_eager b0: moved by .*torch_eager w3: moved by"):
        check_same_training(raced(workload, ours, halve_the_rate), workload)


def test_half_of_the_rows_or_another_direction_is_refused() -> None:
    moved = Movement(sum=8.0, norm=1.0, start=0.0, size=100, rows=10, all_rows=10)
    for other in (replace(moved, rows=5), replace(moved, sum=-8.0), replace(moved, norm=0.5)):
        with pytest.raises(PeerFailed, match="peer w"):
            check_movements({OURS: {"w": moved}, "peer": {"w": other}}, 0.1, STEPS)
    with pytest.raises(PeerFailed, match="peer w"):
        check_movements({OURS: {"w": moved}, "peer": {}}, 0.1, STEPS)


def test_a_known_defect_is_reported_and_others_refused() -> None:
    moved = Movement(sum=8.0, norm=1.0, start=0.0, size=100, rows=10, all_rows=10)
    wrong = {"table": replace(moved, norm=0.5), "w0": moved}
    ours = {"table": moved, "w0": moved}
    known = check_movements({OURS: ours, "paddle_pe_reduce": wrong}, 0.1, STEPS)
    assert known == ["paddle_pe_reduce table: moved by 0.5, not 1"]
    with pytest.raises(PeerFailed, match="paddle_pe_reduce w0"):
        check_movements({OURS: ours, "paddle_pe_reduce": {**wrong, "w0": replace(moved, norm=0.5)}}, 0.1, STEPS)


def test_our_replicas_have_to_be_equal(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    trainer = PenstockTrainer(workload, mode="all_reduce", cores=2)
    trainer.run(1)
    trainer.check()
    core = trainer._executor.core
    copies = core.graph(2).variables.values()
    second = next(variable for variable in copies if (variable.name, variable.replica) == ("w0", 1))
    core.memory.tensor(core.program, second).add_(1.0)
    with pytest.raises(RuntimeError, match="parameter w0 differs between replicas"):
        trainer.check()
    trainer.close()


def test_rows_that_count_are_the_first_unique_lookups(workload: Workload) -> None:
    rows = looked_up(workload, "table")
    assert len(set(rows.tolist())) == len(rows)
    assert rows[0] == workload.feeds["ids"][0, 0, 0]


@pytest.mark.parametrize("name", ["lenet", "transformer"])
def test_weights_of_captured_modules_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    workload = build(name, batch_size=4)
    trainer = PenstockTrainer(workload, mode="reduce", cores=2)
    assert all(moved.norm == 0.0 for moved in trainer.movements().values())
    trainer.run(1)
    trainer.check()
    check_same_training(Results(1, losses={OURS: [0.0]}, movements={OURS: trainer.movements()}), workload)
    assert all(moved.norm > 0.0 for moved in trainer.movements().values())
    trainer.close()
