"""A server in sync mode: means, joiners, losses, repetitions, over both transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.ps.torch_storage import TorchStorage
from tests.ps.trainer_calls import Refused, Trainer
from tests.support.waiting import until

from penstock.errors import Unavailable
from penstock.ps.dispatcher import Stragglers
from penstock.ps.server import ParameterServer, serve
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import Gradient

SETTINGS = ServerSettings("127.0.0.1:0", 0, 1, "sync", job="j", token="t")
SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (5,), "scalar": ()}
Start = Callable[..., tuple[ParameterServer, TorchStorage, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ParameterServer] = []

    def begin(**changes: Any) -> tuple[ParameterServer, TorchStorage, str]:
        storage = TorchStorage(SHAPES, {"t": (2, 10)})
        server = ParameterServer(replace(SETTINGS, **changes), storage)
        servers.append(server)
        server.start()
        return server, storage, f"127.0.0.1:{server.port}"

    yield begin
    Trainer.close_all()
    for server in servers:
        server.close()


class Clock:
    """What servers take for the time; the test moves it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def tick(self, server: ParameterServer, seconds: float = 0.0) -> None:
        """Let a time pass, and the server look at the clock."""
        self.now += seconds
        until(lambda: server._dispatcher.machine._ticked_at == self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("penstock.ps.dispatcher.time", clock)
    return clock


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads; return what they return. Raises what one raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [called.result() for called in [pool.submit(call) for call in calls]]


def test_three_trainers_by_both_ways_get_the_exact_mean(start: Start) -> None:
    server, storage, endpoint = start(fanin=3)
    mirror = TorchStorage(SHAPES, {"t": (2, 10)})
    trainers = [Trainer(endpoint, t, local=t != 1) for t in range(3)]
    assert [t.join() for t in trainers] == [0, 0, 0]
    torch.manual_seed(0)
    for round in range(4):
        gradients = [{n: torch.randn(s) for n, s in SHAPES.items()} for _ in trainers]

        def step(index: int, round: int = round, gradients: Any = gradients) -> dict[str, torch.Tensor]:
            me = trainers[index]
            for name, gradient in gradients[index].items():
                me.push(name, round, gradient)
            me.push("t", round, torch.full((2, 2), float(index)), torch.tensor([index, 5]))
            assert me.barrier(round) == round + 1
            return me.pull(*SHAPES, round=round + 1)

        pulled = at_once(*(lambda i=i: step(i) for i in range(3)))
        mirror.begin_round()
        for name in SHAPES:
            mirror.update(name, Gradient((gradients[0][name] + gradients[1][name] + gradients[2][name]) / 3))
        rows = torch.tensor([0, 5, 1, 5, 2, 5])
        mirror.update("t", Gradient(torch.tensor([0.0, 0, 1, 1, 2, 2])[:, None].expand(6, 2) / 3, rows))
        for found in pulled:
            for name in SHAPES:
                assert torch.equal(found[name], mirror.values[name])
    assert {k: v.tolist() for k, v in storage.everything().items()} == {
        k: v.tolist() for k, v in mirror.everything().items()
    }
    assert torch.equal(trainers[0].lookup("t", [5, 2, 9], round=4)[0], mirror.rows_of["t"][5])
    row = server.counters.rows()["trainer 1", "w"]
    assert (row.merges, row.received_bytes) == (4, 4 * 48)
    for trainer in trainers:
        trainer.leave()
    assert server.wait(60)


def test_a_joiner_at_the_barrier_counts_from_the_next_round(start: Start) -> None:
    _, storage, endpoint = start(fanin=3)
    a, b, late = (Trainer(endpoint, t) for t in range(3))
    a.join(), b.join()
    a.push("b", 0, torch.ones(5))
    waiting = threading.Thread(target=a.barrier, args=(0,))
    waiting.start()
    while not storage_waits(late):
        pass
    b.push("b", 0, torch.ones(5))
    assert b.barrier(0) == 1
    waiting.join()
    assert storage.rounds == 1


def storage_waits(late: Trainer) -> bool:
    """Join until the answer says that the first trainer is at its barrier."""
    if late.join() == 1:
        return True
    late.ask("leave")
    return False


def test_the_mean_is_over_all_members_not_those_who_pushed(start: Start) -> None:
    _, storage, endpoint = start(fanin=2)
    pushes, has_none = Trainer(endpoint, 0), Trainer(endpoint, 1)
    pushes.join(), has_none.join()
    mirror = TorchStorage(SHAPES, {"t": (2, 10)})
    mirror.begin_round()
    mirror.update("b", Gradient(torch.ones(5) / 2))
    mirror.update("t", Gradient(torch.ones(1, 2) / 2, torch.tensor([5])))
    pushes.push("b", 0, torch.ones(5))
    pushes.push("t", 0, torch.ones(1, 2), torch.tensor([5]))
    at_once(lambda: pushes.barrier(0), lambda: has_none.barrier(0))
    assert torch.equal(storage.values["b"], mirror.values["b"])
    assert torch.equal(storage.rows_of["t"][5], mirror.rows_of["t"][5])


def test_a_lost_trainer_leaves_the_mean_to_the_others(
    start: Start, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server, storage, endpoint = start(fanin=2, lease_s=40.0)
    a, b, beats = Trainer(endpoint, 0), Trainer(endpoint, 1), Trainer(endpoint, 0)
    a.join(), b.join()
    before = storage.values["b"].clone()
    b.push("b", 0, torch.full((5,), 100.0))
    a.push("b", 0, torch.ones(5))
    waiting = waits_at_the_barrier(server, a)
    clock.tick(server)
    for _ in range(5):
        beats.ask("beat")
        clock.tick(server, 10.0)
    assert waiting.result(60) == 1
    assert torch.equal(storage.values["b"], before - torch.ones(5) * (0.1 / 2))
    assert caplog.text.count("trainer 1 is lost: no message from it for 40 s") == 1
    with pytest.raises(Refused) as refused:
        b.barrier(0)
    assert refused.value.rejoin
    assert b.join() == 1


def test_repetitions_count_once_and_old_incarnations_are_refused(start: Start) -> None:
    server, storage, endpoint = start()
    a = Trainer(endpoint, 0, epoch=3)
    a.join()
    before = storage.values["b"].clone()
    for _ in range(3):
        a.push("b", 0, torch.ones(5))
    assert [a.barrier(0), a.barrier(0)] == [1, 1]
    a.push("b", 0, torch.ones(5))
    assert torch.equal(storage.values["b"], before - torch.ones(5) * (0.1 / 2))
    with pytest.raises(Refused, match="epoch 2 is refused"):
        Trainer(endpoint, 0, epoch=2).join()
    assert not len(server._state.payloads), "what is not used is let go"


def test_pushes_allocate_nothing_after_the_first_round(start: Start) -> None:
    server, _, endpoint = start()
    a = Trainer(endpoint, 0)
    a.join()
    made = []
    for round in range(5):
        a.push("w", round, torch.ones(3, 4))
        a.push("t", round, torch.ones(2, 2), torch.tensor([1, 2]))
        a.barrier(round)
        made.append(server._state.payloads.pool.num_made)
    assert made == [3] * 5


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda t: t.push("x", 0, torch.ones(5)), "block 'x' is not on this server"),
        (lambda t: t.push("b", 0, torch.ones(4)), r"shape \[4\]; the block \[5\]"),
        (lambda t: t.push("b", 0, torch.ones(5, dtype=torch.float64)), "is torch.float64; the block is torch.float32"),
        (lambda t: t.push("w", 0, torch.ones(1, 4), torch.tensor([3])), "rows 3 to 3 of 'w', which has 3"),
        (lambda t: t.push("w", 0, torch.ones(1, 4), torch.tensor([-1])), "rows -1 to -1 of 'w'"),
        (lambda t: t.push("w", 0, torch.ones(2, 4), torch.tensor([1])), r"are \[2, 4\]; expected \[1, 4\]"),
        (lambda t: t.push("w", 0, torch.ones(1, 4), torch.tensor([1], dtype=torch.int32)), "int64"),
        (lambda t: t.push("scalar", 0, torch.ones(1), torch.tensor([0])), "a block with rows"),
        (lambda t: t.push("t", 0, torch.ones(1, 2)), "a push of it has rows"),
        (lambda t: t.push("b", 5, torch.ones(5)), "round 5 is not open"),
        (lambda t: t.barrier(5), "round 5 is not open"),
        (lambda t: t.step(5, values_b=torch.ones(5)), "round 5 is not open"),
        (lambda t: t.step(0, "x"), "block 'x' is not on this server"),
        (lambda t: t.step(0, values_w=torch.ones(3, 4), values_b=torch.ones(4)), r"shape \[4\]; the block \[5\]"),
        (lambda t: t.step(0, rows_w=torch.tensor([3]), values_w=torch.ones(1, 4)), "rows 3 to 3 of 'w', which has 3"),
        (lambda t: t.step(0, values_w=torch.ones(1, 4), rows_w=torch.tensor([1])), "where the values of another block"),
        (lambda t: t.step(0, w=torch.ones(3, 4)), "where the values of another block"),
        (lambda t: t.pull("t"), "'t' is a table"),
        (lambda t: t.ask("pull", round=0, blocks="{"), "no JSON"),
        (lambda t: t.ask("pull", round=0, blocks='{"w": 1}'), "no list of names"),
        (lambda t: t.lookup("w", [3]), "which has 3"),
        (lambda t: t.changed("w"), "known in geo mode"),
        (lambda t: t.ask("save", path="x"), "saves nowhere"),
        (lambda t: Trainer.ask(t, "push", round=0, block="w"), r"has the tensors \[\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(start: Start, call: Any, reason: str) -> None:
    server, storage, endpoint = start()
    trainer = Trainer(endpoint, 0)
    trainer.join()
    before = storage.everything()
    with pytest.raises(Refused, match=reason):
        call(trainer)
    assert trainer.barrier(0) == 1
    assert {k: v.tolist() for k, v in storage.everything().items()} == {k: v.tolist() for k, v in before.items()}
    assert not len(server._state.payloads)


@pytest.mark.parametrize("local", [True, False])
def test_a_step_message_equals_its_parts_even_when_repeated(start: Start, local: bool) -> None:
    server, _, endpoint = start(fanin=2)
    mirror = TorchStorage(SHAPES, {"t": (2, 10)})
    whole, parts = Trainer(endpoint, 0, local=local), Trainer(endpoint, 1)
    again = Trainer(endpoint, 0, local=local)  # the same trainer on another connection
    assert [whole.join(), parts.join()] == [0, 0]
    torch.manual_seed(0)
    for round in range(3):
        large = torch.randn(3000, 4)  # too large to travel beside the head
        rows = torch.randint(0, 3, (3000,))
        given = {"rows_w": rows, "values_w": large, "values_b": torch.randn(5)}

        def step(me: Trainer, round: int = round, given: Any = given) -> Any:
            return me.step(round, "b", "w", **given)

        def single(round: int = round) -> None:
            parts.push("b", round, torch.ones(5))
            assert parts.barrier(round) == round + 1

        fields, read = at_once(partial(step, whole), partial(step, again), single)[0]
        mirror.begin_round()
        mirror.update("b", Gradient((given["values_b"] + 1) / 2))
        mirror.update("w", Gradient(large / 2, rows))
        assert fields["round"] == round + 1
        assert {n: v.tolist() for n, v in read.items()} == {n: mirror.values[n].tolist() for n in ("b", "w")}
        assert whole.step(round, **given)[0]["round"] == round + 1
    assert not len(server._state.payloads)


def test_a_trainer_beyond_fanin_is_refused_and_the_job_goes_on(start: Start) -> None:
    server, _, endpoint = start(fanin=2)
    with pytest.raises(
        Refused, match=r"trainer 2 is none of this job's: fanin is 2, so trainers are 0 to 1"
    ) as refused:
        Trainer(endpoint, 2).join()
    assert not refused.value.rejoin
    assert server._dispatcher.machine.members.missing() == [0, 1]
    assert [Trainer(endpoint, t).join() for t in range(2)] == [0, 0]


def test_a_server_that_hung_longer_than_a_lease_keeps_trainers(start: Start, clock: Clock) -> None:
    server, _, endpoint = start(fanin=1, lease_s=1.0)
    trainer = Trainer(endpoint, 0)
    trainer.join()
    clock.tick(server)
    clock.tick(server, 1.3)  # and nothing came meanwhile
    trainer.ask("beat")


def test_another_job_is_refused(start: Start) -> None:
    _, _, endpoint = start()
    trainer = Trainer(endpoint, 0)
    trainer.sender["job"] = "other"
    with pytest.raises(Refused, match="this server is of job 'j', not 'other'"):
        trainer.join()


def test_serving_ends_when_all_have_left_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    storage = TorchStorage(SHAPES)
    server = ParameterServer(replace(SETTINGS, fanin=2), storage)
    server.start()
    a, b = (Trainer(f"127.0.0.1:{server.port}", t, local=t == 0) for t in range(2))
    a.join(), b.join()
    a.leave()
    assert not server.wait(0.3)
    b.leave()
    assert server.wait(60)
    server.close()
    Trainer.close_all()
    left = {t for t in set(threading.enumerate()) - before if t.name.startswith("ps-")}
    assert not left


def test_nobody_comes() -> None:
    with pytest.raises(Unavailable, match=r"trainers 0, 1 of 2 did not join 127.0.0.1:0 within 0.5 s"):
        serve(replace(SETTINGS, fanin=2, start_s=0.5), TorchStorage(SHAPES))


def test_who_does_not_come_is_reported(start: Start) -> None:
    server, _, _ = start(fanin=2)
    stragglers = Stragglers(server.settings, server._dispatcher, 0.0)
    said = [stragglers.look(now) for now in (2.9, 3.1, 4.0, 6.2)]
    assert said == ["", "waits for trainers 0, 1 of 2 to join (3 s)", "", "waits for trainers 0, 1 of 2 to join (6 s)"]


def test_everybody_is_lost_and_nobody_comes_back(start: Start, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    server, _, endpoint = start(lease_s=40.0)
    Trainer(endpoint, 0).join()
    server._stragglers._settings = replace(server.settings, start_s=0.5)
    clock.tick(server)
    for _ in range(5):
        clock.tick(server, 10.0)
    with pytest.raises(
        Unavailable, match=r"every trainer was lost, and none came back within 0.5 s.*PENSTOCK_PS_START_S"
    ):
        server.wait(60)
    assert "every trainer is lost; waits 0.5 s for one to come back" in caplog.text


def reason_of(call: Callable[[], Any]) -> str:
    """Return why a call is refused."""
    with pytest.raises(Refused) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("in_steps", [True, False])
def test_a_round_too_large_for_a_table_is_refused_to_all(start: Start, in_steps: bool) -> None:
    server, storage, endpoint = start(fanin=2)
    before = {name: value.tolist() for name, value in storage.everything().items()}
    a, b = Trainer(endpoint, 0), Trainer(endpoint, 1)
    given = {t: (torch.ones(6, 2), torch.arange(6) + first) for t, first in ((a, 0), (b, 6))}  # each alone would fit

    def round(trainer: Trainer) -> None:
        values, rows = given[trainer]
        if in_steps:
            trainer.step(0, rows_t=rows, values_t=values)
        else:
            trainer.push("t", 0, values, rows)
            trainer.barrier(0)

    assert [a.join(), b.join()] == [0, 0]
    reasons = at_once(*(partial(reason_of, partial(round, trainer)) for trainer in (a, b)))
    assert reasons == ["table 't' is full"] * 2
    assert {name: value.tolist() for name, value in storage.everything().items()} == before
    assert (len(server._state.payloads), storage.rounds) == (0, 0)
    a.leave()
    assert b.join() == 0
    round(b)
    assert storage.steps["t"] == 1, "the job goes on without it"
    b.leave()
    assert server.wait(60)


def waits_at_the_barrier(server: ParameterServer, trainer: Trainer) -> Future[int]:
    """Return what a barrier for others will give, once the server waits for them."""
    pool = ThreadPoolExecutor(1)
    called = pool.submit(trainer.barrier, 0)
    pool.shutdown(wait=False)
    until(lambda: server._dispatcher._waiting)
    return called


@pytest.mark.parametrize("local", [True, False])
def test_a_closed_server_is_unavailable_to_waiting_trainers(start: Start, local: bool) -> None:
    server, _, endpoint = start(fanin=2)
    a, b = (Trainer(endpoint, t, local=local) for t in range(2))
    a.join(), b.join()
    waiting = waits_at_the_barrier(server, a)
    server.close()
    with pytest.raises(Unavailable):
        waiting.result(60)
    with pytest.raises(Unavailable):
        b.ask("beat")


@pytest.mark.parametrize("local", [True, False])
def test_a_failed_server_is_unavailable_to_waiting_trainers(
    start: Start, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    server, _, endpoint = start()
    a, b = (Trainer(endpoint, t, local=local) for t in range(2))
    a.join()

    def full(work: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server._updates, "execute", full)
    a.push("b", 0, torch.ones(5))
    with pytest.raises(Unavailable):
        a.barrier(0)
    with pytest.raises(Unavailable):
        b.join()
    with pytest.raises(OSError, match="No space left"):
        server.wait(60)


@pytest.mark.parametrize("local", [True, False])
def test_a_server_that_all_have_left_refuses(start: Start, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    server, _, endpoint = start()
    a = Trainer(endpoint, 0, local=local)
    a.join()
    a.ask("leave")
    assert server.wait(60)
    transports = list(server._transports)
    monkeypatch.setattr(server, "_transports", [])  # a message that came just before they close
    server.close()
    with pytest.raises(Refused, match="the server has ended"):
        a.ask("beat")
    for transport in transports:
        transport.close()
