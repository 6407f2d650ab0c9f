"""export: what was recorded of a job, as files of other tools (docs/export.md)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.command.jobs import find
from penstock.command.options import JobName, Json, Token, Url
from penstock.command.output import emit_json, note, printable
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.export.recording import Progress, Recording
    from penstock.protocol.rest import Job


class Format(StrEnum):
    """What to write."""

    PERFETTO = "perfetto"
    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    MEDIA = "media"


def export(
    job: JobName,
    to: Annotated[
        Format,
        typer.Option(
            "--format",
            help="perfetto: every recorded slice; csv, parquet: costs of operators; media: logged tables, as CSV",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="file to write, gzipped if it ends in .gz; tensorboard, media: folder"),
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", metavar="URL", help="mlflow: address of the tracking server")
    ] = None,
    experiment: Annotated[str, typer.Option("--experiment", help="mlflow: experiment of the run")] = "penstock",
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Write what was recorded of a job for other tools; of a running job, what there is so far."""
    from penstock.export.files import is_stdout
    from penstock.export.recording import Recording  # loads numpy and pydantic

    _check(to, output, tracking_uri)
    with connect(url, token) as client, ProgressLine() as line:
        found = find(client, job)
        recording = Recording(client, found, line.show)
        if tracking_uri is None:
            path = output or Path(file_name(found, _SUFFIX[to]))
            written, said = str(path), _WRITERS[to](recording, path)
        else:
            said = _mlflow(recording, tracking_uri, experiment)
            written = said["run_id"]
    if json:
        emit_json({"job_id": found["id"], "format": to, "output": written, **said})
        return
    if tracking_uri is not None or not is_stdout(Path(written)):
        print(printable(written))
    note(sentence(said))


def _check(to: Format, output: Path | None, tracking_uri: str | None) -> None:
    """Refuse options that belong to another format."""
    if to is Format.MLFLOW and tracking_uri is None:
        raise typer.BadParameter("--format mlflow needs --tracking-uri http://…, the address of an MLflow server")
    if to is Format.MLFLOW and output is not None:
        raise typer.BadParameter("--format mlflow writes no file: leave out --output")
    if to is not Format.MLFLOW and tracking_uri is not None:
        raise typer.BadParameter(f"--tracking-uri is for --format mlflow, not for {to}")


def file_name(job: Job, suffix: str) -> str:
    """Return the name of the file of a job, in the current folder."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', job['name']).strip('.-') or 'job'}-{job['id'][-8:]}{suffix}"


def sentence(said: dict[str, Any]) -> str:
    """Return what was written, in words."""
    counts = [f"{name}: {value:,}" for name, value in said.items() if isinstance(value, int)]
    lost = sum(said.get("dropped", {}).values())
    rest = [f"{lost:,} rows were dropped before they were recorded"] if lost else []
    rest += [f"thinned by the server: {', '.join(said['thinned'])}"] if said.get("thinned") else []
    return "; ".join([", ".join(counts), *rest])


class ProgressLine:
    """What has been read, on stderr: in place on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._in_place = sys.stderr.isatty()
        self._pause_s = 0.2 if self._in_place else 10.0
        self._last_s = time.monotonic()
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._in_place:
            sys.stderr.write("\r\033[K")

    def show(self, progress: Progress) -> None:
        """Show how far reading has come."""
        now_s = time.monotonic()
        if progress.process is None or now_s - self._last_s < self._pause_s:
            return
        self._last_s, self._shown = now_s, True
        one = progress.process
        text = f"{one.name}, process {one.number} of {progress.processes}: {progress.read_bytes / 2**20:,.0f} MiB read"
        if self._in_place:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()
        else:
            note(text)


def _perfetto(recording: Recording, path: Path) -> dict[str, Any]:
    from penstock.export.files import whole_file
    from penstock.export.trace import write_trace

    with whole_file(path) as file:
        return asdict(write_trace(recording, file.write))


def _csv(recording: Recording, path: Path) -> dict[str, Any]:
    from penstock.export.files import whole_file
    from penstock.export.statistics import statistics
    from penstock.export.tables import write_csv

    with whole_file(path) as file:
        return {"operators": write_csv(statistics(recording), file)}


def _parquet(recording: Recording, path: Path) -> dict[str, Any]:
    from penstock.export.files import whole_file
    from penstock.export.statistics import statistics
    from penstock.export.tables import parquet_writer

    write = parquet_writer()
    with whole_file(path) as file:
        return {"operators": write(statistics(recording), file)}


def _tensorboard(recording: Recording, path: Path) -> dict[str, Any]:
    from penstock.export.curves import write_tensorboard

    return dict(write_tensorboard(recording, path))


def _media(recording: Recording, path: Path) -> dict[str, Any]:
    from penstock.export.media import write_media

    return dict(write_media(recording, path))


def _mlflow(recording: Recording, uri: str, experiment: str) -> dict[str, Any]:
    from penstock.export.mlflow import write_mlflow

    return write_mlflow(recording, uri, experiment)


_SUFFIX = {
    Format.PERFETTO: ".perfetto-trace.gz",
    Format.CSV: ".csv",
    Format.PARQUET: ".parquet",
    Format.TENSORBOARD: "-tensorboard",
    Format.MEDIA: "-media",
}
_WRITERS: dict[Format, Callable[[Recording, Path], dict[str, Any]]] = {
    Format.PERFETTO: _perfetto,
    Format.CSV: _csv,
    Format.PARQUET: _parquet,
    Format.TENSORBOARD: _tensorboard,
    Format.MEDIA: _media,
}
