"""The public surface: what scripts, clients and commands of users rely on, one line each.

`python -m tools.surface` prints it sorted: names with their parameters, routes of the REST API with their fields,
and commands with their options. tests/repository/test_public_surface.py compares it with
tests/golden/surface.txt: what is removed or changed breaks a script, and is a decision (an ADR); what is added is
recorded by `python -m tools.surface --write`. Defaults are compared where they are plain values.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "surface.txt"
PLAIN = (bool, int, float, str, bytes, type(None))
IMPORTED = (
    "penstock.client",
    "penstock.async_client",
    "penstock.dataset.readers",
    "penstock.errors",
    "penstock.incubate.fleet.base.role_maker",
    "penstock.incubate.fleet.parameter_server.distribute_transpiler",
    "penstock.incubate.data_generator",
    "penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy",
    "penstock.paddle_alias",
)
"""Modules that scripts import by their path; the others are attributes of `penstock`."""
FUNCTIONS = {"penstock.distributed.collective": ("join",)}
"""Of modules whose other names are not for scripts."""


def lines() -> list[str]:
    """Return the whole surface, sorted."""
    return sorted({*python_names(), *routes(), *commands()})


# ---------------------------------------------------------------- Python


def python_names() -> Iterator[str]:
    """Name what `import penstock` gives, and the modules that scripts import."""
    root = importlib.import_module("penstock")
    names = (*root._WHERE, *root._MODULES, "data", "embedding")  # dir() has what else was imported, too
    yield from _members("penstock", {name: getattr(root, name) for name in names})
    for path in IMPORTED:
        yield from _module(path, importlib.import_module(path))
    for path, functions in FUNCTIONS.items():
        module = importlib.import_module(path)
        yield from _members(path, {name: getattr(module, name) for name in functions})


def _members(path: str, found: Mapping[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        full = f"{path}.{name}"
        if name.startswith("_") or name == "annotations" or not _is_ours(value):
            continue
        if isinstance(value, ModuleType):
            yield from _module(full, value)
        elif isinstance(value, type):
            yield from _class(full, value)
        elif callable(value):
            yield full + parameters(value)
        elif isinstance(value, PLAIN):
            yield f"{full} = {value!r}"


def _module(path: str, module: ModuleType) -> Iterator[str]:
    """Name what `__all__` lists; without it, what was defined in the module or its package."""
    own = module.__name__
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith(own)
    ]
    yield from _members(path, {name: getattr(module, name) for name in names})


def _class(path: str, cls: type) -> Iterator[str]:
    yield path + parameters(cls)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("penstock")]
    for name in sorted({name for base in ours for name in vars(base) if not name.startswith("_")}):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            yield f"{path}.{name}{parameters(getattr(cls, name))}"
        elif isinstance(value, PLAIN):
            yield f"{path}.{name} = {value!r}"
        else:
            yield f"{path}.{name}"


def parameters(function: Any) -> str:
    """Write the parameters of a callable without their types: `(input, size, act=None, *, name=…)`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(?)"
    bare = [
        one.replace(annotation=one.empty, default=one.default if one.default is one.empty else _Default(one.default))
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


class _Default:
    """A default value, of which plain ones are written."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value) if type(self.value) in PLAIN else "…"


def _is_ours(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "penstock")
    return isinstance(value, PLAIN) or str(module).startswith("penstock")


# ---------------------------------------------------------------- REST and the command


def routes() -> Iterator[str]:
    """Name each route with its parameters, and each field of its bodies."""
    app, settings = (importlib.import_module(f"penstock_server.{name}") for name in ("app", "settings"))
    with tempfile.TemporaryDirectory() as folder:
        document = app.create_app(settings.Settings(state_dir=Path(folder))).openapi()
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            given = sorted(one["name"] for one in about.get("parameters", []))
            yield f"{method.upper()} {path} ({', '.join(given)}) -> {', '.join(sorted(about['responses']))}"
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            needed = "" if field in schema.get("required", []) else "?"
            yield f"schema {name}.{field}{needed}: {_type(about)}"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"])
    inner = f"[{_type(schema['items'])}]" if "items" in schema else ""
    values = f" {schema['enum']}" if "enum" in schema else ""
    return f"{schema.get('type', 'any')}{inner}{values}"


def commands() -> Iterator[str]:
    """Name each command with its options."""
    typer, app = importlib.import_module("typer"), importlib.import_module("penstock.cli")
    yield from _command("penstock", typer.main.get_command(app.app))


def _command(path: str, command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield f"$ {path} {'/'.join(parameter.opts + parameter.secondary_opts)}"
    for name, inner in getattr(command, "commands", {}).items():
        yield f"$ {path} {name}"
        yield from _command(f"{path} {name}", inner)


def main() -> int:
    """Print the surface, or write the golden file."""
    parser = argparse.ArgumentParser(prog="python -m tools.surface", description="Print the public surface.")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name} instead of printing")
    text = "\n".join(lines()) + "\n"
    if parser.parse_args().write:
        GOLDEN.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
