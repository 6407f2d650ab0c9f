"""Communicators over real connections: trainers that do not wait for each other, traffic, the end, a server's death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ps.small_server import SmallServer, wait_no_longer_than
from tests.support.waiting import until
from torch import Tensor

from penstock.errors import SpecError, Unavailable
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import Remotes, communicate
from penstock.ps.remote import Descriptor, PsMode, Remote
from penstock.ps.settings import TrainerRuntimeConfig, TrainerSettings

Serve = Callable[..., SmallServer]
Join = Callable[..., tuple[Any, TrainerClient]]
MANY = {
    "communicator_send_queue_size": 50,
    "communicator_max_merge_var_num": 1,
    "communicator_min_send_grad_num_before_recv": 0,
}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers; `lr=-1` makes a push an addition, as GEO's is."""
    made: list[SmallServer] = []

    def start(values: dict[str, Tensor], **settings: Any) -> SmallServer:
        made.append(SmallServer(values, sync=False, **settings))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def join(serve: Serve) -> Iterator[Join]:
    """Connect trainers and give them the communicator of their mode."""
    made: list[Remote] = []

    def start(
        servers: list[SmallServer],
        mode: PsMode,
        trainer: int = 0,
        of: int = 1,
        config: dict[str, int] | None = None,
        *,
        push_every: int = 100,
    ) -> tuple[Any, TrainerClient]:
        descriptor = Descriptor(mode, trainer, of, tuple(s.endpoint for s in servers), push_every)
        client = TrainerClient(descriptor, TrainerSettings(epoch=1, start_s=60.0, deadline_s=60.0))
        client.connect()
        remote = communicate(client, TrainerRuntimeConfig.from_dict(config or {}))
        made.append(remote)
        return remote, client

    yield start
    for remote in made:
        remote.close()


def vector(value: float = 0.0, num: int = 4) -> Tensor:
    """Return a parameter or gradient."""
    return torch.full((num,), value, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_a_trainer_that_hangs_delays_no_other(serve: Serve, join: Join, mode: PsMode) -> None:
    server = serve({"w": vector()}, fanin=2)
    slow, _ = join([server], mode, 0, 2, MANY)
    fast, _ = join([server], mode, 1, 2, MANY)
    slow.recv("w", ["w"], [0], [vector()])
    parameter = vector()
    for _ in range(30):
        fast.send("w", ["w"], [0], [vector(1.0)])
        fast.recv("w", ["w"], [0], [parameter])
    until(lambda: parameter.tolist() == [-30.0] * 4)
    slow.send("w", ["w"], [0], [vector(1.0)])
    slow.close()
    assert server.values["w"].tolist() == [-31.0] * 4


def test_close_brings_everything_that_waits_to_the_servers(serve: Serve, join: Join) -> None:
    servers = [serve({"w.block0": vector(num=2)}), serve({"w.block1": vector(num=2)})]
    trainer, _ = join(servers, "async", config=MANY)
    gradient = vector(1.0)
    for _ in range(40):
        trainer.send("w", ["w.block0", "w.block1"], [0, 1], [gradient[:2], gradient[2:]])
    trainer.close()
    assert [s.values[f"w.block{i}"].tolist() for i, s in enumerate(servers)] == [[-40.0, -40.0]] * 2
    assert [s.requests.count("leave") for s in servers] == [1, 1]


def test_merging_saves_traffic_and_changes_no_sum(serve: Serve, join: Join) -> None:
    sent = {}
    for max_merge in (1, 10):
        server = serve({"w": vector()})
        config = {**MANY, "communicator_max_merge_var_num": max_merge, "communicator_send_wait_times": 1000}
        trainer, client = join([server], "async", config=config)
        for _ in range(40):
            trainer.send("w", ["w"], [0], [vector(1.0)])
        trainer.close()
        assert server.values["w"].tolist() == [-40.0] * 4
        sent[max_merge] = client.counters.rows()[server.endpoint, "w"].sent_bytes
    assert sent[10] == sent[1] / 10


def train_locally(parameter: Tensor, step: int) -> None:
    """Make one step of plain SGD on a quadratic loss."""
    parameter.sub_(0.05 * (parameter - torch.arange(4.0, dtype=torch.float64) - step))


@pytest.mark.parametrize("push_every", [1, 5])
def test_geo_with_one_trainer_is_local_and_sends_once_a_period(serve: Serve, join: Join, push_every: int) -> None:
    servers = [serve({"w.block0": vector(num=3)}, lr=-1.0), serve({"w.block1": vector(num=1)}, lr=-1.0)]
    trainer, client = join(servers, "geo", push_every=push_every)
    parameter, local = vector(), vector()
    blocks, at, heights = ["w.block0", "w.block1"], [0, 1], [3, 1]
    trainer.recv("w", blocks, at, list(parameter.split_with_sizes(heights)))
    for step in range(22):
        train_locally(parameter, step)
        train_locally(local, step)
        trainer.geo("w", blocks, at, heights, parameter, None)
    trainer.close()
    assert torch.equal(parameter, local)
    at_servers = torch.cat([servers[0].values["w.block0"], servers[1].values["w.block1"]])
    # Each exchange rounds the delta and the sum once: 22 of them, values below 30.
    assert torch.allclose(at_servers, local, rtol=0, atol=1e-12)
    sent = sum(row.sent_bytes for (peer, _), row in client.counters.rows().items() if peer)
    exchanges = -(-22 // push_every)  # the rest of 2 steps at the end, too
    assert sent == exchanges * parameter.nbytes


def test_geo_trainers_share_their_progress(serve: Serve, join: Join) -> None:
    server = serve({"w": vector()}, lr=-1.0, fanin=2)
    trainers = [join([server], "geo", t, 2, push_every=2)[0] for t in range(2)]
    parameters = [vector(), vector()]
    for trainer, parameter in zip(trainers, parameters, strict=True):
        trainer.recv("w", ["w"], [0], [parameter])
    for step in range(400):
        for trainer, parameter in zip(trainers, parameters, strict=True):
            train_locally(parameter, 0)
            trainer.geo("w", ["w"], [0], [4], parameter, None)
        if step == 0:
            assert torch.equal(server.values["w"], vector())
    optimum = torch.arange(4.0, dtype=torch.float64)
    for value in (*parameters, server.values["w"]):
        assert torch.allclose(value, optimum, atol=1e-6)


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_an_unreachable_server_ends_training_and_close_returns(serve: Serve, join: Join, mode: PsMode) -> None:
    server = serve({"w": vector()}, lr=-1.0)
    trainer, client = join([server], mode, config=MANY if mode == "async" else None, push_every=1)
    parameter = vector()
    trainer.recv("w", ["w"], [0], [parameter])
    wait_no_longer_than(client, 0.3)
    server.close()

    def train_until_it_fails() -> bool:
        if mode == "geo":
            trainer.geo("w", ["w"], [0], [4], parameter, None)
        else:
            trainer.send("w", ["w"], [0], [vector(1.0)])
            trainer.recv("w", ["w"], [0], [parameter])
        return False

    with pytest.raises(Unavailable, match=r"'w'.*" + server.endpoint) as raised:
        until(train_until_it_fails)
    assert raised.value.endpoint == server.endpoint
    trainer.close()


def test_a_client_without_a_communicator_is_not_found(serve: Serve) -> None:
    remotes, every = Remotes(), 0
    descriptor = Descriptor("geo", 0, 1, (serve({"w": vector()}).endpoint,), every)
    with pytest.raises(SpecError, match="GEO exchanges every 0 steps"):
        remotes.connect(descriptor)
    assert remotes.find_client(str(descriptor)) is None
