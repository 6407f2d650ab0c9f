"""What a trainer's client does when servers, connections or answers are lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest
import torch
from tests.ps.proxy import Proxy
from tests.ps.small_server import SmallServer, wait_no_longer_than
from tests.support.endpoints import free_endpoint
from tests.support.waiting import LIMIT_S, until
from torch import Tensor

from penstock.backoff import Backoff
from penstock.errors import PeerError, Unavailable
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import remotes
from penstock.ps.heartbeats import HeartbeatThread
from penstock.ps.remote import Descriptor, PsMode
from penstock.ps.retry import FIRST_S, LARGEST_S
from penstock.ps.server_link import ServerLink
from penstock.ps.settings import TrainerSettings


class Rig:
    """Servers, proxies and clients of one test."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def server(self, values: dict[str, Tensor], **settings: Any) -> SmallServer:
        self.made.append(SmallServer(values, **settings))
        return self.made[-1]  # type: ignore[no-any-return]  # what was just made

    def proxy(self, server: SmallServer) -> Proxy:
        self.made.append(Proxy(server.port))
        return self.made[-1]  # type: ignore[no-any-return]  # what was just made

    def client(
        self, *endpoints: str, mode: PsMode = "sync", trainer: int = 0, of: int = 1, epoch: int = 1,
        connect: bool = True, **settings: Any,
    ) -> TrainerClient:  # fmt: skip
        given = {"start_s": 60.0, "deadline_s": 60.0, **settings}
        client = TrainerClient(Descriptor(mode, trainer, of, endpoints), TrainerSettings(epoch=epoch, **given))
        self.made.append(client)
        if connect:
            client.connect()
        return client


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for one in sorted(rig.made, key=lambda one: not isinstance(one, TrainerClient)):
        one.close()


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call; the result waits for it and gives what it gave or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  # given to who waits
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    return result


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def beat_without_pause(client: TrainerClient) -> None:
    """Have it send heartbeats all the time. Each may take long: a short lease would leave it a quarter of that."""
    assert client._heartbeat is not None
    client._heartbeat.close()
    for link in client.links:
        link.heartbeat_is_due = lambda: True  # type: ignore[method-assign]
    client._heartbeat = HeartbeatThread(client.links, within_s=0.06)


def outlive_a_lease(server: SmallServer, clock: Clock) -> None:
    """Let twice the lease of a server pass, and a heartbeat come in each half of it."""
    for _ in range(5):
        before = server.requests.count("beat")
        until(lambda before=before: server.requests.count("beat") > before)  # type: ignore[misc]
        clock.now += 0.4 * server.lease_s


def unanswered(proxy: Proxy, call: Callable[[], Any], *, when: Callable[[], bool]) -> Any:
    """Make a call whose first answer is lost with its connection, once `when` holds; return what it gives."""
    proxy.mute.set()
    called = in_background(call)
    until(when)
    proxy.lose()
    return called()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_push_whose_answer_is_lost_is_applied_once(rig: Rig, mode: PsMode) -> None:
    server = rig.server({"w": torch.zeros(2)}, local=False, sync=mode == "sync")
    proxy = rig.proxy(server)
    client = rig.client(proxy.endpoint, mode=mode)
    client.send("w", ["w"], [0], [torch.ones(2)])
    client.send_barrier()
    push = partial(client.send, "w", ["w"], [0], [torch.ones(2)])
    unanswered(proxy, push, when=lambda: server.requests.count("push") == 2)
    client.send_barrier()
    assert server.values["w"].tolist() == [-2, -2]
    assert server.requests.count("push") > 2, "it was asked again"
    assert client.counters.rows()[proxy.endpoint, ""].retries > 0


def test_a_barrier_whose_answer_is_lost_ends_the_round_once(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, local=False)
    proxy = rig.proxy(server)
    client = rig.client(proxy.endpoint)
    client.send("w", ["w"], [0], [torch.ones(2)])
    unanswered(proxy, client.send_barrier, when=lambda: server.num_applied == 1)
    assert (server.values["w"].tolist(), client.links[0].round) == ([-1, -1], 1)
    client.send("w", ["w"], [0], [torch.ones(2)])
    client.send_barrier()
    assert (server.values["w"].tolist(), client.links[0].round) == ([-2, -2], 2)


def test_a_half_open_connection_is_detected_during_a_barrier(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, local=False, fanin=2)
    proxy = rig.proxy(server)
    first = rig.client(proxy.endpoint, of=2, lease_s=1.0)
    second = rig.client(server.endpoint, trainer=1, of=2)
    first.send("w", ["w"], [0], [torch.full((2,), 4.0)])
    waiting = in_background(first.send_barrier)
    until(lambda: server.requests.count("barrier") > 0)
    asked = server.requests.count("barrier")
    proxy.go_half_open()
    until(lambda: server.requests.count("barrier") > asked)
    second.send("w", ["w"], [0], [torch.zeros(2)])
    second.send_barrier()
    waiting()
    assert server.values["w"].tolist() == [-2, -2]


