"""The scripts of Fluid's own documents run as they stand, but for the import (Must show 5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.nursery import Forked, Nursery

SCRIPTS = Path(__file__).parent / "scripts"  # .txt: foreign style, kept out of the formatter and the type checker


Run = Callable[..., tuple[dict[tuple[str, int], tuple[float, int]], str]]


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Iterator[Run]:
    """Run a script in a process of its own; return {(what, step): (loss, fetched values)} and its stderr."""
    made: list[Forked] = []

    def run(script: str, **environment: str) -> tuple[dict[tuple[str, int], tuple[float, int]], str]:
        ours = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
        made.append(Forked(nursery, tmp_path / script, [str(SCRIPTS / script)], {**ours, **environment}))
        assert made[-1].end() == 0, made[-1].errors
        lines = [line.split() for line in made[-1].output.splitlines()]
        return {(what, int(step)): (float(loss), int(count)) for what, step, loss, count in lines}, made[-1].errors

    yield run
    for one in made:
        one.close()


@pytest.mark.parametrize("cpu_num", ["1", "2"])
def test_the_fit_a_line_script_trains(run: Run, cpu_num: str) -> None:
    losses, said = run("fit_a_line.txt", CPU_NUM=cpu_num)
    assert losses["loss", 59][0] < losses["loss", 0][0]
    assert {count for _, count in losses.values()} == {int(cpu_num)}
    assert said == ""


def test_the_train_and_test_pair_trains_and_says_nothing(run: Run) -> None:
    losses, said = run("train_and_test.txt", CPU_NUM="2")
    assert losses["test", 60][0] < 0.5 * losses["test", 0][0]
    assert {count for _, count in losses.values()} == {2}
    assert said == ""


def test_the_scripts_hold_the_seeds_lines() -> None:
    """What the documents kept is in the scripts, line by line."""
    first = (SCRIPTS / "fit_a_line.txt").read_text()
    for line in (
        "x = fluid.layers.data(name='x', shape=[13], dtype='float32')",
        "y_predict = fluid.layers.fc(input=x, size=1, act=None)",
        "cost = fluid.layers.square_error_cost(input=y_predict, label=y)",
        "avg_loss = fluid.layers.mean(cost)",
        "sgd_optimizer = fluid.optimizer.SGD(learning_rate=0.001)",
        "exec_strategy.num_threads = 4",
        "train_exe = fluid.ParallelExecutor(use_cuda=False,",
    ):
        assert line in first
    second = (SCRIPTS / "train_and_test.txt").read_text()
    for line in (
        "place = fluid.CUDAPlace(0) if use_cuda else fluid.CPUPlace()",
        "exec_strategy.num_threads = dev_count * 4 # the size of thread pool.",
        "build_strategy.memory_optimize = True if memory_opt else False",
        "train_exe = fluid.ParallelExecutor(use_cuda=use_cuda,",
        "# NOTE: loss_name is unnecessary for test_exe.",
    ):
        assert line in second
