"""A wheel that is built through the sdist holds all that a bare machine needs. The only check that sees omissions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from penstock.native import build

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 1800

FIT_A_LINE = """
import numpy as np
import penstock as fluid
from penstock_server import migrate
import penstock_worker

x = fluid.layers.data(name="x", shape=[2], dtype="float32")
y = fluid.layers.data(name="y", shape=[1], dtype="float32")
loss = fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(input=x, size=1), label=y))
fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
trainer = fluid.ParallelExecutor(use_cuda=False, loss_name=loss.name)
rows = np.random.default_rng(0).random((64, 2), dtype=np.float32)
feed = {"x": rows, "y": rows.sum(1, keepdims=True)}
losses = [float(np.mean(trainer.run(fetch_list=[loss.name], feed=feed)[0])) for _ in range(200)]
print(fluid.__file__, penstock_worker.__file__, migrate.__file__, losses[-1] < losses[0] / 100, sep="\\n")
"""


def checked(command: list[str], cwd: Path, **environ: str) -> str:
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the checkout, and the wheel from the unpacked sdist and the objects of the checkout.

    An object is compiled again where a header that it was made from is missing, and cannot be; none is linked that has
    no source. That the sources are enough to compile them all is seen wherever a checkout is set up.
    """
    build.build()
    folder = tmp_path_factory.mktemp("wheel")
    checked([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)], ROOT)
    (sdist,) = folder.glob("penstock-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    ours = build.build_folder()
    shutil.copytree(ours, unpacked / ours.relative_to(ROOT), ignore=shutil.ignore_patterns("stress-*"))
    checked([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)], unpacked)
    (built,) = folder.glob("penstock-*.whl")
    return built


@pytest.mark.slow
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_a_wheel_holds_engine_page_and_migrations_and_nothing_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wanted = {
        "penstock/native/_ops.so",
        "penstock/native/_built.json",
        "penstock_server/static/index.html",
        "penstock_server/migrations/env.py",
        "penstock_worker/guard.py",
    }
    assert wanted - set(names) == set()
    assert any(name.startswith("penstock/native/_engine.") and name.endswith(".so") for name in names)
    assert any(name.startswith("penstock_server/migrations/versions/") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock", "penstock_server", "penstock_worker"}


@pytest.mark.slow
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_a_wheel_says_for_which_python_and_torch_it_was_built(wheel: Path) -> None:
    assert f"-cp3{sys.version_info.minor}-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*\n" in text


@pytest.mark.slow
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_installed_wheel_trains_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    checked([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    # PYTHONPATH stands before the editable installation; -P keeps the working directory out
    said = checked([sys.executable, "-P", "-c", FIT_A_LINE], tmp_path, PYTHONPATH=str(site), CPU_NUM="2").splitlines()
    assert all(path.startswith(str(site)) for path in said[:3]), said
    assert said[3] == "True"
