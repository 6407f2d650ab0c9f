"""fluid.communicator.Communicator: how a trainer's program exchanges with its servers, set up, started and stopped.

A program names its servers, not its communicator: `start` opens what the program's operators will then find
(`ps.remote`). Stopping sends everything that waits. Not thread-safe: the thread that starts it stops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import get_args

from penstock.errors import SpecError
from penstock.program.program import Program
from penstock.ps.communicators.half_async import HalfAsyncCommunicator
from penstock.ps.opening import communicate, open_client, queue_depths
from penstock.ps.remote import REMOTE_TYPES, Descriptor, PsMode, Remote
from penstock.ps.remote_ops import remotes
from penstock.ps.runtime_config import TrainerRuntimeConfig


class DistributedMode(IntEnum):
    """Fluid's numbers of the modes."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


def open_communicator(descriptor: Descriptor, config: TrainerRuntimeConfig | None = None) -> Remote:
    """Connect a trainer to its servers through the communicator of its mode.

    Raises SpecError, Unavailable, PeerError.
    """
    client = open_client(descriptor)
    try:
        return communicate(client, config)
    except BaseException:
        client.close()
        raise


def set_up(descriptor: Descriptor, config: TrainerRuntimeConfig) -> None:
    """Have this descriptor's remote opened with a communicator, from now on in this process."""
    remotes.openers[str(descriptor)] = lambda opened: open_communicator(opened, config)


def descriptor_of(program: Program) -> Descriptor:
    """Return the servers that a trainer's program talks to. Raises SpecError for a program that talks to none."""
    for op in program.operators:
        if op.type in REMOTE_TYPES:
            # The only text with spaces among the arguments: names have none.
            return Descriptor.parse(next(a for a in op.args if isinstance(a, str) and " " in a))
    raise SpecError(
        "this program has no operator that talks to parameter servers; expected DistributeTranspiler's "
        "get_trainer_program(), or fleet.main_program"
    )


class Communicator:
    """The exchange of one trainer program. `envs`: a TrainerRuntimeConfig, or a dict with its keys.

    `mode` and `kwargs` are Fluid's; they have to agree with the program.
    """

    def __init__(
        self,
        program: Program,
        mode: int | str | None = None,
        kwargs: Mapping[str, object] | None = None,
        envs: TrainerRuntimeConfig | Mapping[str, object] | None = None,
    ) -> None:
        self.descriptor = descriptor_of(program)
        if mode is not None and _mode_named(mode) != self.descriptor.mode:
            raise SpecError(
                f"the program was made for {self.descriptor.mode} mode, but the communicator is asked for "
                f"{_mode_named(mode)}",
                got=mode,
                expected=self.descriptor.mode,
            )
        self.config = (
            envs if isinstance(envs, TrainerRuntimeConfig) else TrainerRuntimeConfig.from_dict(dict(envs or {}))
        )
        _check_kwargs(self.descriptor, kwargs or {})

    def start(self) -> None:
        """Connect to the servers and start the threads; nothing if it runs. Raises SpecError, Unavailable."""
        if not self.is_running():
            set_up(self.descriptor, self.config)
            self._remote()

    def stop(self) -> None:
        """Send what waits, leave the servers, end the threads; nothing if it does not run.

        Raises the background's error if no call has raised it yet.
        """
        remotes.openers.pop(str(self.descriptor), None)
        remotes.close(str(self.descriptor))

    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return str(self.descriptor) in remotes.opened()

    def queue_depths(self) -> dict[str, int]:
        """Return how many gradients wait in this trainer, by variable."""
        return queue_depths(self._remote()) if self.is_running() else {}

    def set_threads(self, num: int) -> None:
        """Half-async: set how many threads will train with this program, before they begin. Else without effect."""
        remote = self._remote()
        if isinstance(remote, HalfAsyncCommunicator):
            remote.set_participants(num)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Train within: when it ends, in whatever way, the other threads do not wait for this one any more."""
        remote = self._remote()
        with remote.participant() if isinstance(remote, HalfAsyncCommunicator) else nullcontext():
            yield

    def _remote(self) -> Remote:
        return remotes.get(str(self.descriptor))


def _mode_named(mode: int | str) -> PsMode:
    for name in get_args(PsMode):
        if mode in (name, name.upper()) or (isinstance(mode, int) and mode == DistributedMode[name.upper()]):
            found: PsMode = name
            return found
    raise SpecError(f"no mode is called {mode!r}; there are {', '.join(m.name for m in DistributedMode)}", got=mode)


def _check_kwargs(descriptor: Descriptor, kwargs: Mapping[str, object]) -> None:
    expected: dict[str, object] = {
        "trainers": descriptor.num_trainers,
        "trainer_id": descriptor.trainer,
        "pserver_endpoints": list(descriptor.endpoints),
        "geo_need_push_nums": descriptor.push_every,
    }
    for name, value in kwargs.items():
        given = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
        if name not in expected and name != "push_vars":  # what is pushed stands in the program's operators
            raise SpecError(f"Communicator has no setting {name!r}; kwargs has {', '.join(expected)}", got=name)
        if name in expected and given != expected[name]:
            raise SpecError(f"{name} is {value!r}, but the program says {expected[name]!r}", got=value)
