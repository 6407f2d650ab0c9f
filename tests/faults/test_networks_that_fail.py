"""Connections that break or fall silent, answers that are lost, requests that come twice: each step counts once.

The server's host is another loopback address than the one at which trainers find it, so that the port of its channels,
which trainers look for on the host that they know, can be behind a proxy, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.faults.channel_relay import ChannelRelay
from tests.faults.fluid_jobs import Job, Process, Undisturbed
from tests.faults.relay import Faults, Relay
from tests.ps.proxy import Proxy
from tests.ps.trainer_calls import connect
from tests.support.waiting import until

from penstock.errors import Unavailable
from penstock.ps.wire import Message

LEASE_S = 6.0
HOST, PROXIED = "127.0.0.2", "127.0.0.3"
GRPC = {"PENSTOCK_PS_TRANSPORT": "grpc"}
CHANNELS = {"PENSTOCK_PS_TRANSPORT": "tcp"}
WAYS = [("sync", "grpc"), ("async", "grpc"), ("sync", "channels"), ("async", "channels")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def port_of_channels(endpoint: str) -> int:
    """Return the port of a server's channels, once it serves."""
    client, found = connect(endpoint, local=False), []

    def answers() -> bool:
        try:
            with client.call(Message("port", {}), deadline_s=10) as answer:
                found.append(int(answer.fields["port"]))
        except Unavailable:
            return False
        return True

    until(answers, "the server serves")
    client.close()
    return found[0]


@dataclass(frozen=True)
class Network:
    """All ways from a trainer to the server."""

    messages: Proxy
    channels: Proxy

    @classmethod
    def to(cls, endpoint: str) -> Network:
        """Make the proxies of a server that serves."""
        port = port_of_channels(endpoint)
        messages = Proxy(int(endpoint.rpartition(":")[2]), to=HOST, at=(PROXIED, 0))
        return cls(messages, Proxy(port, to=HOST, at=(PROXIED, port)))

    def cut(self) -> None:
        for one in (self.messages, self.channels):
            one.cut()

    def go_half_open(self) -> None:
        for one in (self.messages, self.channels):
            one.go_half_open()

    def close(self) -> None:
        for one in (self.messages, self.channels):
            one.close()


@pytest.fixture
def proxied(job: Callable[..., Job]) -> Iterator[Callable[..., tuple[Job, Network, list[Process]]]]:
    """Start a job, the second trainer of which finds the server behind proxies only."""
    networks: list[Network] = []

    def start(mode: str, way: str, steps: int) -> tuple[Job, Network, list[Process]]:
        one = job(mode=mode, host=HOST, PENSTOCK_PS_LEASE_S=str(LEASE_S))
        one.server()
        networks.append(Network.to(one.endpoints[0]))
        options: list[object] = ["--steps", steps, *(["--fused"] if way == "channels" else [])]
        return one, networks[0], [
            one.trainer(0, *options),
            one.trainer(1, *options, "--pace", one.pace(70), at=[networks[0].messages.endpoint],
                        **CHANNELS if way == "channels" else GRPC),
        ]  # fmt: skip

    yield start
    for network in networks:
        network.close()


@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_a_connection_that_is_cut_is_made_again(
    proxied: Callable[..., tuple[Job, Network, list[Process]]], undisturbed: Undisturbed, mode: str, way: str
) -> None:
    one, network, trainers = proxied(mode, way, undisturbed.steps)
    for steps in (20, 40, 60):
        trainers[1].reaches(steps)
        before, channels = network.messages.num_connections, network.channels.num_connections
        network.cut()
    one.pace(undisturbed.steps)
    trainers[1].reaches(80)
    assert network.messages.num_connections > before > 1, "all of it went through the proxy"
    if way == "channels":
        assert network.channels.num_connections > channels > 1, "the channels were opened again"
    else:
        assert network.channels.num_connections == 0
    one.all_end_well()
    undisturbed.is_what_became_of(one, trainers)


@pytest.mark.parametrize(("mode", "way"), WAYS)
def test_a_connection_that_is_half_open_is_noticed_and_left(
    proxied: Callable[..., tuple[Job, Network, list[Process]]], undisturbed: Undisturbed, mode: str, way: str
) -> None:
    one, network, trainers = proxied(mode, way, undisturbed.steps)
    trainers[1].reaches(30)
    since, channels = time.monotonic(), network.channels.num_connections
    network.go_half_open()
    one.pace(undisturbed.steps)
    trainers[1].reaches(75)
    assert time.monotonic() - since < LEASE_S + undisturbed.slack_s
    one.all_end_well()
    assert "is lost" not in one.processes[0].errors, "it is noticed within the lease"
    assert (network.channels.num_connections > channels > 0) == (way == "channels")
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
    each_happened(relay.faults, "push", "step")
    briefly_undisturbed.is_what_became_of(one, trainers)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_lost_or_repeated_frames_of_channels_change_nothing(
    job: Callable[..., Job], briefly_undisturbed: Undisturbed, mode: str
) -> None:
    """What was lost there is repeated by messages, which are lost, too."""
    one, steps = job(mode=mode, host=HOST), briefly_undisturbed.steps
    one.server()
    port = port_of_channels(one.endpoints[0])
    channels = ChannelRelay((PROXIED, port), (HOST, port), seed=7, share=0.2)
    relay = Relay(one.endpoints[0], seed=5, share=0.15, host=PROXIED)
    try:
        trainers = [one.trainer(t, "--steps", steps, "--fused", at=[relay.endpoint], **CHANNELS) for t in (0, 1)]
        one.all_end_well()
    finally:
        channels.close()
        relay.close()
    each_happened(channels.faults, "step", "lookup")
    assert channels.faults.seen["step"] > steps / 2, "the rest was repeated by messages"
    briefly_undisturbed.is_what_became_of(one, trainers)


def each_happened(faults: Faults, *kinds: str) -> None:
    """See that the test can fail: everything was done to some requests of these kinds."""
    for what in ("lost request", "lost answer", "twice", "late"):
        assert sum(faults.done[what, kind] for kind in kinds) > 2, faults.done
