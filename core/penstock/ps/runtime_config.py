"""TrainerRuntimeConfig and ServerRuntimeConfig: how a trainer's communicator and a server's calls are set up.

Exactly Fluid's keys (spec 1.10), each seeded from the environment's FLAGS_<key>. A key that is not there, a value of
the wrong type or below the key's smallest is refused by name; what a mode does not use, and was set, is warned of once.
Decimal text counts as a number, because that is what the environment and Fluid's examples give. Pure data.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Self

from penstock.errors import SpecError
from penstock.log import warn_once
from penstock.machine.cores import usable_cores
from penstock.ps.remote import PsMode
from penstock.settings import COMMUNICATOR, CPU_NUM, PS_DEADLINE_S, SERVER_THREADS, ZERO_OR_ONE, Setting

_log = logging.getLogger(__name__)
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
                warn_once(_log, text, self)
            elif name not in MODE_KEYS[mode] - _IDLE[mode]:
                warn_once(_log, f"{name} = {values[name]} has no effect in {mode} mode", self)
        for name in _FORCED if mode in ("sync", "half_async") else ():
            if values[name] != threads:
                text = f"{name} is {values[name]}, but {mode} mode merges one gradient of each training thread: "
                warn_once(_log, f"WARNING: {text}{threads} (CPU_NUM) is used", self)
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
                text = f"{name} = {self[name]} has no effect: reads are answered by whichever thread is free"
                warn_once(_log, text, self)
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
