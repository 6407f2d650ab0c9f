"""A server in a process of its own: `python -m tests.ps.killable_server <settings as JSON>`; prints its port."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tests.ps.torch_storage import TorchStorage
from tests.support.endpoints import free_endpoint
from tests.support.nursery import Forked, Nursery

from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,)}
TABLES = {"t": (2, 100)}


class KillableServer:
    """Started at once; the endpoint of the first start is kept by those after it. `folder`: of its files."""

    def __init__(self, nursery: Nursery, folder: Path, **settings: Any) -> None:
        self.settings = {"endpoint": free_endpoint(), **settings}
        self._nursery, self._folder = nursery, folder
        self._starts = itertools.count()
        self.start()

    def start(self) -> None:
        """Start, and wait until it listens."""
        argv = ["-m", "tests.ps.killable_server", json.dumps(self.settings)]
        self.process = Forked(self._nursery, self._folder / f"server{next(self._starts)}", argv, {})
        self.settings["endpoint"] = f"127.0.0.1:{int(self.process.first_line())}"

    @property
    def endpoint(self) -> str:
        """host:port."""
        return str(self.settings["endpoint"])

    def kill(self) -> None:
        """Kill it as a machine would: no code of its own runs any more."""
        self.process.close()


def main() -> None:
    """Serve."""
    given = json.loads(sys.argv[1])
    given["state_dir"] = Path(given["state_dir"])
    settings = ServerSettings(index=0, job="j", token="t", **given)
    storage = TorchStorage(SHAPES, TABLES, sync=settings.mode == "sync")
    with ParameterServer(settings, storage) as server:
        server.start()
        print(server.port, flush=True)
        server.wait()


if __name__ == "__main__":
    main()
