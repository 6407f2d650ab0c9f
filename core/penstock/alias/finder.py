"""The import of `paddle` and of everything below it, answered with Penstock.

A module of Fluid is a `FluidModule`, whose attributes are looked up in the table (`names.py`) at their first use, or
one of Penstock's own modules. A name that Penstock lacks is an AttributeError, or an ImportError where it is imported,
with where it lives in Fluid and what to use instead; in modules that the table calls `late` it is one where it is used,
because scripts import such names for parts of them that do not run.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.alias.names import Name, Standing, Table, table
from penstock.alias.notes import under_tracebacks
from penstock.logger import warn_once
from penstock.settings import PADDLE_ALIAS

_log = logging.getLogger(__name__)
ROOT = "paddle"
SHIM = Path(__file__).with_name("path")
"""A folder for PYTHONPATH: `import paddle` finds a package there that installs the alias."""
VERSION = "1.8.5"


class AbsentName:
    """A name that is not there. Nothing is an instance of it; any other use is an AttributeError that says so."""

    def __init__(self, refusal: str) -> None:
        self.__dict__["_refusal"] = refusal

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._refusal, name=name, obj=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(self._refusal)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise AttributeError(self._refusal)

    def __instancecheck__(self, instance: object) -> bool:
        return False


class FluidModule(ModuleType):
    """A module of Fluid."""

    def __init__(self, path: str, names: Table) -> None:
        super().__init__(path)
        self.__path__: list[str] = []
        self._names: Table = names
        if path == ROOT:
            self.__version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [one for one in self._names.public(self.__name__) if self._is_there(one)]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        found = self._look_up(name)
        if found.standing in (Standing.MISSING, Standing.UNKNOWN):
            module = self._names.module_at(self.__name__, name)
            if module:
                return importlib.import_module(module)
            if found.standing is Standing.MISSING and self._names.is_late(self.__name__):
                return AbsentName(found.refusal)
            raise AttributeError(found.refusal, name=name, obj=None)  # of the module, Python would add a guess
        self.__dict__[name] = found.value
        return found.value

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            isinstance(value, ModuleType)
            and value.__name__.endswith(f".{name}")
            and self._look_up(name).value is not None
        ):
            return  # `import paddle.batch` leaves `paddle.batch` the function that it is in Fluid
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})

    def _is_there(self, name: str) -> bool:
        return self._look_up(name).value is not None or bool(self._names.module_at(self.__name__, name))

    def _look_up(self, name: str) -> Name:
        return self._names.look_up(self.__name__, name)


class Finder(MetaPathFinder, Loader):
    """Finds `paddle` and what is below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Fluid. Raises ImportError for a name that is not there."""
        if fullname.partition(".")[0] != ROOT:
            return None
        names = table()
        if fullname in names.modules:
            return ModuleSpec(fullname, self, is_package=True)
        module, _, name = fullname.rpartition(".")
        found = names.look_up(module, name)
        kind = ModuleNotFoundError if found.standing is Standing.UNKNOWN else ImportError
        raise kind(found.refusal, name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module of Fluid."""
        return FluidModule(spec.name, table())

    def exec_module(self, module: ModuleType) -> None:
        """Put one of Penstock's own modules in its place, where the table says so."""
        whole = table().modules[module.__name__].whole
        if whole:
            sys.modules[module.__name__] = importlib.import_module(f"penstock.{whole}")


def installed_paddle(path: Sequence[str] | None = None) -> str | None:
    """Return the file of a real `paddle` that `import paddle` would find in `path`, by default `sys.path`."""
    loaded = sys.modules.get(ROOT)
    if loaded is not None and path is None:
        is_ours = isinstance(loaded, FluidModule) or str(loaded.__file__).startswith(str(SHIM))
        return None if is_ours else str(loaded.__file__)
    kept = [entry for entry in (sys.path if path is None else path) if Path(entry or ".").absolute() != SHIM]
    spec = PathFinder.find_spec(ROOT, kept)
    return spec.origin if spec is not None else None  # a folder without __init__.py has none


def install(*, shadow: bool = False) -> bool:
    """Make `import paddle` mean Penstock in this process; return whether it does.

    A real paddle that is installed stays, with a warning, without `shadow` and PENSTOCK_PADDLE_ALIAS=shadow.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return True
    real = installed_paddle()
    if real is not None and not (shadow or PADDLE_ALIAS.read() == "shadow"):
        warn_once(
            _log,
            f"`import paddle` stays the one that is installed, {real}: set {PADDLE_ALIAS}=shadow, or call "
            "penstock.paddle_alias.install(shadow=True), to get Penstock in its place",
        )
        return False
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())
    return True


def take_over() -> None:
    """Put the alias in the place of the package in `SHIM`, which is being imported."""
    install(shadow=True)
    under_tracebacks()
    importlib.import_module(ROOT)
