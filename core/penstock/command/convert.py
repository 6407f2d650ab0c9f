"""`penstock convert-fluid`: saved parameters and models, from PaddlePaddle Fluid's files to Penstock's and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.command.options import Json
from penstock.command.output import emit_json, emit_table, note


def convert_fluid(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="a folder or file of saved variables")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="the folder to write, or PREFIX.pdparams")],
    filename: Annotated[
        str | None, typer.Option(help="one file for all of Fluid's variables; of Penstock, the name of the save")
    ] = None,
    names_from: Annotated[
        Path | None, typer.Option(help="names of a file for all: the __model__, or a text of one name a line")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="name of Penstock's optimizer, as adam_0")] = None,
    beta1: Annotated[float, typer.Option(help="Adam's, which tells the number of updates")] = 0.9,
    beta2: Annotated[float, typer.Option(help="Adam's")] = 0.999,
    parameters_only: Annotated[
        bool, typer.Option("--parameters-only", help="of an inference model to Fluid, no __model__")
    ] = False,
    json: Json = False,
) -> None:
    """Convert what Fluid 1.5 to 1.8 saved to a save of Penstock; a save of Penstock to Fluid's files.

    Read are folders of save_params, save_persistables and save_vars, their files for all, models (__model__) and the
    .pdparams and .pdopt of fluid.save. Which way it goes follows from SOURCE. An inference model of Penstock becomes a
    __model__ with its parameters.
    """
    from penstock.io.converting import Options, convert  # imports torch, which --help need not pay for

    shows = sys.stderr.isatty() and not json
    count = 0

    def progress(name: str) -> None:
        nonlocal count
        count += 1
        if shows:
            print(f"\r\033[K{count} {name[:100]}", end="", file=sys.stderr, flush=True)

    done = convert(source, target, Options(filename, names_from, optimizer, (beta1, beta2), parameters_only), progress)
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if json:
        emit_json(
            {
                "direction": done.direction, "target": done.target, "names": done.names, "variables": done.variables,
                "left_out": done.left_out,
            }
        )  # fmt: skip
        return
    origins = {theirs: ours for ours, theirs in done.names.items()}
    rows = [[name, kind, origins.get(name, "")] for name, kind in sorted(done.variables.items())]
    emit_table(["VARIABLE", "IS", "FROM"], rows, empty="the save has no variables")
    if done.left_out:
        note(f"left out, as they are no variables or have no counterpart: {', '.join(done.left_out)}")
    note(f"{len(done.variables)} variables in {done.target}")