def test_a_server_restarted_within_a_round_gets_all_of_it_again(rig: Rig) -> None:
    values = {"a": torch.zeros(2), "b": torch.zeros(2)}
    old = rig.server(values)
    client = rig.client(old.endpoint)
    client.send("a", ["a"], [0], [torch.ones(2)])
    client.send_barrier()
    client.send("a", ["a"], [0], [torch.ones(2)])
    assert client.links[0].route.is_local
    old.close()
    restored = rig.server(values, address=old.endpoint)
    restored.machine.round = 1  # type: ignore[union-attr]  # as from its log
    client.send("b", ["b"], [0], [torch.ones(2)])
    client.send_barrier()
    assert {n: v.tolist() for n, v in values.items()} == {"a": [-2, -2], "b": [-1, -1]}
    assert client.links[0].route.is_local, "the new socket was found"


@pytest.mark.parametrize("mode", get_args(PsMode))
def test_a_server_that_lost_acknowledged_updates_is_an_error(rig: Rig, mode: PsMode) -> None:
    old = rig.server({"w": torch.zeros(2)}, sync=mode == "sync")
    client = rig.client(old.endpoint, mode=mode)
    client.send("w", ["w"], [0], [torch.ones(2)])
    client.send_barrier()
    old.close()
    rig.server({"w": torch.zeros(2)}, address=old.endpoint, sync=mode == "sync")
    how_far = "is at round 0" if mode == "sync" else "has applied this trainer's pushes up to 0"
    for _ in range(2):  # nobody goes on with it, however often it is asked
        with pytest.raises(PeerError, match=rf"{old.endpoint} {how_far}, but has .* PENSTOCK_PS_STATE_DIR"):
            client.recv("w", ["w"], [0], [torch.empty(2)])


@pytest.mark.parametrize("mode", ["half_async", "async", "geo"])
def test_a_restarted_server_without_losses_is_used_again(rig: Rig, mode: PsMode) -> None:
    values = {"w": torch.zeros(2)}
    before = rig.server(values, sync=False)
    client = rig.client(before.endpoint, mode=mode)
    before.close()
    anew = rig.server(values, sync=False, address=before.endpoint)
    client.send("w", ["w"], [0], [torch.ones(2)])
    anew.close()
    restored = rig.server(values, sync=False, address=before.endpoint)
    restored.machine.applied = anew.machine.applied  # type: ignore[union-attr]  # as from its log
    client.send("w", ["w"], [0], [torch.ones(2)])
    assert values["w"].tolist() == [-2, -2]


def test_a_server_that_stays_away_is_named_within_the_bound(rig: Rig) -> None:
    servers = [rig.server({"w": torch.zeros(2)}), rig.server({})]
    client = rig.client(servers[0].endpoint, servers[1].endpoint)
    client.send("w", ["w"], [0], [torch.ones(2)])
    wait_no_longer_than(client, 1.0)
    servers[1].close()
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        client.send_barrier()
    assert time.monotonic() - began < 30
    assert servers[1].endpoint in str(caught.value)
    assert "to apply round 0" in str(caught.value)
    assert servers[0].endpoint not in str(caught.value)


