"""The version matrix: each Python with the oldest and the newest torch of pyproject.toml's range, and a lowest cell.

`python -m tools.matrix [--cell NAME …] [--keep] [--again] [--list]`. A cell has an environment of its own in
build/matrix/NAME (made by uv, from whatever index uv is configured for) and a copy of the committed tree. Its steps:
environment, install, build, import, test; the first that fails ends it. Each step prints one line and is recorded in
build/matrix/NAME.json. What passed at this revision is not run again; a cell that passed is deleted, unless `--keep`.
The cell `lowest` has the oldest Python and the lowest version of every direct dependency. Exit status 1 if a cell
failed, 2 if a cell was asked for that does not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OPTIONAL = frozenset({"3.14"})
"""Left out, with a line, where this machine has no interpreter; the others are missing then."""
EXTRAS = ("examples", "test")
LOWEST = "lowest"
STEPS = ("environment", "install", "build", "import", "test")
INSTALLED = ("environment", "install")
"""Steps whose outcome depends on the requirements alone, not on the sources."""
LIMITS_S = {"environment": 120.0, "install": 1800.0, "build": 1200.0, "import": 120.0, "test": 600.0}
SMOKE = (
    "tests/compat",  # every private name of torch and uvicorn
    "tests/native",
    "tests/program/test_any_module_is_recorded.py",
    "tests/program/test_layers_equal_torch.py",
    "tests/program/test_recorder_records.py",
    "tests/exec/test_executor_equals_eager.py",
    "tests/exec/test_parallel_executor.py",
    "tests/io/test_save_and_load_training.py",
    "tests/dataset",
    "tests/distributed/test_collective_training.py",
    "tests/server/test_rest_api.py",
    "tests/server/test_server_process.py",
    "tests/cli/test_command_without_server.py",
    "tests/cli/test_demo_trains.py",
)
"""Five minutes on two cores: what touches torch, numpy, FastAPI, SQLAlchemy, websockets, pyarrow and gRPC."""
IMPORT = (
    "import penstock, penstock_server.run, penstock_worker.agent; "
    "from penstock.native import engine, ops, _table, _feed"
)
PYTEST = ("-q", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile", "--maxfail", "30")
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment. `torch`: minor version, '' for what `resolution` gives; `resolution`: uv's."""

    name: str
    python: str
    torch: str
    resolution: str = "highest"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. `key`: what its outcome depends on; `detail`: the end of the output if it failed."""

    step: str
    key: str
    passed: bool
    seconds: float
    detail: str


class NotPlanned(Exception):
    """A cell that was asked for cannot be; the text says why."""


# ---------------------------------------------------------------- planning


def torch_range(requirement: str) -> tuple[str, str]:
    """Return the oldest and the newest minor version of `torch>=A.B,<A.C`. Raises NotPlanned for another form."""
    match = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement.replace(" ", ""))
    if match is None or match[1] != match[3] or int(match[2]) >= int(match[4]):
        raise NotPlanned(f"the requirement of torch is {requirement!r}; expected 'torch>=A.B,<A.C' with B below C")
    return f"{match[1]}.{match[2]}", f"{match[1]}.{int(match[4]) - 1}"


def plan(pythons: Iterable[str], torches: tuple[str, str]) -> list[Cell]:
    """List the cells: every Python with both torches, then the lowest versions with the oldest Python."""
    known = sorted(pythons, key=_numbers)
    cells = [Cell(f"{python}-{torch}", python, torch) for python in known for torch in dict.fromkeys(torches)]
    return [*cells, Cell(LOWEST, known[0], "", "lowest-direct")] if known else []


def chosen(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """Return the cells of these names, all if none is given. Raises NotPlanned."""
    found = {cell.name: cell for cell in cells}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise NotPlanned(f"no cell {', '.join(unknown)}; there are {', '.join(found)}")
    return [found[name] for name in names] or list(cells)


def requirements(project: Mapping[str, Any], cell: Cell) -> list[str]:
    """Return what a cell installs: build requirements, dependencies and extras, with the torch of the cell."""
    table = project["project"]
    found = [*project["build-system"]["requires"], *table["dependencies"]]
    for extra in EXTRAS:
        found += table["optional-dependencies"][extra]
    return [*dict.fromkeys(found), *([f"torch=={cell.torch}.*"] if cell.torch else [])]


def keys(cell: Cell, wanted: Sequence[str], revision: str) -> dict[str, str]:
    """Say for each step what its outcome depends on."""
    installed = f"{cell.python} {cell.resolution}: {', '.join(wanted)}"
    return {step: installed if step in INSTALLED else f"{revision}; {installed}" for step in STEPS}


def remaining(wanted: Mapping[str, str], before: Sequence[Outcome], *, is_kept: bool) -> list[str]:
    """List the steps that have to run: from the first that has not passed under the same key.

    `is_kept`: the environment is still there; without it every step runs again, unless all have passed.
    """
    passed = {outcome.step for outcome in before if outcome.passed and wanted.get(outcome.step) == outcome.key}
    first = next((number for number, step in enumerate(STEPS) if step not in passed), len(STEPS))
    return list(STEPS[first if is_kept or first == len(STEPS) else 0 :])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


# ---------------------------------------------------------------- this machine


def interpreter(version: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Find an interpreter with its C headers: on PATH, of pyenv, or of uv."""
    home = Path(environ.get("HOME", "/nonexistent"))
    pyenv = Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    on_path = shutil.which(f"python{version}", path=environ.get("PATH"))
    places = [Path(on_path)] if on_path else []
    places += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    places += sorted(uv.glob(f"cpython-{version}.*/bin/python{version}"))
    return next((str(place) for place in places if _is_whole(place, version)), None)


