"""The scripts of Fluid's own documents run as they stand, but for the import (Must show 5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.nursery import Forked, Nursery

TESTS = Path(__file__).parents[1]
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


# What the manuals' listings have, the name of the package aside, and where it stands in scripts that other tests run as
# jobs. A line that the manual leaves to the cluster, or has lost, is completed there: (the manual's, the script's).
_TRANSPILER = (
    "fleet/scripts/transpiler_script.py",
    """
    t = fluid.DistributeTranspiler()
    t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers)
    t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers, sync_mode=False)
    if role == "PSERVER":
    pserver_prog = t.get_pserver_program(current_endpoint)
    elif role == "TRAINER":
    """,
    [
        ('role = "PSERVER"', 'role = os.environ["TRAINING_ROLE"]'),
        (
            "trainer_id = 0 # get actual trainer id from cluster",
            'trainer_id = int(os.environ.get("PADDLE_TRAINER_ID", "0"))',
        ),
        ("trainers = 4", 'trainers = int(os.environ["PADDLE_TRAINERS_NUM"])'),
        ('pserver_endpoints = ","', 'pserver_endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"]'),
        (
            'current_endpoint = "" # get actual current endpoint',
            """current_endpoint = f"{os.environ['POD_IP']}:{os.environ['PADDLE_PORT']}\"""",
        ),
        (
            "pserver_startup = t.get_startup_program(current_endpoint,Pserver_prog)",
            "pserver_startup = t.get_startup_program(current_endpoint, pserver_prog)",
        ),
        ("# start pserver here", "exe.run(pserver_prog)"),
        ("# start trainer here", "losses = train_loop(t.get_trainer_program(), loss, trainer_id, trainers)"),
    ],
)
_FLEET = (
    "fleet/scripts/fit_a_line.py",
    """
    from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
    import penstock.incubate.fleet.base.role_maker as role_maker
    # step1: get distributed strategy
    # Sync
    strategy = DistributedStrategyFactory.create_sync_strategy()
    # Half-Async
    strategy = DistributedStrategyFactory.create_half_async_strategy()
    # Async
    strategy = DistributedStrategyFactory.create_async_strategy()
    # step2: define role of node
    role = role_maker.PaddleCloudRoleMaker()
    # step3: get distributed training program
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    # step4.1: run parameter server node
    if fleet.is_server():
    # step4.2: run worker node
    elif fleet.is_worker():
    compiled_program = fluid.compiler.CompiledProgram(fleet.main_program).with_data_parallel(
    """,
    [
        (
            "from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import "
            "DistributedStrategyFactory",
            "from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (",
        ),
        (
            "strategy = DistributedStrategyFactory.create_geo_strategy(update_frequency=400)",
            "strategy = DistributedStrategyFactory.create_geo_strategy(update_frequency=args.geo_every)",
        ),
        ("optimizer = fluid.optimizer.SGD(learning_rate)", "optimizer = optimizer_of(args)"),
        ("config['min_block_size'] = 81920", 'strategy.set_program_config({"min_block_size": 8192})'),
        ("# Do training", "losses = train(args, exe, program, loss, fleet.worker_index(), fleet.worker_num())"),
    ],
)
_NCCL2 = (
    "distributed/nccl2_job.py",
    """
    config = fluid.DistributeTranspilerConfig()
    t = fluid.DistributeTranspiler(config=config)
    t.transpile(trainer_id, trainers=trainers, current_endpoint=current_endpoint)
    """,
    [
        ("trainer_id = 0 # get actual trainer id here", 'rank = int(os.environ["PADDLE_TRAINER_ID"])'),
        ('trainers = ","', 'trainers = ",".join(endpoints)'),
        ('current_endpoint = ""', "current_endpoint = endpoints[trainer_id]"),
        ('config.mode = "nccl2"', 'config.mode = "nccl2" if asked.mode == "nccl2" else "collective"'),
        ("txe = fluid.ParallelExecutor(use_cuda,", "executor = fluid.ParallelExecutor("),
        (
            'loss_name=loss_name, num_trainers=len(trainers.split(",")), trainer_id=trainer_id)',
            "asked.cuda, loss_name=loss.name, build_strategy=strategy, num_trainers=len(endpoints), trainer_id=rank",
        ),
    ],
)
_LAUNCH = (
    "distributed/test_launch.py",
    "",
    [
        (
            "python -m paddle.distributed.launch",
            'LAUNCH = [sys.executable, "-m", "penstock.distributed.launch"]',
        ),
        (
            "PADDLE_NUM_TRAINERS=<TRAINER_COUNT>",
            'env = {"CPU_NUM": "1", "CUDA_VISIBLE_DEVICES": "", "PADDLE_NUM_TRAINERS": "1", "PYTHONPATH": str(ROOT)}',
        ),
        (
            "--gpus <NUM_GPUS_ON_HOSTS> <ENTRYPOINT_SCRIPT> --arg1 --arg2 ...",
            'done = launch(folder, "", "--gpus", "2", script, ".", **env)',
        ),
    ],
)


@pytest.mark.parametrize(("script", "kept", "completed"), [_TRANSPILER, _FLEET, _NCCL2, _LAUNCH])
def test_the_scripts_of_jobs_hold_the_manuals_lines(script: str, kept: str, completed: list[tuple[str, str]]) -> None:
    """Line by line; what is completed is named beside the line that the manual has in its place."""
    lines = {line.strip() for line in (TESTS / script).read_text().splitlines()}
    missing = {line.strip() for line in kept.strip().splitlines()} - lines
    assert missing == set()
    for manuals, ours in completed:
        assert manuals not in lines, "it is kept as it stands, and belongs above"
        assert ours in lines
