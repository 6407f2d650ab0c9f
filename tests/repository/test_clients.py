"""The clients of the REST API: the asynchronous one is that of today's synchronous one, and both know the API."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tools.async_client import SOURCE, TARGET, generated

from penstock.async_client import AsyncClient
from penstock.client import Client
from penstock_server.app import create_app
from penstock_server.settings import Settings

SENDING = {"_json": 1, "_pages": 0, "_request": 1}
"""Methods that send a request, and which of their arguments is its path."""


def test_asynchronous_client_is_generated_from_todays() -> None:
    assert TARGET.read_text(encoding="utf-8") == generated(SOURCE.read_text(encoding="utf-8"))


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, str]:
        found = {name: one for name, one in vars(client).items() if inspect.isfunction(one) and name[0] != "_"}
        return {name: re.sub(r"AsyncIterator", "Iterator", str(inspect.signature(one))) for name, one in found.items()}

    assert methods(AsyncClient) == methods(Client)
    others = [one for one in vars(AsyncClient).values() if inspect.isfunction(one) and one.__name__ != "__init__"]
    assert all(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in others)


def sent() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield method, path (with {} for what is put in) and literal query parameters of each request of the client."""
    for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name not in SENDING:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            yield from (_request(call, _assigned(node)) for call in calls if _name(call) in SENDING)


def _assigned(node: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return what the variables of a function were given."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Assign)]
    return {ast.unparse(target): one.value for one in found for target in one.targets}


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _request(call: ast.Call, assigned: dict[str, ast.expr]) -> tuple[str, str, frozenset[str]]:
    place = SENDING[_name(call)]
    method = ast.literal_eval(call.args[0]) if place else "GET"
    path = assigned.get(ast.unparse(call.args[place]), call.args[place])
    params = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "params")]
    given = [assigned.get(ast.unparse(one), one) for one in params]
    keys = [key for one in given if isinstance(one, ast.Dict) for key in one.keys]
    return method, _template(path), frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))


def _template(path: ast.expr) -> str:
    parts = path.values if isinstance(path, ast.JoinedStr) else [path]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def test_requests_of_the_client_are_those_of_the_api(tmp_path: Path) -> None:
    paths = create_app(Settings(state_dir=tmp_path)).openapi()["paths"]
    requests = [one for one in sent() if one[1] != "/openapi.json"]
    assert len(requests) > 35
    strange = []
    for method, path, params in requests:
        pattern = re.escape(f"/api/v1{path}").replace(r"\{\}", "[^/:]+")
        items = [item for one, item in paths.items() if re.fullmatch(pattern, one)]
        operations = [item[method.lower()] for item in items if method.lower() in item]
        known = {one["name"] for operation in operations for one in operation.get("parameters", [])}
        if not operations or params - known:
            strange.append((method, path, sorted(params - known)))
    assert strange == []
    assert sum(bool(params) for _, _, params in requests) > 5
