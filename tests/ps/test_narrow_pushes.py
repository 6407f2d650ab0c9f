"""Gradients pushed in 16 bits over a network: what travels, what the server makes of it, and where they do not."""

from __future__ import annotations

import pytest
import torch
from tests.ps.small_server import SmallServer
from tests.transpile.recorded import tower

import penstock as fluid
from penstock.errors import PeerError, ProgramError, SpecError
from penstock.ps.client import TrainerClient
from penstock.ps.narrow import narrowed, widened
from penstock.ps.remote import Descriptor
from penstock.ps.requests import gradient_of
from penstock.ps.settings import TrainerSettings
from penstock.ps.storage import BlockSpec
from penstock.ps.wire import Message, Value, to_wire
from penstock.transpile.config import DistributeTranspilerConfig


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_large_finite_gradients_stay_finite(wire_dtype: str) -> None:
    dtype = getattr(torch, wire_dtype)
    given = torch.tensor([1.0, 3.3e38, -3.4e38, float("inf"), float("-inf"), float("nan")])
    found = narrowed(given, wire_dtype)
    assert found.dtype == dtype
    largest = torch.finfo(dtype).max
    assert found[:5].tolist() == [1.0, min(largest, found[1].item()), -largest, float("inf"), float("-inf")]
    assert found[1].isfinite()
    assert found[5].isnan()


def test_only_float32_is_narrowed() -> None:
    doubles, single = torch.ones(2, dtype=torch.float64), torch.ones(2)
    assert narrowed(doubles, "float16") is doubles
    assert narrowed(single, "float32") is single


def test_values_are_widened_to_the_dtype_of_their_block() -> None:
    assert widened(torch.ones(2, dtype=torch.float16), torch.float32).dtype == torch.float32
    half = torch.ones(2, dtype=torch.float16)
    assert widened(half, torch.float16) is half
    assert widened(half, torch.float64) is half


def test_a_server_takes_narrow_values_of_float32_blocks_only() -> None:
    fields: dict[str, Value] = {"job": "local", "trainer": 0, "epoch": 0, "round": 0, "block": "w"}
    push = Message("push", fields, [to_wire("values", torch.full((2,), 0.5, dtype=torch.float16))])
    found = gradient_of(push, {"w": BlockSpec(torch.float32, torch.Size((2,)), is_table=False)})
    assert found.values.dtype == torch.float32
    assert found.values.tolist() == [0.5, 0.5]
    with pytest.raises(PeerError, match=r"the block is torch\.float64"):
        gradient_of(push, {"w": BlockSpec(torch.float64, torch.Size((2,)), is_table=False)})


@pytest.mark.parametrize(("local", "travelled"), [(False, 0.333251953125), (True, 0.3333333432674408)])
def test_gradients_are_narrowed_on_a_network_only(local: bool, travelled: float) -> None:
    server = SmallServer({"w": torch.zeros(1)}, local=local)
    descriptor = Descriptor("sync", 0, 1, (server.endpoint,), wire_dtype="float16")
    client = TrainerClient(descriptor, TrainerSettings(epoch=1, start_s=60.0))
    try:
        client.connect()
        client.send("w", ["w"], [0], [torch.full((1,), 1 / 3)])
        client.send_barrier()
        out = torch.empty(1)
        client.recv("w", ["w"], [0], [out])
        assert out.item() == -travelled
    finally:
        client.close()
        server.close()


def test_the_descriptor_keeps_the_dtype_of_the_wire() -> None:
    text = "geo 0/2 h:1,h:2 every=7 wire=bfloat16"
    assert str(Descriptor.parse(text)) == text
    assert Descriptor.parse("sync 0/2 h:1,h:2").wire_dtype == "float32"
    with pytest.raises(ProgramError, match="does not name the parameter servers"):
        Descriptor.parse("sync 0/2 h:1 wire=int8")


def test_an_unknown_wire_dtype_is_refused_by_name() -> None:
    config = DistributeTranspilerConfig()
    config.wire_dtype = "float16"
    with pytest.raises(SpecError, match="wire_dtype is 'int8'; expected one of float32, float16, bfloat16"):
        config.wire_dtype = "int8"


@pytest.mark.parametrize(("geo", "wire"), [(False, " wire=float16"), (True, "")])
def test_trainers_are_made_for_the_dtype_but_in_geo_mode(geo: bool, wire: str) -> None:
    config = DistributeTranspilerConfig()
    config.wire_dtype, config.geo_sgd_mode, config.sync_mode = "float16", geo, not geo
    recorded, made = tower(), fluid.DistributeTranspiler(config)
    if geo:
        with pytest.raises(SpecError, match="wire_dtype is 'float16' in GEO mode"):
            made.transpile(0, recorded.main, "10.0.0.1:6170", 1, sync_mode=False, startup_program=recorded.startup)
    else:
        made.transpile(0, recorded.main, "10.0.0.1:6170", 1, startup_program=recorded.startup)
        assert str(made.descriptor).endswith(wire)