def test_a_socket_that_breaks_is_replaced_by_tcp(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    server = rig.server({"w": torch.zeros(2)})
    client = rig.client(server.endpoint)
    server.close_socket()
    client.send("w", ["w"], [0], [torch.ones(2)])
    client.send_barrier()
    assert server.values["w"].tolist() == [-1, -1]
    assert not client.links[0].route.is_local
    assert "TCP is used" in caplog.text


def test_heartbeats_keep_a_slow_trainer_a_member(rig: Rig) -> None:
    clock = Clock()
    server = rig.server({"w": torch.zeros(2)}, lease_s=1.0, clock=clock)
    client = rig.client(server.endpoint)
    beat_without_pause(client)
    client.send("w", ["w"], [0], [torch.ones(2)])
    outlive_a_lease(server, clock)
    client.send_barrier()
    assert server.lost == []
    assert server.requests.count("join") == 1


def test_a_trainer_late_for_the_start_is_in_the_first_round(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, fanin=2)
    early = rig.client(server.endpoint, of=2)
    early.send("w", ["w"], [0], [torch.full((2,), 2.0)])
    reached = in_background(early.send_barrier)
    until(lambda: server.requests.count("barrier") == 1)
    late = rig.client(server.endpoint, trainer=1, of=2)
    late.send("w", ["w"], [0], [torch.full((2,), 4.0)])
    late.send_barrier()
    reached()
    assert server.values["w"].tolist() == [-3, -3]


def test_heartbeats_go_out_during_a_barrier(rig: Rig) -> None:
    clock = Clock()
    server = rig.server({"w": torch.zeros(2)}, lease_s=1.0, clock=clock, fanin=2)
    client = rig.client(server.endpoint, of=2)
    beat_without_pause(client)
    waiting = in_background(client.send_barrier)
    until(lambda: server.requests.count("barrier") == 1)
    outlive_a_lease(server, clock)
    other = rig.client(server.endpoint, trainer=1, of=2)
    other.send_barrier()
    waiting()
    assert server.lost == []
    assert server.requests.count("barrier") == 2, "nothing was asked twice"


def test_a_trainer_that_was_lost_joins_again_and_goes_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    server = rig.server({"w": torch.zeros(2)}, lease_s=2.0, clock=clock, fanin=2)
    lost = rig.client(server.endpoint, of=2, lease_s=600.0)  # whose heartbeats are too slow
    other = rig.client(server.endpoint, trainer=1, of=2)
    beat_without_pause(other)
    lost.send("w", ["w"], [0], [torch.full((2,), 8.0)])
    outlive_a_lease(server, clock)
    until(lambda: server.lost == [0])
    other.send("w", ["w"], [0], [torch.ones(2)])
    other.send_barrier()
    assert server.values["w"].tolist() == [-1, -1], "the mean is over who is left"
    lost.send_barrier()
    for _ in range(2):
        steps = [in_background(partial(_step, client)) for client in (lost, other)]
        assert steps[0]() == steps[1]()
    (said,) = [line for line in caplog.messages if "trainer 0" in line and "joined again" in line]
    assert "trainer 0: it was declared lost by" in said
    assert "round 0 may have gone on without its gradients, and it takes part from round 1 on" in said
    assert lost.links[0].round == other.links[0].round == 3


def _step(client: TrainerClient) -> list[float]:
    out = torch.empty(2)
    client.send("w", ["w"], [0], [torch.ones(2)])
    client.send_barrier()
    client.recv("w", ["w"], [0], [out])
    values: list[float] = out.tolist()
    return values


def test_an_older_incarnation_is_refused(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)})
    old = rig.client(server.endpoint, epoch=1)
    rig.client(server.endpoint, epoch=2)
    old.send("w", ["w"], [0], [torch.ones(2)])
    with pytest.raises(PeerError, match="epoch 1 is refused"):
        old.send_barrier()


def test_close_leaves_every_server_once(rig: Rig) -> None:
    servers = [rig.server({}, fanin=2), rig.server({}, fanin=2)]
    endpoints = [s.endpoint for s in servers]
    clients = [rig.client(*endpoints, trainer=t, of=2) for t in range(2)]
    clients[0].close()
    clients[0].close()
    assert [s.machine.members.all_left for s in servers] == [False, False]
    clients[1].close()
    assert [s.machine.members.all_left for s in servers] == [True, True]
    assert [s.requests.count("leave") for s in servers] == [2, 2]


def test_the_start_waits_for_servers_and_says_for_which(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.ps.client.REPORT_S", 0.1)
    caplog.set_level("INFO", "penstock")
    server = rig.server({"w": torch.zeros(2)})
    late = free_endpoint()
    client = rig.client(server.endpoint, late, connect=False)
    connected = in_background(client.connect)
    until(lambda: f"waiting for the parameter servers {late} to start (" in caplog.text)
    assert f" of {client.settings.start_s:.0f} s)" in caplog.text
    rig.server({"w": torch.zeros(2)}, address=late)
    connected()
    client.send_barrier()


def test_servers_that_never_start_are_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PS_START_S", "60")
    server = rig.server({})
    missing, join = free_endpoint(), ServerLink.join
    # The one that is there may take longer to be joined than the test waits for the other one.
    monkeypatch.setattr(
        ServerLink, "join", lambda link, limit_s: join(link, 0.3 if link.endpoint == missing else limit_s)
    )
    with pytest.raises(Unavailable, match=rf"servers {missing} did not start within 60 s"):
        remotes.connect(Descriptor("sync", 0, 1, (server.endpoint, missing)))


def test_a_reopened_client_in_a_process_repeats_no_number(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, sync=False)
    first = rig.client(server.endpoint, mode="async")
    for _ in range(3):
        first.send("w", ["w"], [0], [torch.ones(2)])
    first.links[0].give_up()  # no leave: the server remembers what it applied
    second = rig.client(server.endpoint, mode="async")
    second.send("w", ["w"], [0], [torch.ones(2)])
    assert server.values["w"].tolist() == [-4, -4]


def test_busy_server_that_answers_heartbeats_is_not_lost(rig: Rig) -> None:
    modes: list[tuple[PsMode, str]] = [("sync", "push"), ("async", "push"), ("async", "pull"), ("async", "lookup")]
    idle = threading.Event()
    waiting = []
    for mode, kind in modes:
        server = rig.server({"w": torch.zeros(2, 1)}, sync=mode == "sync", local=False)
        client = rig.client(server.endpoint, mode=mode, lease_s=5.0, deadline_s=5.0)
        server.delay = lambda asked, kind=kind: idle.wait(LIMIT_S if asked == kind else 0)  # type: ignore[misc]
        waiting.append((server, in_background(partial(_ask, client, kind))))
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 7.5, "more than the deadline has passed")
    until(lambda: all(server.requests.count("beat") >= 2 for server, _ in waiting), "heartbeats")
    idle.set()
    for _, called in waiting:
        called()


