"""Emulated processors: native libraries, operators and training under `qemu-user`, on models older than the host's.

`python tools/emulate.py [--cpu MODEL …] [--check NAME …]` prints a line for each check; the exit status is 1 if one
failed, 2 if nothing can be emulated here. Checks: `load` (four native libraries, matrix kernels probed), `operators`
(each file of `tests/native/ops`, which compare with torch, but that of operators of cards), `train` (CTR-DNN for three
steps, with the losses of this processor). `load` passes only if torch reports the instruction set of the model, so that
an emulator that does nothing is noticed. Each check has a process and a cache folder of its own, without the variables
that override a library's choice of kernels; a process for each file of tests, because QEMU 7.2 crashes where one
process runs all of oneDNN's generated code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    # numpy's and torch's wheels need x86-64-v2, whose first processor is Nehalem: on Penryn numpy refuses to load.
    "x86_64": {"Haswell": "AVX2", "Nehalem": "DEFAULT"},
    # Armv8.0, the least that there is.
    "aarch64": {"cortex-a53": "DEFAULT"},
}
"""By machine: models to emulate, and what torch calls their instruction set."""
AVX2_SINCE = (7, 2)
CHECKS = ("load", "operators", "train")
OF_CARDS = "tests/native/ops/test_composed_operators.py"
"""Calls of torch's own operators, which no processor's plan holds. In one, `torch._fused_sgd_` without momentum, QEMU
7.2 crashes on a Haswell; an AVX2 processor runs it."""
OVERRIDES = (
    "OPENBLAS_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_CPU_CAPABILITY",
    "GLIBC_TUNABLES",
    "PENSTOCK_",
    "PYTHONPATH",
)
NUM_REPLICAS = "2"
LOSS_TOLERANCE = 1e-5
"""Relative: sums of some hundred products, three steps of them, differ between kernels by less than 100 roundings."""
LIMIT_S = 900.0
TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Check:
    """One program under one model. `name`: of CHECKS, with the file for operators; `arguments`: of the interpreter."""

    name: str
    cpu: str
    arguments: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a check's process ended. `output`: both streams, without the emulator's warnings."""

    code: int
    output: str
    seconds: float


class NotEmulated(Exception):
    """This machine cannot emulate; the text names what is missing and what to do."""


def models(machine: str) -> Mapping[str, str]:
    """Return the models for a machine. Raises NotEmulated for one that torch has no wheels for."""
    if machine not in MODELS:
        known = " and ".join(MODELS)
        raise NotEmulated(f"cannot emulate older processors of a {machine} machine: models are known for {known}")
    return MODELS[machine]


def emulator(machine: str) -> str:
    """Find QEMU's user-mode emulator. Raises NotEmulated."""
    for name in (f"qemu-{machine}", f"qemu-{machine}-static"):
        path = shutil.which(name)
        if path:
            return path
    raise NotEmulated(f"qemu-{machine} is not on PATH; on Debian or Ubuntu: apt-get install qemu-user")


def version_of(text: str) -> tuple[int, int]:
    """Return the version in what `qemu-… --version` prints. Raises NotEmulated if there is none."""
    found = re.search(r"version (\d+)\.(\d+)", text)
    if found is None:
        raise NotEmulated(f"expected a version of QEMU, got {text[:80]!r}")
    return int(found[1]), int(found[2])


def can_emulate(cpu: str, version: tuple[int, int]) -> bool:
    """Say whether a version of QEMU has the instructions of a model: AVX2 came with 7.2."""
    return cpu != "Haswell" or version >= AVX2_SINCE


def newest() -> str:
    """Return the newest model that QEMU has the instructions of here. Raises NotEmulated."""
    version = _version(emulator(platform.machine()))
    return next(cpu for cpu in models(platform.machine()) if can_emulate(cpu, version))


def _version(program: str) -> tuple[int, int]:
    return version_of(subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout)


def plan(cpus: Sequence[str], kinds: Sequence[str], operator_tests: Sequence[str]) -> list[Check]:
    """List the checks of all models, the quickest first."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "0")
    found = []
    for cpu in cpus:
        each = [
            Check("load", cpu, ("tests/emulate/load_natives.py",)),
            *(Check(f"operators {Path(file).stem}", cpu, (*pytest, file)) for file in operator_tests),
            Check("train", cpu, ("tests/emulate/train_steps.py",)),
        ]
        found += [check for check in each if check.kind in kinds]
    return found


def environment(environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return the variables of a check: those given, but none that would choose a kernel in the processor's place."""
    kept = {name: value for name, value in environ.items() if not name.startswith(OVERRIDES)}
    paths = [str(ROOT / folder) for folder in ("core", "server", "worker", "examples/ctr_flights")]
    return {**kept, "PENSTOCK_CACHE": str(cache), "CPU_NUM": NUM_REPLICAS, "PYTHONPATH": os.pathsep.join(paths)}


