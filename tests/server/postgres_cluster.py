"""A private PostgreSQL cluster for tests: found on this machine, started in a temporary folder, ended again."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

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
    folder = _make(find_binaries())
    try:
        made = _at(folder)
        made.start()
        try:
            yield made
        finally:
            made.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_cluster(meeting: Path, prepare: Callable[[Cluster], None]) -> Iterator[Cluster]:
    """Run a cluster for all processes that name the same folder: the first starts and prepares it, the last ends it.

    A process that was killed counts as gone.
    """
    lock, users = FileLock(meeting / "postgres.lock"), meeting / "postgres.users"
    with lock:
        folder, pids = _users(users)
        if folder is None:
            folder = _make(find_binaries())
            users.write_text(str(folder))
            _at(folder).start()
            prepare(_at(folder))
        users.write_text("\n".join([str(folder), *pids, str(os.getpid())]))
    try:
        yield _at(folder)
    finally:
        with lock:
            folder, pids = _users(users)
            assert folder is not None
            users.write_text("\n".join([str(folder), *(pid for pid in pids if pid != str(os.getpid()))]))
            if pids == [str(os.getpid())]:
                _at(folder).stop("immediate")
                shutil.rmtree(folder, ignore_errors=True)
                users.unlink()


def _users(file: Path) -> tuple[Path | None, list[str]]:
    """Return the folder of a cluster, None if there is none, and the processes that use it."""
    if not file.exists():
        return None, []
    folder, *pids = file.read_text().splitlines()
    return Path(folder), [pid for pid in pids if Path("/proc", pid).exists()]


def _make(binaries: Path) -> Path:
    """Make a cluster that does not run; return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    user = _user()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    initdb: list[str | Path] = [binaries / "initdb", "-D", folder / "data", "-U", "penstock", "--auth=trust"]
    _run([*initdb, "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"], user)
    return folder


def _at(folder: Path) -> Cluster:
    options = f"-k {folder} -h '' -F -c full_page_writes=off -c synchronous_commit=off -c max_connections=200"
    url = f"postgresql+asyncpg://penstock@/postgres?host={folder}"
    control = (find_binaries() / "pg_ctl", "-D", folder / "data", "-w")
    return Cluster(url, control, ("-l", folder / "log", "-o", options), _user())


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
