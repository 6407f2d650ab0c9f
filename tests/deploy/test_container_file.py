"""The container file: without a finding of hadolint, not root, and with a health check that looks at a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "Containerfile"


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    argv = [str(program), "--no-color", "--failure-threshold", "style", "-"]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_finds_nothing() -> None:
    done = hadolint(FILE.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_what_is_wrong() -> None:
    done = hadolint(FILE.read_text().replace("WORKDIR /var/lib/penstock", "WORKDIR penstock"))
    assert done.returncode != 0
    assert "DL3000" in done.stdout


def test_image_is_small_and_runs_without_root() -> None:
    last = FILE.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "g++" not in last and "HEALTHCHECK" in last


def test_copied_files_are_there_and_not_ignored() -> None:
    taken = {
        line[1:] for line in (FILE.parent / f"{FILE.name}.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", FILE.read_text(), re.MULTILINE)
    for path in (one for line in copied for one in line.split()):
        assert (ROOT / path).exists(), path
        assert path.partition("/")[0] in taken, path


def test_health_check_follows_a_server(tmp_path: Path) -> None:
    state = tmp_path / "state"
    environ = {**os.environ, "PENSTOCK_SERVER_STATE_DIR": str(state)}
    check = [sys.executable, "-m", "penstock_server.healthcheck"]

    def status() -> int:
        return subprocess.run(check, env=environ, capture_output=True, timeout=60, check=False).returncode

    assert status() == 1
    server = subprocess.Popen([sys.executable, "-m", "penstock_server", "--port", "0"], env=environ)
    try:
        until((state / "server.json").exists, "the server listens")
        until(lambda: status() == 0, "the server is healthy")
    finally:
        server.kill()
        server.wait()
    assert status() == 1
