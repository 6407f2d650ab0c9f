"""`penstock stack`: real server, real agent, a real process that hangs."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cli.conftest import Site

Until = Callable[..., None]
HANG = """
import runpy
with open("train.py", "w") as file:
    file.write("import time\\ndef sleeps():\\n    print('up', flush=True)\\n    time.sleep(600)\\nsleeps()\\n")
runpy.run_path("train.py")
"""


def test_the_line_of_a_hanging_job_is_shown(serving: Site, until: Until) -> None:
    site = serving
    job = site.submit(site.job("hangs", HANG))
    until(lambda: site.log(job) == "up\n")
    seen: list[str] = []

    def shown(*arguments: str) -> bool:
        """Ask; a process is asked once a second at most, and may not have come to its sleep yet."""
        seen.append(site.run("stack", *arguments).stdout)
        return "sleeps" in seen[-1]

    until(lambda: shown("hangs", "--rank", "0"))
    text = seen[-1]
    assert "trainer 0, process " in text and "thread MainThread" in text
    assert any(line.startswith("  >") and "sleeps (train.py:4)" in line for line in text.splitlines()), text
    until(lambda: shown(job, "--json"))
    [process] = json.loads(seen[-1])["processes"]
    [thread] = process["threads"]
    assert thread["frames"][0] == {"name": "sleeps", "file": "train.py", "line": 4, "own": True}
    behind: list[str] = []

    def refused() -> bool:
        behind.append(site.run("stack", job, "--skip", "1").stderr)
        return "none is left after the first 1" in behind[-1]

    until(refused)
    wrong = site.run("stack", job, "--rank", "7")
    assert wrong.returncode == 2 and "has no trainer 7; its processes: trainer 0" in wrong.stderr
    site.run("cancel", job, "--wait")
    over = site.run("stack", job)
    assert over.returncode == 5 and "only a running process has stacks" in over.stderr
