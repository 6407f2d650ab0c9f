"""Two hosts, in each of which a test may start what it likes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts.hosts import Faults, HostSite
from tests.support.waiting import until
from tools.hosts.namespaces import SEARCHED, Namespaces


@pytest.fixture
def network() -> Iterator[Namespaces]:
    """Two hosts. What a machine lacks for them is the error."""
    assert shutil.which("nft", path=SEARCHED), "no nft on this machine: tools/prerequisites.sh test installs nftables"
    with Namespaces(2) as made:
        yield made


@pytest.fixture
def hosts(network: Namespaces, tmp_path: Path) -> Iterator[tuple[HostSite, HostSite]]:
    made = HostSite(tmp_path / "first", network, 0), HostSite(tmp_path / "second", network, 1)
    yield made
    for site in reversed(made):
        site.close()


@pytest.fixture
def faults(hosts: tuple[HostSite, HostSite]) -> Faults:
    """Faults of the second host's network."""
    return Faults(hosts[1])


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until
