"""`penstock run-fluid` and `penstock check-fluid`: scripts that were written for PaddlePaddle Fluid."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from penstock.alias.finder import SHIM, installed_paddle
from penstock.alias.names import Standing, table
from penstock.command.exits import Exit
from penstock.command.options import Json
from penstock.command.output import emit_json
from penstock.errors import SpecError
from penstock.settings import CPU_NUM, PADDLE_ALIAS

if TYPE_CHECKING:
    from penstock.alias.check import Report

_SHOWN = 3
RUN_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run_fluid(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="the script, or with -m a module")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="its arguments")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as paddle.distributed.launch")] = False,
    shadow: Annotated[bool, typer.Option("--shadow", help="also where a real paddle is installed")] = False,
) -> NoReturn:
    """Run a script with `import paddle` meaning Penstock, in its child processes as well.

    Python replaces this process: arguments, exit code, signals and tracebacks are the script's own.
    """
    # the folder that Python puts first: of what a link names
    _check_real(Path.cwd() if module else Path(script).resolve().parent, shadow=shadow)
    path = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))
    environ = {CPU_NUM.name: "1", **os.environ, "PYTHONPATH": path}  # one replica, unless it is set: as in Fluid
    if shadow:
        environ[PADDLE_ALIAS.name] = "shadow"
    target = ["-m", _real_module(script)] if module else [script]
    os.execve(sys.executable, [sys.executable, *target, *(arguments or ())], environ)


def _check_real(folder: Path, *, shadow: bool) -> None:
    """Raise SpecError if `import paddle` of a script in `folder` would find a real paddle that may not be shadowed."""
    beside = installed_paddle([str(folder)])
    if beside is not None:
        raise SpecError(f"{beside} lies beside the script, so `import paddle` finds it first: move the script or it")
    installed = installed_paddle(sys.path[1:])
    if installed is not None and not shadow:
        raise SpecError(
            f"a real paddle is installed, {installed}: --shadow runs the script on Penstock nevertheless; python runs "
            "it on that paddle"
        )


def _real_module(name: str) -> str:
    found = table().modules.get(name)
    return f"penstock.{found.whole}" if found is not None and found.whole else name


def check_fluid(
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="a script, or a folder of them")],
    json: Json = False,
) -> None:
    """List the names of Fluid that scripts use, whether Penstock has them, and where; exit code 1 if one is missing.

    The scripts are read, not run.
    """
    from penstock.alias.check import check  # parses Python, which --help need not pay for

    report = check(path, table())
    if json:
        emit_json(
            {
                "files": len(report.files),
                "unread": {str(file): reason for file, reason in report.unread.items()},
                "names": [found.as_json() for found in report.findings],
            }
        )
    else:
        print("\n".join(lines(report)))
    if report.unread or report.count(Standing.MISSING, Standing.UNKNOWN):
        raise typer.Exit(Exit.JOB_FAILED)


def lines(report: Report) -> list[str]:
    """Return a report as text: a line for each name with its first uses, then a summary."""
    found = [f"{file}: {reason}" for file, reason in report.unread.items()]
    for finding in report.findings:
        places = ", ".join(f"{use.file}:{use.line}" for use in finding.uses[:_SHOWN])
        rest = f" and {len(finding.uses) - _SHOWN} more" if len(finding.uses) > _SHOWN else ""
        note = f"\n         → {finding.name.note.lstrip('; ')}" if finding.name.note else ""
        found.append(f"{finding.name.standing:8} {finding.name.path}  {places}{rest}{note}")
    counts = ", ".join(f"{report.count(standing)} {standing}" for standing in Standing)
    return [*found, f"{len(report.files)} files, {len(report.unread)} unread; names: {counts}"]
