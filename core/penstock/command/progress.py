"""The live progress bar of a job. The only module that loads rich."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.command.output import figures, is_over
from penstock.protocol.rest import Job

STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}


class Bar:
    """State, bar, loss, samples/s and ETA in one line on stderr."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("{task.fields[state]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, job: Job) -> None:
        """Update the line; print once how the job ended."""
        state, progress = job["state"], job["progress"]
        style = STYLES.get(state, "default")
        text = " · ".join(figures(job)) or job["why"]
        if self._task is None:
            self._task = self._progress.add_task("", total=None, name=job["name"], state="", figures="")
        self._progress.update(
            self._task,
            total=None if progress is None else progress["total"],
            completed=0 if progress is None else progress["done"],
            state=f"[{style}]{state}[/]",
            figures=text.replace("[", "\\["),
        )
        if is_over(job):
            self._progress.console.print(
                f"{job['name']} {state}: {job['why']}", style=style, markup=False, highlight=False
            )
