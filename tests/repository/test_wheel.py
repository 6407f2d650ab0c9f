"""A wheel that is built through the sdist holds all that a bare machine needs. The only check that sees omissions."""

from __future__ import annotations

import json
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
BARE_PROGRAMS = ("sh", "env", "uname")  # no compiler, no Node, no ninja, no git

FIT_A_LINE = """
import numpy as np
import penstock as fluid
from penstock_server import db
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
print(fluid.__file__, penstock_worker.__file__, db.__file__, losses[-1] < losses[0] / 100, sep="\\n")
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
def test_a_wheel_holds_what_a_machine_needs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wanted = {
        "penstock/native/_ops.so",
        "penstock/native/_built.json",
        "penstock_server/static/index.html",
        "penstock_server/migrations/env.py",
        "penstock_worker/guard.py",
        "penstock/examples/ctr_flights/job.yaml",
        "penstock/examples/ctr_flights/train.py",
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


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the wheel with pip into an environment of its own; return the environment variables of a user of it."""
    folder = tmp_path_factory.mktemp("bare")
    programs = folder / "programs"
    programs.mkdir()
    for name in BARE_PROGRAMS:
        (programs / name).symlink_to(str(shutil.which(name)))
    checked([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PIP_CONFIG_FILE", "SSL_CERT_FILE")}
    environ = {
        **kept,
        "HOME": str(folder),
        "PATH": f"{folder / 'venv' / 'bin'}:{programs}",
        "PIP_CACHE_DIR": checked([sys.executable, "-m", "pip", "cache", "dir"], folder).strip(),
    }
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pinned = ["--constraint", str(ROOT / "constraints.txt"), f"penstock[examples] @ {wheel.as_uri()}"]
    done = subprocess.run([*pip, *pinned], cwd=folder, check=False, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return environ


@pytest.mark.soak
def test_the_demo_of_an_installed_wheel_trains_on_a_bare_path(bare: dict[str, str]) -> None:
    command = ["penstock", "demo", "--exit-when-done", "--json", "--no-open", "--passes", "1", "--port", "0"]
    program = shutil.which("penstock", path=bare["PATH"])
    assert program is not None
    assert [shutil.which(name, path=bare["PATH"]) for name in ("g++", "cc", "c++", "clang++", "node", "npm")] == [
        None
    ] * 6
    done = subprocess.run(
        [program, *command[1:]], cwd=bare["HOME"], check=False, capture_output=True, text=True, env=bare
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert (outcome["state"], outcome["auc"] > 0.7) == ("SUCCEEDED", True)


@pytest.mark.soak
def test_a_wheel_of_another_torch_is_refused_in_one_line(bare: dict[str, str]) -> None:
    """The version that torch reports stands for a torch of that version, which would be another large download."""
    other = "import torch; torch.__version__ = '2.1.0'; import penstock.native as native; native.load_operators()"
    command = [str(shutil.which("python", path=bare["PATH"])), "-c", other]
    done = subprocess.run(command, cwd=bare["HOME"], check=False, capture_output=True, text=True, env=bare)
    last = done.stderr.splitlines()[-1]
    assert "was built with torch" in last
    assert "python -m penstock.native.build" in last
