"""Every HTTP route and websocket of the app refuses who brings no credentials, but for a list that stands here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute
from tests.server.harness import Server
from tests.support.waiting import LIMIT_S
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import InvalidStatus

from penstock_server.app import ROUTERS, app_of
from penstock_server.auth.principal import scopes_of
from penstock_server.auth.wrong import WrongSecrets
from penstock_server.guard import guard

pytestmark = pytest.mark.asyncio

OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("POST", "/api/v1/session"),  # opened by a one-time login code
    ("POST", "/api/v1/nodes"),  # opened by a one-time join token
    ("GET", "/{path:path}"),  # the dashboard's files
    ("HEAD", "/{path:path}"),
}


def http_routes() -> Iterator[tuple[str, APIRoute]]:
    for route in itertools.chain.from_iterable(router.routes for router in ROUTERS):
        if isinstance(route, APIRoute):
            yield from ((method, route) for method in sorted(route.methods or ()))


def websocket_routes() -> list[APIWebSocketRoute]:
    every = itertools.chain.from_iterable(router.routes for router in ROUTERS)
    return [route for route in every if isinstance(route, APIWebSocketRoute)]


async def test_walk_sees_every_route_of_the_app(sqlite_server: Server) -> None:
    listed = [route for router in ROUTERS for route in router.routes]
    assert list(app_of(sqlite_server.runtime).routes) == listed, "the app has a route that stands in none of ROUTERS"
    for route in listed:
        assert isinstance(route, APIRoute | APIWebSocketRoute), f"{route}: mounts and raw routes pass no guard"
        assert route.dependencies[0].dependency is guard, f"{route.path} does not pass the guard before all else"


async def test_http_routes_refuse_without_credentials(sqlite_server: Server) -> None:
    walked = 0
    guess = {"Cookie": f"{sqlite_server.runtime.tokens.cookie}=pss_guess"}
    async with httpx.AsyncClient(timeout=LIMIT_S, base_url=sqlite_server.url) as stranger:
        for method, route in http_routes():
            if (method, route.path) in OPEN:
                continue
            path = route.path_format.replace("{", "").replace("}", "")
            sqlite_server.runtime.wrong = WrongSecrets()  # else the walk's own guesses are refused, as 429
            for headers in ({}, {"Authorization": "Bearer psu_guess"}, guess):
                answer = await stranger.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers, answer.text)
                assert answer.json()["code"] == "unauthenticated"
            walked += 1
    assert walked >= 20


async def test_websockets_refuse_without_credentials(sqlite_server: Server) -> None:
    routes = websocket_routes()
    assert len(routes) == 3
    for route in routes:
        with pytest.raises(InvalidStatus) as refusal:
            await sqlite_server.connect(route.path, "psu_guess")
        assert refusal.value.response.status_code == 401


async def test_websockets_refuse_the_wrong_scope(sqlite_server: Server) -> None:
    reader = await sqlite_server.token("read")
    for path in ("/api/v1/agent", "/api/v1/attach"):
        with pytest.raises(InvalidStatus) as refusal:
            await sqlite_server.connect(path, reader)
        assert refusal.value.response.status_code == 403


async def test_browser_socket_by_cookie_needs_our_own_origin(sqlite_server: Server) -> None:
    code = (await sqlite_server.http.post("/api/v1/login-codes")).json()["code"]
    opened = await sqlite_server.http.post("/api/v1/session", json={"code": code})
    cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in opened.cookies.items())}
    address = sqlite_server.url.replace("http", "ws", 1) + "/api/v1/stream"

    def connect(**options: Any) -> Any:
        return open_socket(address, additional_headers=cookie, **options)

    for origin in (None, "http://evil.test"):
        with pytest.raises(InvalidStatus) as refusal:
            await connect(origin=origin)
        assert refusal.value.response.status_code == 403
    async with connect(origin=sqlite_server.url):
        pass


async def test_only_the_listed_routes_are_open_and_others_have_a_scope() -> None:
    found_open = {(method, route.path) for method, route in http_routes() if "open" in scopes_of(route.endpoint)}
    assert found_open == OPEN
    for route in [r for _, r in http_routes()] + websocket_routes():
        assert scopes_of(route.endpoint), f"{route.path} declares no scope, so it is open to nobody"