def _is_whole(python: Path, version: str) -> bool:
    """Tell whether it starts (pyenv's shims may not), is of the version, and has Python.h."""
    question = (
        "import pathlib, sys, sysconfig; print('%d.%d' % sys.version_info[:2], "
        "(pathlib.Path(sysconfig.get_path('include')) / 'Python.h').is_file())"
    )
    done = subprocess.run([python, "-c", question], check=False, capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.split() == [version, "True"]


def uv() -> str:
    """Return uv from an environment of its own, made at the first call. Raises CalledProcessError from pip."""
    tools = FOLDER / "tools"
    program = tools / "bin" / "uv"
    if not program.is_file():
        venv.create(tools, with_pip=True)
        subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    return str(program)


class Run:
    """One cell on this machine: its folder, its environment variables, its steps."""

    def __init__(self, cell: Cell, wanted: Sequence[str], python: str) -> None:
        self.cell, self.wanted, self.python = cell, wanted, python
        self.folder = FOLDER / cell.name
        self.record = FOLDER / f"{cell.name}.json"
        self.bin = self.folder / "venv" / "bin"

    def outcomes(self) -> list[Outcome]:
        """Return what was recorded before."""
        if not self.record.is_file():
            return []
        return [Outcome(**entry) for entry in json.loads(self.record.read_text())["steps"]]

    def commands(self, step: str) -> list[list[str]]:
        """Return what a step runs."""
        python = str(self.bin / "python")
        pip = [uv(), "pip", "install", "--quiet", "--python", python]
        return {
            "environment": [[uv(), "venv", "--quiet", "--clear", "--python", self.python, str(self.folder / "venv")]],
            "install": [[*pip, "--resolution", self.cell.resolution, *self.wanted]],
            "build": [
                [python, "-m", "penstock.native.build"],
                [*pip, "--no-deps", "--no-build-isolation", "--editable", "."],
            ],
            "import": [[python, "-c", IMPORT]],
            "test": [[python, "-m", "pytest", *PYTEST, *SMOKE]],
        }[step]  # fmt: skip

    def environ(self, step: str) -> dict[str, str]:
        """Return the variables of a step: packages in a cache on the same file system, so that they are links."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        source = {"PYTHONPATH": str(self.folder / "tree" / "core")} if step == "build" else {}
        return {
            **kept,
            **source,
            "PATH": path,
            "UV_CACHE_DIR": str(FOLDER / "cache"),
            "PENSTOCK_CACHE": str(self.folder / "measured"),
        }

    def prepare(self, step: str) -> None:
        """Copy the committed tree before it is built, in the place of an older copy; its objects stay."""
        if step != "build":
            return
        tree = self.folder / "tree"
        tree.mkdir(parents=True, exist_ok=True)
        for old in tree.iterdir():
            if old.name != "build":
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "--extract"], cwd=tree, input=archive, check=True)

    def step(self, step: str, key: str) -> Outcome:
        """Run one step to its end or its limit."""
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare(step)
        where = self.folder / "tree" if step not in INSTALLED else self.folder
        log = FOLDER / f"{self.cell.name}-{step}.log"
        code = 0
        with log.open("w") as out:
            for command in self.commands(step):
                code = code or status_of(command, where, self.environ(step), out, LIMITS_S[step])
        lines = log.read_text(errors="replace").splitlines()
        detail = "\n".join(lines[-TAIL_LINES:] if code else lines[-1:])
        return Outcome(step, key, code == 0, round(time.monotonic() - started, 1), detail)

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """Record the steps, with what is installed."""
        freeze: list[str] = []
        if (self.bin / "python").exists():
            command = [uv(), "pip", "freeze", "--quiet", "--python", str(self.bin / "python")]
            freeze = subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()
        entry = {
            "cell": asdict(self.cell),
            "date": time.strftime("%Y-%m-%d"),
            "passed": [outcome.step for outcome in outcomes if outcome.passed] == list(STEPS),
            "steps": [asdict(outcome) for outcome in outcomes],
            "installed": freeze or (json.loads(self.record.read_text())["installed"] if self.record.is_file() else []),
        }
        self.record.write_text(json.dumps(entry, indent=1) + "\n")


def status_of(command: Sequence[str], where: Path, environ: Mapping[str, str], out: Any, limit_s: float) -> int:
    """Run a command to its end or its limit; what it has started ends with it."""
    with subprocess.Popen(
        command, cwd=where, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            out.write(f"\nstill running after {limit_s:g} s\n")
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            return -1


def run(cell: Cell, python: str, *, keep: bool, again: bool, say: Callable[[str], None]) -> bool:
    """Run what remains of a cell; tell whether it passed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = requirements(project, cell)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    here = Run(cell, wanted, python)
    expected = keys(cell, wanted, revision.strip())
    before = [] if again else here.outcomes()
    todo = remaining(expected, before, is_kept=here.bin.is_dir())
    outcomes = [outcome for outcome in before if outcome.step not in todo]
    if not todo:
        say(f"{cell.name:10} passed before, at this revision")
    for step in todo:
        outcome = here.step(step, expected[step])
        outcomes.append(outcome)
        here.write(outcomes)
        verdict = "ok" if outcome.passed else "FAILED"
        say(f"{cell.name:10} {step:12} {verdict:6} {outcome.seconds:7.1f} s  {outcome.detail}")
        if not outcome.passed:
            return False
    if not keep:
        shutil.rmtree(here.folder, ignore_errors=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Build and test on versions.")
    parser.add_argument("--cell", action="append", default=[], help="this cell alone (repeatable)")
    parser.add_argument("--keep", action="store_true", help="keep the environments of cells that pass")
    parser.add_argument("--again", action="store_true", help="run what passed before, too")
    parser.add_argument("--list", action="store_true", help="print the cells and leave")
    options = parser.parse_args(arguments)
    found = {version: interpreter(version) for version in PYTHONS}
    for version, python in found.items():
        if python is None:
            print(f"{version:10} no interpreter with C headers on PATH, of pyenv or of uv", flush=True)
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (torch,) = (text for text in project["dependencies"] if re.match(r"torch\b", text))
        wanted = [version for version in PYTHONS if found[version] or version not in OPTIONAL]
        cells = chosen(plan(wanted, torch_range(torch)), options.cell)
    except NotPlanned as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    failed = []
    for cell in cells:
        python = found[cell.python]
        if python is None or not run(
            cell, python, keep=options.keep, again=options.again, say=lambda line: print(line, flush=True)
        ):
            failed.append(cell.name)
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
