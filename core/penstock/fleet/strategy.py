"""DistributedStrategy and its factory: how a job with parameter servers trains, in four modes.

A strategy holds a config for the transpiler, one for the trainers' communicator, one for the servers, and the two
strategies that an executor takes. Each may be changed in place, replaced, or changed by a dict; an unknown key is a
SpecError by name. What the mode decides (`forced`) holds whatever is set, with a warning for what is overridden.

A mode's fields are Fluid's: there the communicator made the difference, so even Sync has `sync_mode` False, and is
known by `completely_not_async`. Source: spec 1.9.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from penstock.errors import SpecError
from penstock.exec.places import cpu_num
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy, ReduceStrategy
from penstock.logger import warn_once
from penstock.ps.settings import ServerRuntimeConfig, TrainerRuntimeConfig
from penstock.transpile.config import DistributeTranspilerConfig

_log = logging.getLogger(__name__)
T = TypeVar("T")

DEBUG_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "dump_slot": bool,
    "dump_converter": str,
    "dump_fields": (list, tuple),
    "dump_file_num": int,
    "dump_fields_path": str,
    "dump_param": (list, tuple),
}


Mode = Literal["sync", "half_async", "async", "geo"]
Value = bool | int

_RUNTIME: Mapping[str, Value] = {
    "sync_mode": False, "runtime_split_send_recv": True, "half_async": False, "completely_not_async": False,
    "geo_sgd_mode": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forced:
    """Fields of the three strategies that a mode decides, in the order in which they may be set."""

    program: Mapping[str, Value]
    execute: Mapping[str, Value]
    build: Mapping[str, Value]


def forced(mode: Mode, *, update_frequency: int = 100) -> Forced:
    """Return the fields that `mode` decides. `update_frequency`: batches between two exchanges (GEO)."""
    half = {**_RUNTIME, "half_async": True}
    programs: dict[Mode, Mapping[str, Value]] = {
        "sync": {**half, "completely_not_async": True},
        "half_async": half,
        "async": _RUNTIME,
        "geo": {**_RUNTIME, "geo_sgd_mode": True, "geo_sgd_need_push_nums": update_frequency},
    }
    barrier = {"use_thread_barrier": True} if mode in ("sync", "half_async") else {}
    return Forced(programs[mode], barrier, {"async_mode": True})


def mode_of(fields: Mapping[str, Value]) -> Mode:
    """Return the mode that the fields of a DistributeTranspilerConfig ask for; what says nothing else is half-async."""
    if fields["sync_mode"] or fields["completely_not_async"]:
        return "sync"
    if fields["geo_sgd_mode"]:  # Fluid transpiles for GEO then, whatever the others say
        return "geo"
    return "half_async" if fields["half_async"] or not fields["runtime_split_send_recv"] else "async"


class StrategyTypeError(SpecError, TypeError):
    """A strategy is given something that is neither of its own class nor a dict."""

    code = "strategy_type_error"


class DistributedStrategy:
    """One of the four modes with its configs. Made by StrategyFactory; a subclass has its `mode`."""

    mode: Mode = "async"

    def __init__(self, *, update_frequency: int = 100) -> None:
        self._forced = forced(self.mode, update_frequency=update_frequency)
        self._program_config = DistributeTranspilerConfig()
        self._trainer_runtime_config = TrainerRuntimeConfig()
        self._server_runtime_config = ServerRuntimeConfig()
        self._execute_strategy = ExecutionStrategy()
        self._build_strategy = BuildStrategy()
        self._debug_opt: dict[str, Any] = {}
        num_replicas = cpu_num()
        self._execute_strategy.num_threads = num_replicas
        if num_replicas > 1:
            self._build_strategy.reduce_strategy = ReduceStrategy.Reduce
        self._force_all()

    def get_program_config(self) -> DistributeTranspilerConfig:
        """Return the transpiler's config itself: changes of it count."""
        return self._program_config

    def set_program_config(self, config: DistributeTranspilerConfig | Mapping[str, Any]) -> None:
        """Replace the transpiler's config, or set some of its fields. Raises SpecError with nothing changed."""
        self._program_config = _configured(self._program_config, config, self._forced.program)
        self._force(self._program_config, self._forced.program, config)

    def get_trainer_runtime_config(self) -> TrainerRuntimeConfig:
        """Return the communicator's config itself."""
        return self._trainer_runtime_config

    def set_trainer_runtime_config(self, config: TrainerRuntimeConfig | Mapping[str, Any]) -> None:
        """Replace the communicator's config, or set some of its keys. Raises SpecError with nothing changed."""
        self._trainer_runtime_config = _configured(self._trainer_runtime_config, config)

    def get_server_runtime_config(self) -> ServerRuntimeConfig:
        """Return the servers' config itself."""
        return self._server_runtime_config

    def set_server_runtime_config(self, config: ServerRuntimeConfig | Mapping[str, Any]) -> None:
        """Replace the servers' config, or set some of its keys. Raises SpecError with nothing changed."""
        self._server_runtime_config = _configured(self._server_runtime_config, config)

    def get_execute_strategy(self) -> ExecutionStrategy:
        """Return the ExecutionStrategy for `with_data_parallel`."""
        return self._execute_strategy

    def set_execute_strategy(self, config: ExecutionStrategy | Mapping[str, Any]) -> None:
        """Replace the ExecutionStrategy, or set some of its fields. Raises SpecError with nothing changed."""
        self._execute_strategy = _configured(self._execute_strategy, config, self._forced.execute)
        self._force(self._execute_strategy, self._forced.execute, config)

    def get_build_strategy(self) -> BuildStrategy:
        """Return the BuildStrategy for `with_data_parallel`."""
        return self._build_strategy

    def set_build_strategy(self, config: BuildStrategy | Mapping[str, Any]) -> None:
        """Replace the BuildStrategy, or set some of its fields. Raises SpecError with nothing changed."""
        self._build_strategy = _configured(self._build_strategy, config, self._forced.build)
        self._force(self._build_strategy, self._forced.build, config)

    def get_debug_opt(self) -> dict[str, Any]:
        """Return what `set_debug_opt` was given."""
        return dict(self._debug_opt)

    def set_debug_opt(self, opt_info: Mapping[str, Any]) -> None:
        """Keep what a training from a dataset is to dump. Raises SpecError for an unknown or wrong option."""
        for name, value in opt_info.items():
            kind = DEBUG_OPTIONS.get(name)
            if kind is None:
                raise SpecError(f"there is no debug option {name!r}; there are {', '.join(DEBUG_OPTIONS)}", got=name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise StrategyTypeError(f"debug option {name!r} is {value!r}; expected {_names(kind)}", got=value)
        self._debug_opt = {"dump_file_num": 16, **opt_info} if opt_info else {}
        if opt_info:
            warn_once(_log, "debug options are stored but dump nothing: they are for training from a dataset")

    def for_transpiler(self) -> DistributeTranspilerConfig:
        """Return a copy of the transpiler's config as it is now, with what the mode decides."""
        self._force_all()
        return copy.copy(self._program_config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.mode!r}, {self._program_config!r})"

    def _force_all(self) -> None:
        """Set again what a caller may have changed in a config that it was given."""
        self._force(self._program_config, self._forced.program, {})
        self._force(self._execute_strategy, self._forced.execute, {})
        self._force(self._build_strategy, self._forced.build, {})

    def _force(self, config: Any, fields: Mapping[str, Value], given: object) -> None:
        # In an object a value is taken for the user's choice where it is not the default.
        asked = given if isinstance(given, Mapping) else {}
        defaults = type(config)._defaults
        for name, value in fields.items():
            asked_for = asked.get(name, getattr(config, name))
            if asked_for != value and (name in asked or asked_for != defaults[name]):
                text = f"{name} = {asked_for!r} is not taken: {type(self).__name__} keeps {name} = {value!r}"
                warn_once(_log, text)
            if getattr(config, name) != value:
                setattr(config, name, value)


