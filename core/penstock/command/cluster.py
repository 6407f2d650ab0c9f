"""cluster slurm, and what all engines share: pilots by what waits in the queue (docs/clusters.md)."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from penstock.command import profile
from penstock.command.options import Token, Url, memory_option
from penstock.command.output import note
from penstock.errors import SpecError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cluster.keeper import Keeper, Settings
    from penstock.cluster.provisioner import Provisioner

cluster_commands = typer.Typer(no_args_is_help=True, help="Agents on other schedulers, as many as jobs wait for.")

Name = Annotated[str | None, typer.Option("--name", help="of the cluster; its pilots' names begin with it")]
Most = Annotated[int, typer.Option("--max", min=1, max=1000, help="pilots at once")]
Least = Annotated[int, typer.Option("--min", min=0, max=1000, help="pilots that are kept while no job waits")]
Cpus = Annotated[int, typer.Option("--cpus", min=1, help="cores of a pilot")]
Gpus = Annotated[int, typer.Option("--gpus", min=0, help="GPUs of a pilot")]
Memory = Annotated[str, typer.Option("--memory", help="memory of a pilot")]
Ttl = Annotated[float, typer.Option("--ttl", min=5, metavar="SECONDS", help="how long a pilot serves")]
Idle = Annotated[
    float, typer.Option("--idle", min=0, metavar="SECONDS", help="a pilot that was idle so long is drained")
]
Once = Annotated[bool, typer.Option("--once", help="a pilot takes one job")]
PilotUrl = Annotated[str | None, typer.Option("--pilot-url", help="the server's address for pilots, if it is another")]
Every = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="how often the queue is looked at")]
Folder = Annotated[
    Path | None, typer.Option("--state-dir", help="what was launched, and the join token (~/.penstock/clusters/NAME)")
]
Plan = Annotated[bool, typer.Option("--plan", "--dry-run", help="print what one pilot would be submitted as, and end")]
Down = Annotated[bool, typer.Option("--down", help="cancel all pilots, revoke their token, and end")]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The options that all engines share."""

    engine: str
    url: str | None
    token: str | None
    name: str | None
    pilot_url: str | None
    state_dir: Path | None
    most: int
    least: int
    cpus: int
    gpus: int
    memory: str
    ttl_s: float
    idle_s: float
    once: bool

    def folder(self) -> Path:
        """Return the folder of the state, which is made."""
        folder = self.state_dir or profile.home() / "clusters" / (self.name or self.engine)
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def settings(self, url: str) -> Settings:
        """Return what the keeper needs. Raises BadParameter."""
        from penstock.cluster.keeper import Settings
        from penstock.cluster.provisioner import Shape
        from penstock.cluster.scaling import Limits

        if self.least > self.most:
            raise typer.BadParameter(f"--min {self.least} is more than --max {self.most}")
        limits = Limits(
            Shape(self.cpus, memory_option(self.memory), self.gpus), self.most, self.least, self.idle_s, once=self.once
        )
        return Settings(self.name or self.engine, self.pilot_url or url, self.folder(), limits, self.ttl_s)


class MakeProvisioner(Protocol):
    """Makes the provisioner of an engine, given the folder of the cluster's state."""

    def __call__(self, folder: Path) -> Provisioner: ...


@cluster_commands.command("slurm")
def slurm(
    url: Url = None,
    token: Token = None,
    name: Name = None,
    most: Most = 10,
    least: Least = 0,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    memory: Memory = "2GiB",
    ttl: Ttl = 3600.0,
    idle: Idle = 60.0,
    once: Once = False,
    pilot_url: PilotUrl = None,
    state_dir: Folder = None,
    every: Every = 5.0,
    plan: Plan = False,
    down: Down = False,
    python: Annotated[str, typer.Option("--python", help="interpreter on the nodes")] = sys.executable,
    signal_before: Annotated[
        float, typer.Option("--signal", min=5, metavar="SECONDS", help="SIGTERM so long before the time limit")
    ] = 30.0,
    pilot_dir: Annotated[
        str, typer.Option("--pilot-dir", help="folder on the nodes for the state of pilots; the shell expands it")
    ] = "${TMPDIR:-/tmp}",
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SBATCH-OPTION …]", help="further options of sbatch")
    ] = None,
) -> None:
    """Submit, grow, shrink and cancel pilots on Slurm. Runs where Slurm's commands are, until it is stopped."""
    cluster = Cluster(
        "slurm", url, token, name, pilot_url, state_dir, most, least, cpus, gpus, memory, ttl, idle, once
    )  # fmt: skip

    def make(folder: Path) -> Provisioner:
        from penstock.cluster.slurm import Slurm

        return Slurm(python, folder / "logs", tuple(options or ()), signal_before, pilot_dir)

    serve(cluster, make, every_s=every, plan=plan, down=down)


def serve(cluster: Cluster, make: MakeProvisioner, *, every_s: float, plan: bool, down: bool) -> None:
    """Do what the options say, with the engine that `make` makes."""
    from filelock import FileLock, Timeout

    from penstock.client import Conflict
    from penstock.cluster.gangs import Gang, Gangs
    from penstock.cluster.keeper import Keeper

    logging.basicConfig(level=logging.INFO, format="%(asctime)s cluster %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with profile.connect(cluster.url, cluster.token) as client:
        settings = cluster.settings(client.url)
        provisioner = make(settings.folder)
        keeper = Keeper(client, provisioner, settings)
        if plan:
            gang = Gang(settings.cluster + "-0", max(1, cluster.least), "planned")
            print(provisioner.plan(keeper.request(Gangs(token="TOKEN"), gang)))
            return
        try:
            with FileLock(settings.folder / "lock", blocking=False):
                keeper.down() if down else _keep(keeper, every_s)
        except Timeout:
            raise Conflict(f"another 'penstock cluster' uses {settings.folder}; stop it, or give --name") from None


def _keep(keeper: Keeper, every_s: float) -> None:
    note(f"pilots of {keeper.settings.cluster!r} are in {keeper.settings.folder}; they go on when this ends (--down)")
    shown: tuple[str, ...] = ()
    with _stopped() as stop:
        while not stop(0.0):
            try:
                answer = keeper.step()
            except Unavailable as error:
                note(str(error))
            except SpecError as error:  # the scheduler refuses: it may be asked for something else by the next queue
                note(f"{keeper.provisioner.engine} refuses: {error}")
            else:
                if answer.unmet != shown:
                    shown = answer.unmet
                    for line in shown:
                        note(line)
            if stop(every_s):
                return


@contextmanager
def _stopped() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits for SIGTERM or SIGINT, so many seconds at most, and returns whether it came."""
    came = threading.Event()
    before = {number: signal.signal(number, lambda *_: came.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came.wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
