"""Settings of parameter servers and trainers: of the process, from the environment, and Fluid's runtime configs.

TrainerRuntimeConfig and ServerRuntimeConfig set up a trainer's communicator and a server's calls. They have exactly
Fluid's keys (spec 1.10), each seeded from the environment's FLAGS_<key>. A key that is not there, a value of the wrong
type or below the key's smallest is refused by name; what a mode does not use, and was set, is warned of once. Decimal
text counts as a number, because that is what the environment and Fluid's examples give.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.errors import SpecError
from penstock.identity import Incarnation
from penstock.logger import warn_once
from penstock.machine.cores import usable_cores
from penstock.ps.remote import PsMode
from penstock.settings import (
    CHECKPOINT_DIR,
    COMMUNICATOR,
    CPU_NUM,
    PS_DEADLINE_S,
    PS_HANDOVER_DIR,
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
    SERVER_THREADS,
    ZERO_OR_ONE,
    Setting,
)

_log = logging.getLogger(__name__)
_start_lock = threading.Lock()  # a cache calls its function in each thread that asks at the same time


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint, by the token of its servers' part, which no other save has, and the name of its folder.

    '' both: none. Servers and trainers each look for the newest one, at different times: the token says whether what
    they have found is the same.
    """

    token: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.name or "no checkpoint"


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
    `restored`: the checkpoint that its values are from. `handover_dir`: this server's own, where it leaves its state
    when it is stopped, if it has no `state_dir`; see `ps.handover`.
    """

    endpoint: str
    index: int
    fanin: int
    mode: PsMode
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
    handover_dir: Path | None = None

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
        environ: Mapping[str, str] | None = None, *, endpoint: str, index: int, fanin: int, mode: PsMode,
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
            **_of_job(environ),
        )  # fmt: skip


def handover_dir(endpoint: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return where a server that was started by hand leaves its state, in the working directory; None for others.

    An agent configures a folder, and what a launcher stops is not started again in its place. Raises SpecError.
    """
    process = Incarnation.from_environ(environ)
    if PS_STATE_DIR.read(environ) is not None or process.job or process.epoch is not None:
        return None
    return handover_path(endpoint)


def handover_path(endpoint: str) -> Path:
    """Return where a server of this endpoint leaves its state if it does, in the working directory."""
    return (Path(PS_HANDOVER_DIR) / re.sub(r"[^\w.-]", "_", endpoint)).absolute()


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """One trainer of a job. Its rank, and where the servers are, stands in its program.

    `shared_memory`: whether servers of the same host are reached through it. `channels`: whether a step may go over a
    connection of its own, to another port of the server, where it is not gRPC's.
    """

    job: str = "local"
    token: str = field(default="", repr=False)
    epoch: int = 0
    lease_s: float = 20.0
    start_s: float = 600.0
    deadline_s: float = 30.0
    tls: TlsFiles | None = None
    shared_memory: bool = True
    channels: bool = True

    @staticmethod
    def from_environ(environ: Mapping[str, str] | None = None) -> TrainerSettings:
        """Read the environment. Raises SpecError naming the variable."""
        files, transport = TlsFiles.from_environ(environ), PS_TRANSPORT.read(environ)
        return TrainerSettings(
            start_s=PS_START_S.read(environ),
            deadline_s=PS_DEADLINE_S.read(environ),
            tls=files if files.ca is not None else None,
            shared_memory=transport == "auto",
            channels=transport != "grpc",
            **_of_job(environ),
        )


def started_ns() -> int:
    """Return the default incarnation of this process: larger when it is started again. Thread-safe."""
    with _start_lock:
        return _started_ns()


@functools.cache
def _started_ns() -> int:
    return time.time_ns()


def _of_job(environ: Mapping[str, str] | None) -> dict[str, Any]:
    """Fields that servers and trainers share."""
    process = Incarnation.from_environ(environ)
    return {
        "job": process.job or "local",
        "token": PS_TOKEN.read(environ),
        "epoch": started_ns() if process.epoch is None else process.epoch,
        "lease_s": PS_LEASE_S.read(environ),
    }