def failure(check: Check, finished: Finished, *, capability: str, native: Sequence[float]) -> str:
    """Return why a check failed, '' if it passed. `native`: losses on the host's processor, for `train`."""
    lines = finished.output.splitlines() or [""]
    if finished.code != 0:
        return "\n".join([f"exit status {finished.code}", *lines[-TAIL_LINES:]])
    if check.kind == "load" and (found := _last(lines)["capability"]) != capability:
        return f"torch reports {found}; expected {capability} of a {check.cpu}"
    if check.kind == "train":
        losses = _last(lines)["losses"]
        close = [math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in zip(losses, native, strict=True)]
        return "" if all(close) else f"losses are {losses}; expected {list(native)} within {LOSS_TOLERANCE:g}"
    return ""


def summary(check: Check, finished: Finished) -> str:
    """Return what is worth a line of a check that passed."""
    last = finished.output.splitlines()[-1]
    if check.kind == "load":
        found = json.loads(last)
        used = [name for name, (present, _) in found["kernels"].items() if present and name.startswith("matrix.on")]
        return f"{found['capability']}; {len(found['libraries'])} libraries; kernels: {', '.join(['torch', *used])}"
    return last


def _last(lines: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# ---------------------------------------------------------------- running


def run(check: Check, prefix: Sequence[str]) -> Finished:
    """Run a check to its end, or for LIMIT_S. `prefix`: the emulator, nothing for this processor itself."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-emulate-") as cache:
        command = [*prefix, sys.executable, *check.arguments]
        environ = environment(os.environ, Path(cache))
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environ, check=False, timeout=LIMIT_S, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = -1, f"{(error.stdout or b'').decode(errors='replace')}\nstill running after {LIMIT_S:g} s"
    lines = [line for line in output.splitlines() if "warning: TCG doesn't support requested feature" not in line]
    return Finished(code, "\n".join(lines), time.monotonic() - started)


def emulate(cpus: Sequence[str], kinds: Sequence[str]) -> dict[str, str]:
    """Run the checks, print a line for each, and return what failed with the reason. Raises NotEmulated."""
    machine = platform.machine()
    known, program = models(machine), emulator(machine)
    unknown = [cpu for cpu in cpus if cpu not in known]
    if unknown:
        raise NotEmulated(f"no model {', '.join(unknown)} for {machine}; there are {', '.join(known)}")
    found = set((ROOT / "tests/native/ops").glob("test_*.py")) - {ROOT / OF_CARDS}
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    version = _version(program)
    lacking = [cpu for cpu in cpus if not can_emulate(cpu, version)]
    if lacking:
        raise NotEmulated(f"QEMU {version[0]}.{version[1]} lacks instructions of {', '.join(lacking)}; 7.2 has them")
    checks = plan(cpus or [cpu for cpu in known if can_emulate(cpu, version)], kinds, files)
    native: Sequence[float] = ()
    if any(check.kind == "train" for check in checks):
        here = run(Check("train", "", ("tests/emulate/train_steps.py",)), ())
        if here.code != 0:
            return {"train on this processor": here.output}
        native = _last(here.output.splitlines())["losses"]
    failed: dict[str, str] = {}
    for check in checks:
        finished = run(check, (program, "-cpu", check.cpu))
        why = failure(check, finished, capability=known[check.cpu], native=native)
        line = f"{check.cpu:10} {check.name:34} {'FAILED' if why else 'ok':6} {finished.seconds:6.1f} s  "
        print(line + (why or summary(check, finished)), flush=True)
        if why:
            failed[f"{check.name} on {check.cpu}"] = why
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tools/emulate.py", description="Run on emulated processors.")
    parser.add_argument("--cpu", action="append", default=[], help="this model alone (repeatable)")
    parser.add_argument("--check", action="append", choices=CHECKS, help="this check alone (repeatable)")
    options = parser.parse_args(arguments)
    try:
        failed = emulate(options.cpu, options.check or CHECKS)
    except NotEmulated as error:
        print(error, file=sys.stderr)
        return 2
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
