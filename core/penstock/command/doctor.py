"""`penstock doctor`: what this machine offers, what limits it, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.exits import Exit
from penstock.command.options import Json, StateDir, Token, Url
from penstock.command.output import emit_json
from penstock.command.profile import home
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.machine.findings import Finding

_MARK = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def doctor(
    no_torch: Annotated[bool, typer.Option("--no-torch", help="leave out torch, kernels and GPUs: 2 s less")] = False,
    url: Url = None,
    token: Token = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Report what this machine offers and what to do about what it lacks."""
    from penstock.command.doctor_report import diagnose  # loads subprocess and ctypes, which --help need not pay for
    from penstock.machine.findings import worst

    findings = diagnose(url=url, token=token, state_dir=state_dir or home(), with_torch=not no_torch)
    level = worst(findings)
    if json:
        emit_json({"version": __version__, "level": level, "findings": [asdict(found) for found in findings]})
    else:
        print("\n".join(line for found in findings for line in lines(found)))
    if level == "error":
        raise typer.Exit(Exit.UNAVAILABLE)


def lines(found: Finding) -> list[str]:
    """Return a finding as text: one line, and one of what to do."""
    first = f"{_MARK[found.level]}  {found.name}: {found.detail}"
    return [first, f"         → {found.advice}"] if found.advice and found.level != "ok" else [first]
