"""Under torchrun itself, which knows nothing of Penstock, a script of Fluid's gives what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.scripts import torchrun_fluid

import penstock as fluid

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-12  # float64; sums of eight rows


def torchrun(script: Path) -> list[float]:
    """Run a script on two ranks; return the numbers that the first one prints."""
    environ = {**os.environ, "CPU_NUM": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return [float(v) for v in json.loads(line)]


def test_a_fluid_script_trains_under_torchrun_like_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        expected = torchrun_fluid.train(slice(0, 8))
    assert torchrun(SCRIPTS / "torchrun_fluid.py") == pytest.approx(expected, abs=TOLERANCE)
