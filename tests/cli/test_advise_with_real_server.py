"""`penstock advise`: a real training job is recorded, ranked, and run anew with another setting, which it then has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Protocol

import pytest

Until = Callable[..., None]
TRAIN = """
import time

import numpy as np
import penstock as fluid

x, y = fluid.layers.data("x", [64]), fluid.layers.data("y", [1])
hidden = fluid.layers.fc(fluid.layers.fc(x, 256, act="relu"), 256, act="relu")
loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))
fluid.optimizer.SGD(0.01).minimize(loss)
fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
build = fluid.BuildStrategy()
build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.AllReduce
trainer = fluid.ParallelExecutor(False, loss.name, build_strategy=build)
draw = np.random.default_rng(0)
feed = {"x": draw.random((256, 64), np.float32), "y": draw.random((256, 1), np.float32)}
while True:
    trainer.run([loss.name], feed=feed)
    time.sleep(0.02)  # computing without pause would take the cores from all other tests
"""


FLEET = """
import time

import numpy as np
import penstock as fluid
from penstock.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet

x, y = fluid.layers.data("x", [64]), fluid.layers.data("y", [1])
loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(fluid.layers.fc(x, 64, act="relu"), 1), y))
fleet.init(PaddleCloudRoleMaker())
config = fluid.DistributeTranspilerConfig()
config.sync_mode = True
fleet.distributed_optimizer(fluid.optimizer.SGD(0.01), config).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fleet.startup_program)
    program = fluid.CompiledProgram(fleet.main_program).with_data_parallel(loss_name=loss.name)
    draw = np.random.default_rng(0)
    feed = {"x": draw.random((32, 64), np.float32), "y": draw.random((32, 1), np.float32)}
    while True:
        executor.run(program, feed=feed, fetch_list=[loss])
        time.sleep(0.02)
"""


class Site(Protocol):
    home: Path

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> CompletedProcess[str]: ...
    def job(self, name: str, code: str, **fields: Any) -> Path: ...
    def submit(self, path: Path) -> str: ...


def advice(site: Site, job: str, until: Until, wanted: str = "options") -> dict[str, Any]:
    """Return the advice once the job has recorded steps, and with them what is `wanted`."""
    found: list[CompletedProcess[str]] = []

    def is_there() -> bool:
        found.append(site.run("advise", job, "--json"))
        assert found[-1].returncode in (0, 5), found[-1].stderr
        return found[-1].returncode == 0 and bool(json.loads(found[-1].stdout)[wanted])

    until(is_there)
    answer: dict[str, Any] = json.loads(found[-1].stdout)
    return answer


@pytest.mark.timeout(300)
def test_a_job_runs_anew_with_the_setting_of_a_rank(serving: Site, until: Until) -> None:
    first = serving.submit(serving.job("advised", TRAIN, mode="local", env={"CPU_NUM": "2"}))
    options = advice(serving, first, until)["options"]
    now = next(one for one in options if one["current"])
    assert (now["cpu_num"], now["reduce_strategy"]) == (2, "AllReduce")
    table = serving.run("advise", first)
    assert table.returncode == 0 and table.stdout.splitlines()[0].split()[:2] == ["rank", "setting"]
    assert f"{now['name']} (now)" in table.stdout

    assert serving.run("cancel", first, "--wait").returncode == 0
    ranked = serving.run("advise", first, "--json")  # of a finished job as of a running one
    options = json.loads(ranked.stdout)["options"]
    wanted = next(n for n, one in enumerate(options, 1) if one["cpu_num"] == 1 and one["num_threads"] == 1)
    made = serving.run("advise", first, "--run", str(wanted))
    assert made.returncode == 0, made.stderr
    second = made.stdout.strip()
    assert second != first
    current = next(one for one in advice(serving, second, until)["options"] if one["current"])
    assert current["name"] == options[wanted - 1]["name"]
    assert serving.run("cancel", second, "--wait").returncode == 0


@pytest.mark.timeout(300)
def test_servers_and_trainers_of_a_served_job_are_ranked(serving: Site, until: Until) -> None:
    one = {"count": 1, "cpus": 0, "memory": "1MiB"}
    spec = {"mode": "pserver", "pservers": one, "trainers": one, "env": {"CPU_NUM": "1"}}
    first = serving.submit(serving.job("served", FLEET, **spec))
    advice(serving, first, until, "clusters")
    assert serving.run("cancel", first, "--wait").returncode == 0
    answer = advice(serving, first, until, "clusters")  # which is the last: ranks stay
    now = next(found for found in answer["clusters"] if found["current"])
    assert (now["pservers"], now["trainers"], now["mode"], now["link_gbit"]) == (1, 1, "sync", None)
    assert 0 < now["wait_ms"] < now["step_ms"]

    ranks = {(found["name"], found["can_run"]): rank for rank, found in enumerate(answer["clusters"], 1)}
    before = len(answer["options"])
    shown = [line.split(maxsplit=1) for line in serving.run("advise", first).stdout.splitlines() if "(now)" in line]
    assert shown[1][0] == str(before + ranks[now["name"], False])
    assert shown[1][1].startswith("1 server, 1 trainer, sync, one host (now) ")


def test_unknown_rank_and_job_without_steps_are_errors(serving: Site) -> None:
    job = serving.submit(serving.job("silent", "print('no steps')"))
    refused = serving.run("advise", job)
    assert refused.returncode == 5
    assert "no step of job 'silent' has been recorded" in refused.stderr and "wait until" in refused.stderr
    assert serving.run("advise", "no-such-job").returncode == 3
