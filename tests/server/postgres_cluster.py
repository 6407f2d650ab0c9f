"""A private PostgreSQL cluster for tests: found on this machine, started in a temporary folder, ended again."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INSTALL = "apt-get install -y postgresql"


def find_binaries() -> Path:
    """Return the folder that holds initdb and postgres. Raises, naming the package, if there is none."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise FileNotFoundError(f"PostgreSQL's server programs are not on this machine; install them: {INSTALL}")


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs on a Unix socket. `url`: of its maintenance database."""

    url: str
    control: tuple[str | Path, ...]
    options: tuple[str | Path, ...]
    user: pwd.struct_passwd | None

    def start(self) -> None:
        """Start it; return once it takes connections."""
        _run([*self.control, *self.options, "start"], self.user)

    def stop(self, mode: str = "fast") -> None:
        """End it and its connections; 'immediate' loses what it had not flushed. One that does not run is left so."""
        if (Path(self.control[2]) / "postmaster.pid").exists():
            _run([*self.control, "-m", mode, "stop"], self.user)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run a cluster. initdb refuses root, so as root the cluster runs as user postgres."""
    binaries = find_binaries()
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    user = _user()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    try:
        data = folder / "data"
        initdb: list[str | Path] = [binaries / "initdb", "-D", data, "-U", "penstock", "--auth=trust", "--no-sync"]
        _run([*initdb, "-E", "UTF8", "--locale=C.UTF-8"], user)
        options = f"-k {folder} -h '' -F -c full_page_writes=off -c synchronous_commit=off -c max_connections=200"
        url = f"postgresql+asyncpg://penstock@/postgres?host={folder}"
        made = Cluster(url, (binaries / "pg_ctl", "-D", data, "-w"), ("-l", folder / "log", "-o", options), user)
        made.start()
        try:
            yield made
        finally:
            made.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    return pwd.getpwnam("postgres")


def _run(command: list[str | Path], user: pwd.struct_passwd | None) -> None:
    # The server inherits what it is started with: a pipe would be held open, so output goes to a file.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
            cwd="/",
            check=False,
        )
        output.seek(0)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {output.read().decode(errors='replace')}")
