"""What a trainer's client makes of operators' calls: which server gets what, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ps.small_server import SmallServer
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import FeedError, PeerError, ProgramError, Unavailable
from penstock.ps import server_link
from penstock.ps.client import TrainerClient
from penstock.ps.remote import Descriptor, PsMode, SendCall
from penstock.ps.settings import TrainerSettings
from penstock.ps.wire import Message, from_wire

Make = Callable[..., SmallServer]
Connect = Callable[..., TrainerClient]


@pytest.fixture
def serve() -> Iterator[Make]:
    made: list[SmallServer] = []

    def start(values: dict[str, Tensor], **settings: Any) -> SmallServer:
        made.append(SmallServer(values, **settings))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[TrainerClient] = []

    def start(
        servers: list[SmallServer], mode: PsMode = "sync", trainer: int = 0, of: int = 1, *, deadline_s: float = 60.0
    ) -> TrainerClient:
        endpoints = tuple(s.endpoint for s in servers)
        settings = TrainerSettings(epoch=1, start_s=60.0, deadline_s=deadline_s)
        made.append(TrainerClient(Descriptor(mode, trainer, of, endpoints), settings))
        made[-1].connect()
        return made[-1]

    yield start
    for client in made:
        client.close()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_blocks_travel_in_every_dtype_and_shape(serve: Make, connect: Connect, dtype: torch.dtype, local: bool) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (0, 4), (5, 7), (300, 100)]
    values = {f"w{i}": torch.arange(torch.Size(s).numel()).reshape(s).to(dtype) for i, s in enumerate(shapes)}
    server = serve({n: v.clone() for n, v in values.items()}, local=local, lr=1)
    client = connect([server])
    assert client.links[0].route.is_local == local
    names, at = list(values), [0] * len(values)
    if dtype.is_floating_point:
        client.send("w", names, at, [torch.ones_like(v) for v in values.values()])
        client.send_barrier()
    out = [torch.empty_like(v) for v in values.values()]
    client.recv("w", names, at, out)
    for mine, value in zip(out, values.values(), strict=True):
        assert torch.equal(mine, value - 1 if dtype.is_floating_point else value)


def test_one_pull_message_brings_all_blocks_of_a_server(serve: Make, connect: Connect) -> None:
    servers = [
        serve({"w.block0": torch.ones(2), "w.block2": torch.full((2,), 3.0)}),
        serve({"w.block1": torch.zeros(2)}),
    ]
    client = connect(servers)
    whole = torch.empty(6)
    client.recv("w", ["w.block0", "w.block1", "w.block2"], [0, 1, 0], [whole[i : i + 2] for i in (0, 2, 4)])
    assert whole.tolist() == [1, 1, 0, 0, 3, 3]
    assert [s.requests.count("pull") for s in servers] == [1, 1]


def test_from_step_two_one_message_fetches_all_that_is_read(serve: Make, connect: Connect) -> None:
    server = serve({n: torch.zeros(2) for n in "abc"})
    client = connect([server])
    pulls = []
    for step in range(1, 4):
        for name in "abc":
            client.send(name, [name], [0], [torch.ones(2)])
        client.send_barrier()
        for name in "abc" if step < 3 else "ccab":  # another order, and one of them twice
            out = torch.empty(2)
            client.recv(name, [name], [0], [out])
            assert out.tolist() == [-step, -step]
        client.fetch_barrier()
        pulls.append(server.requests.count("pull"))
    assert pulls == [3, 4, 6]


def test_on_one_host_a_step_is_one_message_from_the_second_on(serve: Make, connect: Connect) -> None:
    server = serve({n: torch.zeros(2) for n in "ab"})
    client = connect([server])
    handled: list[str] = []

    def handle(message: Message) -> Message:
        handled.append(message.kind)
        return server.handle(message)

    assert server._local is not None
    server._local._handler = handle
    for step in range(1, 4):
        for name in "ab":
            client.send(name, [name], [0], [torch.ones(2)])
        client.send_barrier()
        for name in "ab":
            out = torch.empty(2)
            client.recv(name, [name], [0], [out])
            assert out.tolist() == [-step, -step]
        client.fetch_barrier()
    assert [k for k in handled if k != "beat"] == ["step", "pull", "pull", "step", "step"]


def test_over_a_network_a_fused_step_is_one_message(serve: Make, connect: Connect) -> None:
    server = serve({n: torch.zeros(2) for n in "ab"}, local=False)
    client = connect([server])
    handled: list[str] = []

    def handle(message: Message) -> Message:
        handled.append(message.kind)
        return server.handle(message)

    server._remote._handler = handle
    for step in range(1, 4):
        client.send_step([SendCall(name, [name], [0], [torch.ones(2)]) for name in "ab"])
        out = torch.empty(4)
        client.recv_step(["a", "b"], ["a", "b"], [0, 0], [out[:2], out[2:]])
        assert out.tolist() == [-step] * 4
    assert [k for k in handled if k != "beat"] == ["step", "pull", "step", "step"]


def test_large_gradients_do_not_wait_for_the_barrier(
    serve: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "_TOGETHER", 20)
    server = serve({n: torch.zeros(4) for n in "abc"})
    client = connect([server])
    pushed = []
    for name in "abc":
        client.send(name, [name], [0], [torch.ones(4)])
        pushed.append(server.requests.count("push"))
    client.send_barrier()
    assert pushed == [0, 2, 2]
    assert server.num_applied == 3


def test_blocks_not_taken_are_read_again_in_the_next_round(serve: Make, connect: Connect) -> None:
    server = serve({"a": torch.zeros(2), "b": torch.zeros(2)})
    client = connect([server])
    for step in range(1, 4):
        client.send("a", ["a"], [0], [torch.ones(2)])
        client.send("b", ["b"], [0], [torch.ones(2)])
        client.send_barrier()
        for name in ("a", "b") if step != 2 else ("a",):
            out = torch.empty(2)
            client.recv(name, [name], [0], [out])
            assert out.tolist() == [-step, -step]


def test_pushed_memory_is_the_callers_again_at_once(serve: Make, connect: Connect) -> None:
    server = serve({"w": torch.zeros(4)}, fanin=2)
    clients = [connect([server], trainer=t, of=2) for t in range(2)]
    gradient = torch.ones(4)
    clients[0].send("w", ["w"], [0], [gradient])
    clients[0].links[0].route.drop()  # so that it is pushed again
    gradient.fill_(77)
    clients[1].send("w", ["w"], [0], [torch.ones(4)])
    _together(clients, lambda c: c.send_barrier())
    assert server.values["w"].tolist() == [-1] * 4


@pytest.mark.parametrize("heights", [[4, 3, 5], []])
def test_rows_are_summed_cut_and_put_back_in_order(serve: Make, connect: Connect, heights: list[int]) -> None:
    blocks = [f"t.block{i}" for i in range(3)] if heights else ["t"] * 3
    servers = [
        serve({b: torch.zeros(h if heights else 12, 2)}) for b, h in zip(blocks, heights or [12] * 3, strict=True)
    ]
    client = connect(servers)
    rows = torch.tensor([11, 0, 4, 4, 3, 11, 4])
    values = torch.arange(14.0).reshape(7, 2)
    client.send_rows("t", blocks, [0, 1, 2], heights, rows, values)
    client.send_barrier()
    local = torch.zeros(12, 2).index_add_(0, rows, values, alpha=-1)
    ids = torch.tensor([4, 11, 0, 0, 7, 3, 4])
    out = torch.full((7, 2), 9.0)
    client.prefetch("t", blocks, [0, 1, 2], heights, ids, out)
    assert torch.equal(out, local[ids])
    assert sum(r.merges for r in client.counters.rows().values()) == 3
    if heights:
        assert torch.equal(torch.cat([s.values[b] for s, b in zip(servers, blocks, strict=True)]), local)
    else:
        assert torch.equal(torch.stack([s.values["t"] for s in servers]).sum(0), local)
        assert sum(bool(s.values["t"].any()) for s in servers) > 1, "ids are spread"


def test_an_empty_range_is_pushed_if_its_optimizer_must_advance(serve: Make, connect: Connect) -> None:
    for mode, applied in (("sync", [1, 1]), ("async", [1, 0])):
        servers = [serve({f"t.block{i}": torch.zeros(2, 1)}, sync=mode == "sync") for i in range(2)]
        client = connect(servers, mode)
        client.send_rows("t", ["t.block0", "t.block1"], [0, 1], [2, 2], torch.tensor([1]), torch.ones(1, 1))
        client.send_barrier()
        assert [s.num_applied for s in servers] == applied


def test_a_row_outside_the_table_is_named(serve: Make, connect: Connect) -> None:
    client = connect([serve({"t": torch.zeros(3, 1)})])
    for wrong in (3, -1):
        with pytest.raises(FeedError, match=rf"id {wrong} is no row of the table 't', which has 3"):
            client.prefetch("t", ["t"], [0], [3], torch.tensor([0, wrong]), torch.empty(2, 1))


def test_no_ids_need_no_server(serve: Make, connect: Connect) -> None:
    server = serve({"t": torch.zeros(3, 1)})
    client = connect([server])
    client.prefetch("t", ["t"], [0], [3], torch.empty(0, dtype=torch.int64), torch.empty(0, 1))
    assert "lookup" not in server.requests


def test_a_block_of_another_shape_is_refused_by_name(serve: Make, connect: Connect) -> None:
    client = connect([serve({"w": torch.zeros(3)})])
    with pytest.raises(PeerError, match=r"has 'w' as float32\[3\].*has float32\[4\]"):
        client.recv("w", ["w"], [0], [torch.empty(4)])


def test_a_barrier_reaches_servers_without_blocks(serve: Make, connect: Connect) -> None:
    servers = [serve({"w": torch.zeros(2)}), serve({})]
    client = connect(servers)
    for _ in range(3):
        client.send("w", ["w"], [0], [torch.ones(2)])
        client.send_barrier()
        client.fetch_barrier()
    assert [link.round for link in client.links] == [3, 3]
    assert servers[0].values["w"].tolist() == [-3, -3]


def test_a_second_gradient_within_a_round_is_an_error(serve: Make, connect: Connect) -> None:
    client = connect([serve({"w": torch.zeros(2)})])
    client.send("w", ["w"], [0], [torch.ones(2)])
    with pytest.raises(ProgramError, match="'w' was pushed already in round 0"):
        client.send("w", ["w"], [0], [torch.ones(2)])


def test_errors_of_several_servers_are_all_named(serve: Make, connect: Connect) -> None:
    servers = [serve({"a": torch.zeros(2)}), serve({"b": torch.zeros(2)})]
    client = connect(servers)
    with pytest.raises(PeerError) as caught:
        client.recv("w", ["a", "b"], [0, 1], [torch.empty(3), torch.empty(3)])
    assert all(s.endpoint in str(caught.value) for s in servers)


def test_async_pushes_are_applied_at_once_and_each(serve: Make, connect: Connect) -> None:
    server = serve({"w": torch.zeros(2)}, sync=False)
    client = connect([server], "async")
    out = torch.empty(2)
    for step in range(3):
        client.send("w", ["w"], [0], [torch.ones(2)])
        client.send_barrier()
        client.recv("w", ["w"], [0], [out])
        assert out.tolist() == [-step - 1] * 2
    assert server.requests.count("barrier") == 0


def test_rows_looked_up_ahead_are_taken_by_the_same_ids_in_async(serve: Make, connect: Connect) -> None:
    server = serve({"t": torch.arange(6.0).reshape(6, 1)}, sync=False)
    client = connect([server], "async")
    ids, out = torch.tensor([5, 1, 5]), torch.empty(3, 1)
    assert not client.rows.prefetch_ahead("t", ids), "before the first prefetch nobody knows where the rows are"
    client.prefetch("t", ["t"], [0], [6], ids, out)
    assert client.rows.prefetch_ahead("t", torch.tensor([2, 3]))
    other = torch.empty(2, 1)
    client.prefetch("t", ["t"], [0], [6], ids[:2], other)
    assert other.tolist() == [[5], [1]], "other ids are looked up"
    until(lambda: server.requests.count("lookup") == 3)
    client.prefetch("t", ["t"], [0], [6], torch.tensor([2, 3]), other)
    assert other.tolist() == [[2], [3]]
    assert server.requests.count("lookup") == 3


def test_nothing_is_looked_up_ahead_in_sync_without_channels(serve: Make, connect: Connect) -> None:
    server = serve({"t": torch.zeros(6, 1)})
    client = connect([server])
    ids, out = torch.tensor([2, 4]), torch.empty(2, 1)
    client.prefetch("t", ["t"], [0], [], ids, out)
    assert not client.rows.prefetch_ahead("t", ids)
    client.send_rows("t", ["t"], [0], [], ids, torch.ones(2, 1))
    client.send_barrier()
    client.prefetch("t", ["t"], [0], [], ids, out)
    assert out.tolist() == [[-1], [-1]]
    assert server.requests.count("lookup") == 2


def test_counters_tell_bytes_and_calls_of_each_block(serve: Make, connect: Connect) -> None:
    server = serve({"w": torch.zeros(8), "t": torch.zeros(9, 2)})
    client = connect([server])
    client.send("w", ["w"], [0], [torch.ones(8)])
    client.send_barrier()
    client.recv("w", ["w"], [0], [torch.empty(8)])
    client.prefetch("t", ["t"], [0], [9], torch.tensor([1, 1, 2]), torch.empty(3, 2))
    rows = client.counters.rows()
    dense, table = rows[server.endpoint, "w"], rows[server.endpoint, "t"]
    assert (dense.calls, dense.sent_bytes, dense.received_bytes) == (2, 32, 32)
    assert (table.calls, table.sent_bytes, table.received_bytes) == (1, 24, 24), "on one host no duplicates are sought"
    assert dense.wait_ns > 0


def _together(clients: list[TrainerClient], call: Callable[[TrainerClient], None]) -> None:
    threads = [threading.Thread(target=call, args=(c,)) for c in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("local", [True, False])
def test_a_whole_step_takes_the_gradients_where_they_lie(serve: Make, connect: Connect, local: bool) -> None:
    servers = [
        serve({"w.block0": torch.ones(2, 3), "t.block0": torch.zeros(4, 2)}, local=local, lr=1),
        serve({"w.block1": torch.ones(1, 3)}, local=local, lr=1),
    ]
    client = connect(servers)
    out = [torch.empty(2, 3), torch.empty(1, 3)]
    for step in range(3):
        gradients = [torch.full((2, 3), 1.0 + step), torch.full((1, 3), 2.0 + step)]
        rows = SendCall("t", ["t.block0"], [0], [torch.ones(3, 2)], [4], torch.tensor([1, 1, 3]))
        client.send_step([SendCall("w", ["w.block0", "w.block1"], [0, 1], gradients), rows])
        for gradient in gradients:
            gradient.fill_(1e9)  # the step is over: the memory is somebody else's
        client.recv_step(["w", "w"], ["w.block0", "w.block1"], [0, 1], out)
    assert [float(o[0, 0]) for o in out] == [1 - 6, 1 - 9]
    looked_up = torch.empty(4, 2)
    client.prefetch("t", ["t.block0"], [0], [4], torch.arange(4), looked_up)
    assert looked_up[:, 0].tolist() == [0, -6, 0, -3]


def test_a_step_that_failed_is_kept_for_a_replay_as_it_was(connect: Connect, serve: Make) -> None:
    server = serve({"w": torch.ones(3)}, lr=1)
    client = connect([server], deadline_s=0.1)
    gradient = torch.full((3,), 2.0)
    server.close()
    with pytest.raises(Unavailable):
        client.send_step([SendCall("w", ["w"], [0], [gradient])])
    gradient.fill_(1e9)
    open_round: Any = client.links[0]._round
    ((block, (kept,)),) = open_round.pushes()[1]
    assert block == "w"
    assert from_wire(kept).tolist() == [2, 2, 2]
