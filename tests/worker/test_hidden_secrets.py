"""What a job does not see of the control plane that runs it, and what others do not see of an agent."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.process.private import make_private
from penstock_worker import guard, lease

LOOK = """
import os, sys
print([os.path.exists(path) and open(path).read() for path in sys.argv[1:]], os.listdir(os.path.dirname(sys.argv[1])))
"""


def test_a_job_cannot_read_the_tokens_beside_it(tmp_path: Path) -> None:
    server, folder, node = tmp_path / "server", tmp_path / "replica", tmp_path / "node.json"
    server.mkdir()
    folder.mkdir()
    (server / "admin.token").write_text("psu_secret")
    node.write_text("psn_secret")
    argv = [sys.executable, "-c", LOOK, str(server / "admin.token"), str(node)]
    order = {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": str(folder),
        "stop_grace_s": 1.0,
        "lease": "",
        "lease_end": 0.0,
    }
    lease.write_json(folder / guard.ORDER, {**order, "hidden": [str(server), str(node), str(tmp_path / "none")]})
    subprocess.run([sys.executable, "-P", "-m", "penstock_worker.guard", str(folder)], check=True, timeout=60)
    assert (folder / guard.LOG).read_text() == "[False, ''] []\n"
    assert (server / "admin.token").read_text() == "psu_secret"  # for the others it is there


@pytest.mark.parametrize("names", [(), ("node.json", "other")])
def test_a_folder_that_others_may_read_is_closed(tmp_path: Path, names: tuple[str, ...]) -> None:
    tmp_path.chmod(0o755)
    for name in names:
        (tmp_path / name).touch()
    make_private(tmp_path, {"node.json"})
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        make_private(tmp_path, {"node.json"})
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
