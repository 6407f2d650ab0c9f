"""Connections that break or fall silent, answers that are lost, requests that come twice: each step counts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.faults.fluid_jobs import Job, Process, Undisturbed
from tests.faults.relay import Relay
from tests.ps.proxy import Proxy

LEASE_S = 6.0
GRPC = {"PENSTOCK_PS_TRANSPORT": "grpc"}
"""All goes through the proxy: a channel would go beside it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def proxied(job: Callable[..., Job]) -> Iterator[Callable[[str, int], tuple[Job, Proxy, list[Process]]]]:
    """Start a job, the second trainer of which finds the server behind a proxy only."""
    proxies: list[Proxy] = []

    def start(mode: str, steps: int) -> tuple[Job, Proxy, list[Process]]:
        one = job(mode=mode, PENSTOCK_PS_LEASE_S=str(LEASE_S))
        proxies.append(Proxy(int(one.endpoints[0].rpartition(":")[2])))
        one.server()
        return one, proxies[0], [
            one.trainer(0, "--steps", steps),
            one.trainer(1, "--steps", steps, "--pace", one.pace(70), at=[proxies[0].endpoint], **GRPC),
        ]  # fmt: skip

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_connection_that_is_cut_is_made_again(
    proxied: Callable[[str, int], tuple[Job, Proxy, list[Process]]], undisturbed: Undisturbed, mode: str
) -> None:
    one, proxy, trainers = proxied(mode, undisturbed.steps)
    for steps in (20, 40, 60):
        trainers[1].reaches(steps)
        before = proxy.num_connections
        proxy.cut()
    one.pace(undisturbed.steps)
    trainers[1].reaches(80)
    assert proxy.num_connections > before > 1, "all of it went through the proxy"
    one.all_end_well()
    undisturbed.is_what_became_of(one, trainers)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_connection_that_is_half_open_is_noticed_and_left(
    proxied: Callable[[str, int], tuple[Job, Proxy, list[Process]]], undisturbed: Undisturbed, mode: str
) -> None:
    one, proxy, trainers = proxied(mode, undisturbed.steps)
    trainers[1].reaches(30)
    since = time.monotonic()
    proxy.go_half_open()
    one.pace(undisturbed.steps)
    trainers[1].reaches(75)
    assert time.monotonic() - since < LEASE_S + undisturbed.slack_s
    one.all_end_well()
    assert "is lost" not in one.processes[0].errors, "it is noticed within the lease"
    undisturbed.is_what_became_of(one, trainers)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_lost_or_repeated_requests_and_answers_change_nothing(
    job: Callable[..., Job], briefly_undisturbed: Undisturbed, mode: str
) -> None:
    one = job(mode=mode)
    one.server()
    relay = Relay(one.endpoints[0], seed=5, share=0.15)
    try:
        trainers = [one.trainer(t, "--steps", briefly_undisturbed.steps, at=[relay.endpoint], **GRPC) for t in (0, 1)]
        one.all_end_well()
    finally:
        relay.close()
    for what in ("lost request", "lost answer", "twice", "late"):
        assert relay.done[what, "push"] + relay.done[what, "step"] > 2, relay.done
    briefly_undisturbed.is_what_became_of(one, trainers)
