"""The demo as users run it: its own job on fewer rows, with a real server, agent and trainer on default settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Protocol

import pytest

from penstock.native.matrix_probe import available

NUM_TESTED, LEAST_LATE = (
    33_987,
    8_000,
)  # flights held back, a quarter of them late (tests/examples/test_flights_data.py)
CHANCE = 0.5 + 5 * math.sqrt((NUM_TESTED + 1) / (12 * LEAST_LATE * (NUM_TESTED - LEAST_LATE)))
"""Five standard deviations, of 0.0037, above the AUC of random scores (Mann-Whitney's variance)."""

pytestmark = pytest.mark.slow


class Site(Protocol):
    home: Path

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> CompletedProcess[str]: ...
    def alive(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a demo printed and left. `log`: of its job; `times`: files with times of kernels; `alive`: processes."""

    code: int
    figures: dict[str, Any]
    stderr: str
    log: str
    times: list[str]
    alive: list[int]


def demo(site: Site, cache: Path, rows: int = 30_000, **environ: str) -> Outcome:
    """Run `penstock demo` for one pass over so many flights, to its end."""
    options = ("--exit-when-done", "--json", "--port", "0", "--passes", "1", "--rows", str(rows))
    state = site.home / "state"
    environ = {"PENSTOCK_CACHE": str(cache), **environ}
    done = site.run("demo", *options, "--state-dir", str(state), timeout_s=240, **environ)
    log = "".join(path.read_text(encoding="utf-8") for path in state.glob("server/jobs/*/logs/*.log"))
    assert done.stdout, f"exit {done.returncode}: {done.stderr}\n{log}"
    times = [path.name for path in cache.glob("matrix-kernels-*.json")]
    return Outcome(done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr, log, times, site.alive())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def with_torch(made_site: Callable[[], Site], cache: Path) -> Outcome:
    """A demo for which kernels are exported, the first one in its cache."""
    return demo(made_site(), cache, rows=2_000, PENSTOCK_MATRIX_KERNELS="torch")


@pytest.fixture(scope="module")
def with_defaults(made_site: Callable[[], Site], cache: Path, with_torch: Outcome) -> Outcome:
    """A demo on default settings, after one that has prepared the flights."""
    return demo(made_site(), cache)


def test_the_demo_succeeds_and_leaves_nothing_running(with_defaults: Outcome) -> None:
    assert (with_defaults.code, with_defaults.figures["state"]) == (0, "SUCCEEDED"), with_defaults.log
    assert with_defaults.alive == []


def test_the_demo_predicts_better_than_chance(with_defaults: Outcome) -> None:
    assert with_defaults.figures["auc"] > CHANCE


def test_the_demo_reports_what_its_trainer_printed(with_defaults: Outcome) -> None:
    closing = next(line for line in reversed(with_defaults.log.splitlines()) if line.startswith("{"))
    # The trainer rounds to four digits.
    assert with_defaults.figures["auc"] == pytest.approx(json.loads(closing)["auc"], abs=0.5001e-4)


def test_the_demo_trains_on_the_rows_asked_for(with_defaults: Outcome) -> None:
    assert "30,000 flights to train on, 33,987 to test on" in with_defaults.log


def test_the_demo_measures_kernels_where_there_is_a_choice(with_defaults: Outcome) -> None:
    assert bool(with_defaults.times) == (len(available()) > 1), with_defaults.log


def test_exported_kernels_reach_the_trainer_of_the_demo(with_torch: Outcome) -> None:
    assert "passed from the environment: PENSTOCK_MATRIX_KERNELS=torch\n" in with_torch.stderr
    assert (with_torch.figures["state"], with_torch.times) == ("SUCCEEDED", []), with_torch.log
