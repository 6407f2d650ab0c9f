"""Settings of a parameter server and of a trainer of a job, from the environment and the program. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import SpecError
from penstock.identity import Incarnation
from penstock.ps.origin import Copy
from penstock.settings import (
    CHECKPOINT_DIR,
    PS_DEADLINE_S,
    PS_LEASE_S,
    PS_SAVE_DIRS,
    PS_SNAPSHOT_S,
    PS_START_S,
    PS_STATE_DIR,
    PS_TLS_CA,
    PS_TLS_CERT,
    PS_TLS_KEY,
    PS_TOKEN,
    PS_TRANSPORT,
)  # fmt: skip

Mode = Literal["sync", "half_async", "async", "geo"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. A trainer needs `ca`; a server `cert` and `key`."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @staticmethod
    def from_environ(environ: Mapping[str, str] | None) -> TlsFiles:
        """Read the environment."""
        return TlsFiles(PS_TLS_CA.read(environ), PS_TLS_CERT.read(environ), PS_TLS_KEY.read(environ))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server of a job.

    `endpoint`: host:port to listen at. `fanin`: how many trainers have to join before the first round closes.
    `num_threads`: blocks that are updated at the same time. `save_dirs`: where `save` may write, beside `state_dir`.
    `num_servers`: of the job; needed to go on from the state that another number of servers left (0: not said).
    `restored`: the checkpoint that its values are from.
    """

    endpoint: str
    index: int
    fanin: int
    mode: Mode
    job: str = "local"
    token: str = field(default="", repr=False)
    epoch: int = 0
    lease_s: float = 20.0
    start_s: float = 600.0
    state_dir: Path | None = None
    snapshot_every_s: float = 60.0
    save_dirs: tuple[Path, ...] = ()
    num_threads: int = 2
    tls: TlsFiles | None = None
    num_servers: int = 0
    restored: Copy = field(default_factory=Copy)

    @property
    def name(self) -> str:
        """This server's part of a folder that all servers write to."""
        return f"{self.index}-of-{self.num_servers}" if self.num_servers else str(self.index)

    @property
    def folder(self) -> Path | None:
        """This server's own part of `state_dir`."""
        return None if self.state_dir is None else self.state_dir / self.name

    @staticmethod
    def from_environ(
        environ: Mapping[str, str] | None = None, *, started_ns: int, endpoint: str, index: int, fanin: int, mode: Mode,
        num_threads: int = 2, num_servers: int = 0, restored: Copy | None = None,
    ) -> ServerSettings:  # fmt: skip
        """Read the environment; the rest stands in the program. Raises SpecError naming the variable."""
        if fanin < 1 or index < 0 or num_threads < 1:
            raise SpecError(
                f"a server has index >= 0, fanin >= 1, num_threads >= 1; not {index}, {fanin}, {num_threads}"
            )
        files = TlsFiles.from_environ(environ)
        if (files.cert is None) != (files.key is None):
            raise SpecError(f"{PS_TLS_CERT} and {PS_TLS_KEY} go together; one of them is not set")
        checkpoints = CHECKPOINT_DIR.read(environ)
        return ServerSettings(
            endpoint=endpoint, index=index, fanin=fanin, mode=mode, num_threads=num_threads,
            num_servers=num_servers, restored=restored or Copy(),
            start_s=PS_START_S.read(environ),
            state_dir=PS_STATE_DIR.read(environ),
            snapshot_every_s=PS_SNAPSHOT_S.read(environ),
            save_dirs=(*PS_SAVE_DIRS.read(environ), *((checkpoints,) if checkpoints else ())),
            tls=files if files.cert is not None else None,
            **_of_job(environ, started_ns),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """One trainer of a job. Who it is, and where the servers are, stands in its program.

    `shared_memory`: whether servers of the same host are reached through it.
    """

    job: str = "local"
    token: str = field(default="", repr=False)
    epoch: int = 0
    lease_s: float = 20.0
    start_s: float = 600.0
    deadline_s: float = 30.0
    tls: TlsFiles | None = None
    shared_memory: bool = True

    @staticmethod
    def from_environ(environ: Mapping[str, str] | None = None, *, started_ns: int) -> TrainerSettings:
        """Read the environment. Raises SpecError naming the variable."""
        files = TlsFiles.from_environ(environ)
        return TrainerSettings(
            start_s=PS_START_S.read(environ),
            deadline_s=PS_DEADLINE_S.read(environ),
            tls=files if files.ca is not None else None,
            shared_memory=PS_TRANSPORT.read(environ) == "auto",
            **_of_job(environ, started_ns),
        )


def _of_job(environ: Mapping[str, str] | None, started_ns: int) -> dict[str, Any]:
    """Fields that servers and trainers share."""
    process = Incarnation.from_environ(environ)
    return {
        "job": process.job or "local",
        "token": PS_TOKEN.read(environ),
        "epoch": started_ns if process.epoch is None else process.epoch,
        "lease_s": PS_LEASE_S.read(environ),
    }
