"""A variable of more than 2^31 bytes, and elements, goes to a server and back whole. Up to 13 GB resident.

Some of that is shared memory that both ends have mapped, and counts twice.
"""

from __future__ import annotations

import pytest
import torch
from tests.ps.torch_storage import TorchStorage

from penstock.ps.client import TrainerClient
from penstock.ps.remote import Descriptor
from penstock.ps.server import ParameterServer
from penstock.ps.settings import ServerSettings, TrainerSettings
from penstock.ps.storage import Gradient

PERIOD = 251
REPEATS = (1 << 31) // PERIOD + 2
WAITS_S = 600.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


class Sums(TorchStorage):
    """What was pushed, added up: no temporaries."""

    def update(self, block: str, gradient: Gradient) -> None:
        self.values[block] += gradient.values


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_variable_above_2_gib_is_pushed_and_pulled_whole(shared_memory: bool) -> None:
    storage = Sums({"w": (1, PERIOD)}, dtype=torch.uint8)
    storage.values["w"], storage.speed = torch.zeros(REPEATS, PERIOD, dtype=torch.uint8), {}
    with ParameterServer(ServerSettings("127.0.0.1:0", 0, 1, "async", lease_s=WAITS_S), storage) as server:
        server.start()
        client = TrainerClient(
            Descriptor("async", 0, 1, (f"127.0.0.1:{server.port}",)),
            TrainerSettings(epoch=1, lease_s=WAITS_S, deadline_s=WAITS_S, shared_memory=shared_memory),
        )
        client.connect()
        pattern = torch.arange(PERIOD, dtype=torch.uint8)
        travels = pattern.repeat(REPEATS, 1)
        assert travels.nbytes > 1 << 31
        client.send("w", ["w"], [0], [travels])
        travels.zero_()
        client.recv("w", ["w"], [0], [travels])
        assert client.links[0].route.is_local == shared_memory
        for first in range(0, REPEATS, 1 << 20):
            part = travels[first : first + (1 << 20)]
            assert torch.equal(part, pattern.expand_as(part))
        client.close()
