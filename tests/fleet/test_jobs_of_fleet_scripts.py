"""The manuals' scripts as jobs of real processes: each mode once in `make test-all`, variations in `make soak`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.nursery import Forked, Nursery, all_end_well
from tests.support.pserver_jobs import begin_job

import penstock as fluid
from penstock.io.saves.files import read_manifest, read_tensors
from penstock.scope import Scope

SCRIPTS = Path(__file__).parent / "scripts"
Values = dict[str, Any]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Jobs:
    """Runs of the scripts, each made once; `begin` does not wait for its end."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self._running: dict[tuple[str, ...], tuple[Path, list[Forked]]] = {}
        self._done: dict[tuple[str, ...], Values] = {}

    def begin(self, script: str, *options: str, servers: int = 2, trainers: int = 2, cpu_num: int = 1) -> Path:
        """Start a job; return the folder in which trainer 0 will leave its result."""
        out = self._folder / str(len(self._running))
        out.mkdir()
        environ = {"CPU_NUM": str(cpu_num), "PENSTOCK_PS_START_S": "60", "PENSTOCK_PS_LEASE_S": "60"}
        job = begin_job(
            self._nursery, out, SCRIPTS / script, "--out", str(out), *options,
            servers=servers, trainers=trainers, environ=environ,
        )  # fmt: skip
        self._running[script, *options] = out, job
        return out

    def end(self, script: str, *options: str) -> Values:
        """Wait for a job that was begun; return what trainer 0 left, and its folder."""
        key = (script, *options)
        if key not in self._done:
            out, processes = self._running[key]
            all_end_well(processes)
            with np.load(out / "result.npz") as found:
                self._done[key] = {**found, "folder": out}
        return self._done[key]

    def run(self, script: str, *options: str, cpu_num: int = 1) -> Values:
        """Begin a job and wait for its end."""
        self.begin(script, *options, cpu_num=cpu_num)
        return self.end(script, *options)

    def stop(self) -> None:
        """End what runs."""
        for _, processes in self._running.values():
            for process in processes:
                process.close()


FIT = "fit_a_line.py"
ADAM = ("--optimizer", "Adam", "--steps", "10", "--compiled", "--save")
GEO = ("--mode", "geo", "--learning_rate", "0.03", "--steps", "40")
ASYNC = ("--mode", "async")


