"""What a process imports until its first step has run: no compiler, and nothing of what it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np
import penstock as fluid
fluid.default_main_program().global_block().create_var(name="declared")  # before the script uses a layer
parts = []
for slot in range(3):
    ids = fluid.layers.data(f"C{slot}", [1], dtype="int64")
    parts.append(fluid.layers.embedding(ids, [50, 4], is_sparse=True, param_attr=fluid.ParamAttr(name="table")))
parts.append(fluid.layers.data("dense", [5]))
hidden = fluid.layers.fc(fluid.layers.concat(parts, axis=1), 8, act="relu")
label = fluid.layers.data("label", [1], dtype="int64")
loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(fluid.layers.fc(hidden, 2), label))
fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
trainer = fluid.ParallelExecutor(False, loss.name)
feed = {f"C{slot}": np.arange(6).reshape(6, 1) for slot in range(3)}
feed |= {"dense": np.ones((6, 5), "float32"), "label": np.zeros((6, 1), "int64")}
assert np.isfinite(trainer.run(fetch_list=[loss.name], feed=feed)[0]).all()
"""
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
IMAGES = """
import penstock as fluid
hidden = fluid.layers.conv2d(fluid.layers.data("image", [1, 28, 28]), 20, 5, act="relu")
hidden = fluid.layers.conv2d(fluid.layers.pool2d(hidden, 2, "max", 2), 50, 5, act="relu")
prediction = fluid.layers.fc(fluid.layers.pool2d(hidden, 2, "max", 2), 10, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(prediction, fluid.layers.data("label", [1], dtype="int64")))
fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
"""
NOT_USED = (*COMPILER, "pydantic", "grpc", "penstock.dataset", "penstock.telemetry.sessions", "penstock.ps.client")
"""By a program that is fed, in a process that nothing watches."""
AFTER_IMPORT = (*COMPILER, "penstock.exec", "penstock.program.record", "penstock.native")


def imported_by(code: str) -> set[str]:
    """Return the modules of a fresh process that has run the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def at_first_step() -> set[str]:
    return imported_by(SCRIPT)


@pytest.mark.parametrize("name", NOT_USED)
def test_a_first_step_imports_only_what_it_uses(name: str, at_first_step: set[str]) -> None:
    assert "penstock.exec.parallel" in at_first_step
    assert name not in at_first_step


def test_importing_penstock_imports_no_recorder() -> None:
    assert not imported_by("import torch, penstock").intersection(AFTER_IMPORT)


def test_recording_a_convolutional_network_imports_no_compiler() -> None:
    assert not imported_by(IMAGES).intersection(COMPILER)
