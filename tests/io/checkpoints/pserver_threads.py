"""A job with parameter servers in one process: servers on its threads, trainers with a scope each. For tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.endpoints import free_endpoints

import penstock as fluid
from penstock.errors import PenstockError
from penstock.io.checkpoints.restoring import Restored
from penstock.ps.communicator import remotes
from penstock.ps.server import ParameterServer
from penstock.serving import server as serving
from penstock.serving.storage import storage_to_serve

ROWS = 4
Optimizer = Callable[[], Any]


def adam() -> Any:
    """Return the optimizer that jobs train with if they say no other."""
    return fluid.optimizer.Adam(0.1)


class Trainer:
    """One trainer, with the manager of its checkpoints. It joins at the first step or restore."""

    def __init__(self, job: Job, index: int, folder: Path, every_steps: int | None) -> None:
        made, startup, self.loss = job.transpiled(index)
        self.program, self.scope, self.index = made.get_trainer_program(), fluid.Scope(), index
        self.position: Any = None
        self.exe = fluid.Executor()
        self.exe.run(startup, scope=self.scope)
        self.manager = fluid.io.CheckpointManager(
            folder, self.program, scope=self.scope, every_steps=every_steps, keep=10
        )

    def step(self, number: int) -> None:
        """Train one batch, and count it."""
        feed = {"x": np.full((ROWS, 3), float(number + self.index), np.float32)}
        self.exe.run(self.program, feed=feed, fetch_list=[self.loss], scope=self.scope)
        self.position = {"trainer": self.index, "batch": number + 1}
        self.manager.step(position=self.position)

    def dies(self) -> None:
        """Be gone without a word to the servers. What the manager has begun is written."""
        with suppress(PenstockError):
            self.manager.wait()
        for descriptor in remotes.opened():
            if f" {self.index}/" in descriptor:
                for link in remotes.client(descriptor).links:
                    link.give_up()  # no message is sent any more
                remotes.close(descriptor)

    def ends(self) -> None:
        """Close the manager, and leave."""
        self.manager.close()
        self.exe.close()


class Job:
    """Servers that listen, and how to make trainers. `restores`: they take what the newest checkpoint has for them."""

    def __init__(
        self, folder: Path, *, servers: int = 2, trainers: int = 1, sync: bool = True, optimizer: Optimizer = adam,
        restores: bool = True, state: Path | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.num_trainers, self.sync = folder, trainers, sync
        self._optimizer, self._restores, self._state = optimizer, restores, state
        self.endpoints = free_endpoints(servers)
        self.servers: list[ParameterServer] = []
        for index in range(servers):
            self.servers.append(self.server(index))

    def transpiled(self, trainer: int) -> tuple[Any, Any, Any]:
        """Return (transpiler, startup program, loss) of a small model, with a parameter on each of two servers."""
        main, startup = fluid.Program(), fluid.Program()
        startup.random_seed = main.random_seed = 3
        with fluid.program_guard(main, startup):
            x = fluid.layers.data("x", [3])
            out: Any = fluid.layers.fc(fluid.layers.fc(x, 4, param_attr="v"), 1, param_attr="w")
            loss = fluid.layers.mean(out * out)
            self._optimizer().minimize(loss)
        made = fluid.DistributeTranspiler()
        made.transpile(
            trainer, program=main, pservers=",".join(self.endpoints), trainers=self.num_trainers, sync_mode=self.sync,
            startup_program=startup,
        )  # fmt: skip
        return made, startup, loss

    def server(self, index: int) -> ParameterServer:
        """Start a server, as a script does that restores and serves."""
        program, startup = self.transpiled(0)[0].get_pserver_programs(self.endpoints[index])
        scope = fluid.Scope()
        fluid.Executor().run(startup, scope=scope)
        if self._restores:
            self.told: Restored | None = fluid.io.CheckpointManager(self.folder, program, scope=scope).restore()
        storage = storage_to_serve(program, scope)
        settings = replace(
            serving.settings_of(storage), start_s=60.0, lease_s=60.0, save_dirs=(self.folder,), state_dir=self._state
        )
        made = ParameterServer(settings, storage)
        made.start()
        return made

    def trainer(self, index: int = 0, *, every_steps: int | None = 1) -> Trainer:
        """Make a trainer."""
        return Trainer(self, index, self.folder, every_steps)

    def close(self) -> None:
        """Stop the servers."""
        for server in self.servers:
            server.close()


@contextmanager
def jobs(environ: Mapping[str, str]) -> Iterator[Callable[..., Job]]:
    """Make jobs; what is left of them is ended."""
    made: list[Job] = []

    def begin(folder: Path, **options: Any) -> Job:
        made.append(Job(folder, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            yield begin
        finally:
            for descriptor in remotes.opened():
                with suppress(PenstockError):
                    remotes.close(descriptor)
            for job in made:
                job.close()


def unfinished(folder: Path) -> list[str]:
    """Return what of a folder is no whole checkpoint."""
    return [name for name in os.listdir(folder) if name.startswith(("unfinished.", "removed.", "replaced."))]