@pytest.fixture(scope="module")
def started(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs of `make test`, which run beside each other: processes wait more than they compute."""
    jobs = Jobs(nursery, tmp_path_factory.mktemp("jobs"))
    jobs.begin(FIT, *ADAM, cpu_num=2)
    jobs.begin(FIT, *GEO)
    jobs.begin("transpiler_script.py", *ASYNC)
    yield jobs
    jobs.stop()


@pytest.fixture
def jobs(nursery: Nursery, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs of one test."""
    made = Jobs(nursery, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., Values]:
    """Train as one machine does, in this process."""

    def run(script: str, *options: str) -> Values:
        spec = importlib.util.spec_from_file_location("script", SCRIPTS / script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(Scope()):
            module.main(["--local", "--out", str(tmp_path), *options])
        with np.load(tmp_path / "result.npz") as found:
            return dict(found)

    return run


def furthest(one: Values, other: Values) -> float:
    """Return the largest difference of the parameters that both have."""
    names = {n for n in one if n.startswith(("fc_", "emb"))} & other.keys()
    assert len(names) >= 2
    return max(float(np.abs(np.asarray(one[n]) - np.asarray(other[n])).max()) for n in names)


def saved(folder: Path) -> Values:
    """Return the values of a save."""
    manifest = read_manifest(folder / "variables.json")
    tensors = read_tensors(folder / manifest.values.name, {v.name: v for v in manifest.variables})
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assert_learned(losses: Any) -> None:
    """Check that the last losses are less than half of the first ones."""
    quarter = len(losses) // 4
    assert np.isfinite(losses).all()
    assert losses[-quarter:].mean() < 0.5 * losses[:quarter].mean()


# -- sync and what it saves; half-async ----------------------------------------------------------------


def test_two_sync_trainers_of_two_replicas_equal_one_machine(started: Jobs, alone: Callable[..., Values]) -> None:
    job, expected = started.end(FIT, *ADAM), alone(FIT, *ADAM[:4])
    values = saved(job["folder"] / "persistables")
    assert "emb" in values
    assert furthest(expected, job) < 1e-12
    assert furthest(expected, values) < 1e-12


def test_two_workers_add_up_what_they_have_seen(started: Jobs, alone: Callable[..., Values]) -> None:
    job, expected = started.end(FIT, *ADAM), alone(FIT, *ADAM[:4])["losses"]
    number, total = job["whole"]
    assert number == 2 * len(expected)
    assert total / 2 == pytest.approx(expected.sum(), rel=1e-12), "a batch's loss is the mean of its halves'"


def test_a_job_resumes_on_other_numbers_of_servers_and_trainers(started: Jobs, alone: Callable[..., Values]) -> None:
    # Half-async with one trainer: each step pushes and pulls, so it is training on one machine.
    load = ("--load", str(started.end(FIT, *ADAM)["folder"] / "persistables"), "--first_step", "10")
    options = ("--mode", "half_async", "--optimizer", "Adam", "--steps", "10", "--save", *load)
    out = started.begin(FIT, *options, servers=3, trainers=1)
    expected = alone(FIT, "--optimizer", "Adam", "--steps", "20")
    started.end(FIT, *options)
    assert furthest(expected, saved(out / "persistables")) < 1e-12


def test_a_saved_model_predicts_without_servers(started: Jobs) -> None:
    folder, scope, exe = started.end(FIT, *ADAM)["folder"], Scope(), fluid.Executor(fluid.CPUPlace())
    program, feeds, fetches = fluid.io.load_inference_model(folder / "model", exe, scope=scope)
    x, word = np.random.default_rng(0).standard_normal((3, 200)), np.array([[0], [7], [49]])
    (predicted,) = exe.run(program, dict(zip(feeds, (x, word), strict=True)), fetches, scope=scope)
    v = {n: torch.from_numpy(t) for n, t in saved(folder / "persistables").items()}
    inputs = torch.cat([torch.from_numpy(x), v["emb"][word[:, 0]]], 1)
    hidden = torch.tanh(inputs @ v["fc_0.w_0"] + v["fc_0.b_0"])
    assert np.allclose(predicted, (hidden @ v["fc_1.w_0"] + v["fc_1.b_0"]).numpy(), rtol=1e-12)


# -- async and GEO -------------------------------------------------------------------------------------


def test_geo_learns(started: Jobs) -> None:
    assert_learned(started.end(FIT, *GEO)["losses"])


def test_sync_mode_false_alone_is_asynchronous_and_learns(started: Jobs) -> None:
    assert_learned(started.end("transpiler_script.py", *ASYNC)["losses"])


# -- variations ----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(("optimizer", "cpu_num"), [("Momentum", 1), ("SGD", 2)])
def test_two_sync_trainers_of_half_a_batch_equal_one(
    jobs: Jobs, alone: Callable[..., Values], optimizer: str, cpu_num: int
) -> None:
    options = ("--optimizer", optimizer)
    job = jobs.run(FIT, *options, *(["--compiled"] if cpu_num > 1 else []), cpu_num=cpu_num)
    assert furthest(alone(FIT, *options), job) < 1e-12


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_two_trainers_that_do_not_wait_for_each_other_learn(jobs: Jobs, mode: str) -> None:
    losses = jobs.run(FIT, "--mode", mode, "--learning_rate", "0.03", "--steps", "40")["losses"]
    assert_learned(losses)


@pytest.mark.soak
def test_the_transpiler_script_in_sync_trains_as_one_machine(jobs: Jobs, alone: Callable[..., Values]) -> None:
    job = jobs.run("transpiler_script.py", "--mode", "sync")
    assert furthest(alone("transpiler_script.py"), job) < 1e-12
