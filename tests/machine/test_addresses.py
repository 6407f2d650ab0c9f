"""Hosts with addresses of one family alone, and browsers that do not open."""

from __future__ import annotations

import os
import socket
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from tests.support.capabilities import absent

from penstock.command.stack import check_port
from penstock.distributed import interfaces
from penstock.errors import SpecError
from penstock.machine import network
from penstock.machine.capability import forget
from penstock.settings import GLOO_INTERFACES


def resolving_to(*addresses: str) -> Any:
    """Resolve every name to these addresses."""

    def getaddrinfo(host: object, port: object, *_: object, **__: object) -> list[Any]:
        families = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in addresses]
        return [(f, socket.SOCK_STREAM, 6, "", (a, 0)) for f, a in zip(families, addresses, strict=True)]

    return getaddrinfo


def test_a_name_with_both_families_is_listened_at_by_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", resolving_to("::1", "127.0.0.1"))
    assert network.family_of("both") == socket.AF_INET


def test_an_address_of_version_6_is_refused_without_it() -> None:
    with absent("ipv6"), pytest.raises(OSError, match="this machine has no IPv6: declared absent"):
        network.family_of("::1")


def test_a_command_names_why_it_cannot_listen() -> None:
    with absent("ipv6"), pytest.raises(SpecError, match=r"cannot listen on ::1:7080: ::1 has IPv6 addresses alone"):
        check_port("::1", 7080)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost", "0.0.0.0"])
def test_hosts_of_version_4_need_no_version_6(host: str) -> None:
    with absent("ipv6"):
        assert network.family_of(host) == socket.AF_INET


def test_gloo_gets_the_interface_of_a_host_of_version_6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("fd000000000000000000000000000001 02 40 00 80    eth7\n")
    monkeypatch.setattr(interfaces, "names", lambda: ["lo", "eth7"])
    monkeypatch.setattr("socket.getaddrinfo", resolving_to("fd00::1"))
    monkeypatch.setenv(GLOO_INTERFACES.name, "")
    interfaces.choose_for_gloo("there", of_version_6=table)
    assert os.environ[GLOO_INTERFACES.name] == "eth7"


def test_gloo_chooses_itself_for_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setenv(GLOO_INTERFACES.name, "")
    interfaces.choose_for_gloo("nowhere")
    assert os.environ[GLOO_INTERFACES.name] == ""


class Browser:
    """A browser that does what a test wants."""

    name = "browser"

    def __init__(self, answer: bool | Exception) -> None:
        self._answer = answer

    def __call__(self, *_: object) -> bool:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [(True, None), (False, "browser could not be started"), (webbrowser.Error("it broke"), "it broke")],
    ids=str,
)
def test_a_browser_that_does_not_open_is_a_reason(
    answer: bool | Exception, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.get", lambda: Browser(answer))
    monkeypatch.setattr("webbrowser.open", Browser(answer))
    forget()
    try:
        assert network.open_browser("http://127.0.0.1/") == why
    finally:
        forget()


def test_without_a_display_no_browser_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("webbrowser.open", Browser(AssertionError("it was started")))
    forget()
    assert "there is no display" in (network.open_browser("http://127.0.0.1/") or "")