Key = Setting[int | None]
"""One setting. Its default None: the number of training threads (CPU_NUM)."""
TRAINER_KEYS: Mapping[str, Key] = {key.name.removeprefix("FLAGS_"): key for key in COMMUNICATOR}
SERVER_KEYS: Mapping[str, Key] = {key.name.removeprefix("FLAGS"): key for key in SERVER_THREADS}
_WITHOUT_EFFECT = {
    "rpc_deadline": f"{PS_DEADLINE_S} is how long a server may be unreachable",
    "rpc_retry_times": f"a call is retried until {PS_DEADLINE_S} has passed",
}

_LOCK_STEP = frozenset(
    {
        "communicator_max_merge_var_num",
        "communicator_send_wait_times",
        "communicator_thread_pool_size",
        "communicator_send_queue_size",
    }
)
MODE_KEYS: Mapping[PsMode, frozenset[str]] = {
    "sync": _LOCK_STEP,
    "half_async": _LOCK_STEP,
    "async": frozenset(k for k in TRAINER_KEYS if k.startswith("communicator_")),
    "geo": frozenset({"communicator_thread_pool_size", "communicator_send_wait_times"}),
}
# Keys that Fluid sends in a mode, and that nothing goes by here: a step does not wait for more gradients than its own.
_IDLE: Mapping[PsMode, frozenset[str]] = {
    "sync": frozenset({"communicator_send_wait_times", "communicator_thread_pool_size"}),
    "half_async": frozenset({"communicator_send_wait_times"}),
    "async": frozenset(),
    "geo": frozenset({"communicator_send_wait_times"}),
}
_FORCED = ("communicator_max_merge_var_num", "communicator_send_queue_size")
_TABLE_WIDTH = 50


@dataclass(frozen=True, slots=True)
class CommunicatorSettings:
    """What a communicator goes by: TrainerRuntimeConfig as its mode makes it.

    `merge_wait_s`: how long a merge waits for another gradient after the last one came.
    """

    max_merge_var_num: int
    send_queue_size: int
    independent_recv_thread: bool
    min_send_grad_num_before_recv: int
    thread_pool_size: int
    merge_wait_s: float
    is_sgd_optimizer: bool


def num_training_threads(environ: Mapping[str, str] | None = None) -> int:
    """Return CPU_NUM, else the number of cores. Raises SpecError."""
    return CPU_NUM.read(environ) or usable_cores()