def _configured(current: T, given: T | Mapping[str, Any], decided: Collection[str] = ()) -> T:
    """Return `given`, or a copy of `current` with a dict's items set, `decided` ones left out."""
    if isinstance(given, type(current)):
        return given
    if not isinstance(given, Mapping):
        kind = type(current).__name__
        raise StrategyTypeError(f"got {given!r} ({type(given).__name__}); expected a {kind} or a dict", got=given)
    changed = copy.copy(current)
    for name, value in given.items():
        if name not in decided:
            setattr(changed, name, value)
    return changed


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def _checked_frequency(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(
            f"update_frequency is {value!r}; expected the number of batches between two exchanges, a whole number "
            "from 1 on",
            got=value,
        )
    return value


class SyncStrategy(DistributedStrategy):
    """All trainers' gradients of a step are merged into one update."""

    mode: Mode = "sync"


class HalfAsyncStrategy(DistributedStrategy):
    """The threads of a trainer go in step; trainers do not wait for each other."""

    mode: Mode = "half_async"


class AsyncStrategy(DistributedStrategy):
    """Each push updates at once."""

    mode: Mode = "async"


class GeoStrategy(DistributedStrategy):
    """Each trainer trains by itself, and exchanges what has changed every `update_frequency` batches."""

    mode: Mode = "geo"

    def __init__(self, update_frequency: int = 100) -> None:
        super().__init__(update_frequency=_checked_frequency(update_frequency))


class StrategyFactory:
    """Makes strategies: Fluid 1.8's name. The manuals' name, DistributedStrategyFactory, is the same class."""

    @staticmethod
    def create_sync_strategy() -> SyncStrategy:
        """Return a strategy for synchronous training."""
        return SyncStrategy()

    @staticmethod
    def create_half_async_strategy() -> HalfAsyncStrategy:
        """Return a strategy for half-asynchronous training."""
        return HalfAsyncStrategy()

    @staticmethod
    def create_async_strategy() -> AsyncStrategy:
        """Return a strategy for asynchronous training."""
        return AsyncStrategy()

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> GeoStrategy:
        """Return a strategy for GEO training with an exchange every `update_frequency` batches."""
        return GeoStrategy(update_frequency)


DistributedStrategyFactory = StrategyFactory


def strategy_of(given: object) -> DistributedStrategy:
    """Return the strategy that `fleet.distributed_optimizer` is given: None is Sync; a config says its mode.

    Raises StrategyTypeError.
    """
    if given is None:
        return SyncStrategy()
    if isinstance(given, DistributedStrategy):
        return given
    if not isinstance(given, DistributeTranspilerConfig):
        raise StrategyTypeError(
            f"distributed_optimizer is given the strategy {given!r}; expected one of StrategyFactory's, or a "
            "DistributeTranspilerConfig",
            got=given,
        )
    makers: dict[Mode, Callable[[], DistributedStrategy]] = {
        "sync": SyncStrategy,
        "half_async": HalfAsyncStrategy,
        "async": AsyncStrategy,
        "geo": lambda: GeoStrategy(given.geo_sgd_need_push_nums),
    }
    asked = ("sync_mode", "completely_not_async", "runtime_split_send_recv", "geo_sgd_mode", "half_async")
    strategy = makers[mode_of({name: getattr(given, name) for name in asked})]()
    strategy.set_program_config(copy.copy(given))
    return strategy
