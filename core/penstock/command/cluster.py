"""cluster slurm, and what all engines share: pilots by what waits in the queue (docs/clusters.md)."""

from __future__ import annotations

import inspect
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


@dataclass(frozen=True, slots=True)
class Cluster:
    """The options that all engines share, as `engine_command` reads them."""

    engine: str
    url: Url = None
    token: Token = None
    name: Annotated[str | None, typer.Option("--name", help="of the cluster; its pilots' names begin with it")] = None
    most: Annotated[int, typer.Option("--max", min=1, max=1000, help="pilots at once")] = 10
    least: Annotated[int, typer.Option("--min", min=0, max=1000, help="pilots that are kept while no job waits")] = 0
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="cores of a pilot")] = 1
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of a pilot")] = 0
    memory: Annotated[str, typer.Option("--memory", help="memory of a pilot")] = "2GiB"
    ttl_s: Annotated[float, typer.Option("--ttl", min=5, metavar="SECONDS", help="how long a pilot serves")] = 3600.0
    idle_s: Annotated[
        float, typer.Option("--idle", min=0, metavar="SECONDS", help="a pilot that was idle so long is drained")
    ] = 60.0
    once: Annotated[bool, typer.Option("--once", help="a pilot takes one job")] = False
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="of the nodes of pilots, for node_selector; may be repeated"),
    ] = None
    pilot_url: Annotated[
        str | None, typer.Option("--pilot-url", help="the server's address for pilots, if it is another")
    ] = None
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", help="what was launched, and the join token (~/.penstock/clusters/NAME)"),
    ] = None
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="how often the queue is looked at")
    ] = 5.0
    plan: Annotated[
        bool, typer.Option("--plan", "--dry-run", help="print what one pilot would be submitted as, and end")
    ] = False
    down: Annotated[bool, typer.Option("--down", help="cancel all pilots, revoke their token, and end")] = False

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
        from penstock.protocol.jobspec import labels_of  # loads pydantic

        if self.least > self.most:
            raise typer.BadParameter(f"--min {self.least} is more than --max {self.most}")
        limits = Limits(
            Shape(self.cpus, memory_option(self.memory), self.gpus), self.most, self.least, self.idle_s, once=self.once,
            labels=labels_of(self.label or []),
        )  # fmt: skip
        return Settings(self.name or self.engine, self.pilot_url or url, self.folder(), limits, self.ttl_s)


class MakeProvisioner(Protocol):
    """Makes the provisioner of an engine, given the folder of the cluster's state."""

    def __call__(self, folder: Path) -> Provisioner: ...


def engine_command(of_engine: Callable[..., MakeProvisioner]) -> Callable[..., None]:
    """Return the command of an engine: the options of `Cluster`, then those of `of_engine`, named as the engine.

    `of_engine` is called with the Cluster and its own options.
    """
    shared = list(inspect.signature(Cluster, eval_str=True).parameters.values())[1:]
    own = list(inspect.signature(of_engine, eval_str=True).parameters.values())[1:]
    engine = of_engine.__name__

    def command(**options: object) -> None:
        cluster = Cluster(engine, **{one.name: options.pop(one.name) for one in shared})  # type: ignore[arg-type]
        serve(cluster, of_engine(cluster, **options))

    command.__doc__ = of_engine.__doc__
    command.__annotations__ = {one.name: one.annotation for one in (*shared, *own)}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
    )
    return command


@cluster_commands.command("slurm")
@engine_command
def slurm(
    cluster: Cluster,
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
) -> MakeProvisioner:
    """Submit, grow, shrink and cancel pilots on Slurm. Runs where Slurm's commands are, until it is stopped."""

    def make(folder: Path) -> Provisioner:
        from penstock.cluster.slurm import Slurm

        return Slurm(python, folder / "logs", tuple(options or ()), signal_before, pilot_dir)

    return make


def serve(cluster: Cluster, make: MakeProvisioner) -> None:
    """Do what the options say, with the engine that `make` makes."""
    from filelock import FileLock, Timeout

    from penstock.client import Conflict
    from penstock.cluster.gangs import Gang, Gangs
    from penstock.cluster.keeper import Keeper

    logging.basicConfig(level=logging.INFO, format="%(asctime)s cluster %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with profile.connect(cluster.url, cluster.token) as client:
        settings = cluster.settings(client.urls)
        provisioner = make(settings.folder)
        keeper = Keeper(client, provisioner, settings)
        if cluster.plan:
            gang = Gang(settings.cluster + "-0", max(1, cluster.least), "planned")
            print(provisioner.plan(keeper.request(Gangs(token="TOKEN"), gang)))
            return
        try:
            with FileLock(settings.folder / "lock", blocking=False):
                keeper.down() if cluster.down else _keep(keeper, cluster.every_s)
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