class RuntimeConfig(MutableMapping[str, int]):
    """A fixed set of settings by name; each is an item (`config[key]`) and an attribute (`config.key`).

    `runtime_configs` is the object itself, for scripts that write `config.runtime_configs[key] = value`.
    """

    KEYS: ClassVar[Mapping[str, Key]]
    _values: dict[str, int]
    _given: set[str]

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        """Take defaults and FLAGS_<key> of the environment. Raises SpecError naming the variable that is wrong."""
        self.__dict__.update(_values={}, _given=set())
        for name, key in self.KEYS.items():
            value = key.read(environ)
            self._values[name] = num_training_threads(environ) if value is None else value
            if (key.text(environ) or "").strip():
                self._given.add(name)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Return the defaults with `values` set. Raises SpecError: unknown key, wrong value."""
        config = cls()
        for name, value in values.items():
            config._set(name, value)
        return config

    @property
    def runtime_configs(self) -> Self:
        """The settings as a mapping."""
        return self

    def _set(self, name: object, value: object) -> None:
        kind = type(self).__name__
        self._known(name)
        assert isinstance(name, str)
        self._values[name] = _checked(f"{kind}.{name}", self.KEYS[name], value)
        self._given.add(name)

    def _known(self, name: object) -> None:
        if name in self.KEYS:
            return
        close = difflib.get_close_matches(str(name), list(self.KEYS), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(self.KEYS)}"
        raise SpecError(f"{type(self).__name__} has no key {name!r}; {hint}", got=name)

    def __getitem__(self, name: str) -> int:
        self._known(name)
        return self._values[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._set(name, value)

    def __delitem__(self, name: str) -> None:
        raise SpecError(f"{type(self).__name__}: {name!r} can be set, but not taken out", got=name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    def __contains__(self, name: object) -> bool:
        return name in self.KEYS

    def __getattr__(self, name: str) -> int:
        if name not in self.KEYS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        self._set(name, value)

    def __copy__(self) -> Self:
        """Return a config of its own with the same settings."""
        copied = type(self)(environ={})
        copied.__dict__.update(_values=dict(self._values), _given=set(self._given))
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        return table(type(self).__name__, self._values)


class TrainerRuntimeConfig(RuntimeConfig):
    """What a trainer's communicator goes by. See TRAINER_KEYS, and MODE_KEYS for what each mode uses."""

    KEYS = TRAINER_KEYS

    def communicator_flags(self, mode: PsMode) -> dict[str, int]:
        """Return the settings that `mode` uses."""
        return {name: self._values[name] for name in self.KEYS if name in MODE_KEYS[mode]}

    def settings(self, mode: PsMode, *, num_threads: int | None = None) -> CommunicatorSettings:
        """Return what a communicator of `mode` goes by, and warn once of what was set in vain.

        In lock-step (sync, half_async) a merge is one gradient of each thread: max_merge_var_num and send_queue_size
        are then `num_threads` (CPU_NUM).
        """
        values = dict(self._values)
        threads = num_threads or num_training_threads()
        for name in sorted(self._given):
            if name in _WITHOUT_EFFECT:
                text = f"{name} = {values[name]} is stored but has no effect: {_WITHOUT_EFFECT[name]}"
                warn_once(_log, text)
            elif name not in MODE_KEYS[mode] - _IDLE[mode]:
                warn_once(_log, f"{name} = {values[name]} has no effect in {mode} mode")
        for name in _FORCED if mode in ("sync", "half_async") else ():
            if values[name] != threads:
                text = f"{name} is {values[name]}, but {mode} mode merges one gradient of each training thread: "
                warn_once(_log, f"WARNING: {text}{threads} (CPU_NUM) is used")
                values[name] = threads
        return CommunicatorSettings(
            max_merge_var_num=values["communicator_max_merge_var_num"],
            send_queue_size=values["communicator_send_queue_size"],
            independent_recv_thread=bool(values["communicator_independent_recv_thread"]),
            min_send_grad_num_before_recv=values["communicator_min_send_grad_num_before_recv"],
            thread_pool_size=values["communicator_thread_pool_size"],
            merge_wait_s=0.01 * values["communicator_send_wait_times"],
            is_sgd_optimizer=bool(values["communicator_is_sgd_optimizer"]),
        )


class ServerRuntimeConfig(RuntimeConfig):
    """How many calls of each kind a server works on at once. A key may be given without its leading underscore too."""

    KEYS = SERVER_KEYS

    def num_updates_at_once(self) -> int | None:
        """Return how many updates a server makes at the same time; None: the default. Warns of what was set in vain."""
        for name in ("_rpc_get_thread_num", "_rpc_prefetch_thread_num"):
            if name in self._given:
                warn_once(_log, f"{name} = {self[name]} has no effect: any free thread reads")
        return self["_rpc_send_thread_num"] if "_rpc_send_thread_num" in self._given else None

    def _set(self, name: object, value: object) -> None:
        super()._set(f"_{name}" if f"_{name}" in self.KEYS else name, value)


def table(title: str, values: Mapping[str, object]) -> str:
    """Return settings as a table of at least 50 columns."""
    widest = max((len(name) for name in values), default=0)
    width = max(_TABLE_WIDTH, widest + 10)
    lines = [f"{name:<{widest + 2}}{value!s:>{width - widest - 2}}" for name, value in values.items()]
    return "\n".join([title.center(width, "-"), *lines, "-" * width])


def _checked(what: str, key: Key, value: object) -> int:
    is_number = isinstance(value, int) and (not isinstance(value, bool) or key.values is ZERO_OR_ONE)
    if not is_number and not isinstance(value, str):
        expected = key.values.expected
        raise SpecError(f"{what} is {value!r} ({type(value).__name__}); expected {expected}", got=value)
    return key.parsed(str(int(value) if isinstance(value, bool) else value).strip(), what) or 0