def _ask(client: TrainerClient, kind: str) -> None:
    match kind:
        case "push":
            client.links[0].push("w", [("values", torch.ones(2, 1))])
        case "pull":
            client.recv("w", ["w"], [0], [torch.empty(2, 1)])
        case "lookup":
            client.prefetch("w", ["w"], [0], [2], torch.tensor([1]), torch.empty(1, 1))


def test_a_silent_server_is_unreachable_in_time_on_any_lease(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, sync=False, local=False)
    proxy = rig.proxy(server)
    client = rig.client(proxy.endpoint, mode="async", lease_s=600.0, deadline_s=1.0)
    proxy.mute.set()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="to take 'w'"):
        client.send("w", ["w"], [0], [torch.ones(2)])
    assert time.monotonic() - began < 30
    proxy.mute.clear()


def test_rejoining_counts_towards_the_unreachable_deadline(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, local=False)
    proxy = rig.proxy(server)
    client = rig.client(proxy.endpoint, lease_s=600.0)
    client.send("w", ["w"], [0], [torch.ones(2)])
    wait_no_longer_than(client, 1.0)
    proxy.mute.set()
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="to apply round 0"):
        client.send_barrier()
    assert time.monotonic() - began < 30
    proxy.mute.clear()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_trainer_that_was_lost_leaves_at_once(rig: Rig, caplog: pytest.LogCaptureFixture, forgets: bool) -> None:
    clock = Clock()
    server = rig.server({"w": torch.zeros(2)}, lease_s=2.0, clock=clock, fanin=2)
    beat_without_pause(rig.client(server.endpoint, trainer=1, of=2))
    lost = rig.client(server.endpoint, of=2, lease_s=600.0)  # whose heartbeats are too slow
    outlive_a_lease(server, clock)
    until(lambda: server.lost == [0])
    if forgets:  # as a server that was started again without its state
        with server.changed:
            server.machine.members._newest.clear()
    lost.close()
    assert server.requests.count("leave") == 1
    assert "leaves without notifying its server" not in caplog.text


def test_a_leave_waits_for_a_join_on_its_way(rig: Rig) -> None:
    server = rig.server({"w": torch.zeros(2)}, sync=False)
    client = rig.client(server.endpoint, mode="async", lease_s=60.0)
    broken, waited = threading.Event(), threading.Event()

    def slow(kind: str) -> None:
        if kind == "push":
            broken.wait(60)
        if kind == "join":
            until(lambda: server.machine.members.all_left or waited.is_set())  # a leave would have passed it

    server.delay = slow
    pushing = in_background(lambda: client.send("w", ["w"], [0], [torch.ones(2)]))
    until(lambda: server.requests.count("push") == 1)
    client.links[0].route.drop()
    until(lambda: server.requests.count("join") == 2)
    broken.set()
    leaving = in_background(client.close)
    waited.wait(0.3)
    waited.set()
    leaving()
    with contextlib.suppress(Unavailable):
        pushing()
    until(
        lambda: server.num_tickets == sum(kind not in {"where", "agree"} for kind in server.requests)
    )  # nothing is on its way
    with server.changed:
        assert server.machine.members.all_left


def test_an_unconfirmed_round_is_reported_as_uncertain(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    server = rig.server({"w": torch.zeros(2)}, local=False)
    proxy = rig.proxy(server)
    client = rig.client(proxy.endpoint)
    client.send("w", ["w"], [0], [torch.ones(2)])
    unanswered(proxy, client.send_barrier, when=lambda: server.num_applied == 1)
    assert "round 0 may have gone on without its gradients" in caplog.text


def test_backoff_grows_is_jittered_and_ends() -> None:
    backoff = Backoff(FIRST_S, LARGEST_S, limit_s=10.0, chance=lambda: 1.0)
    waits = [backoff.wait_within_s(0.0) for _ in range(12)]
    assert waits[:3] == pytest.approx([0.015, 0.03, 0.06])
    assert waits[-1] == LARGEST_S / 2
    assert backoff.wait_within_s(9.9) == pytest.approx(0.1)
    assert backoff.wait_within_s(10.0) is None
