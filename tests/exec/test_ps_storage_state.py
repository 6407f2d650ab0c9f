"""What a server's state is worth: taken back by any number of servers, training goes on to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exec.ps_network import Local, Servers, feeds, network, serve

import penstock as fluid
from penstock.errors import ProgramError

OPT: Any = fluid.optimizer


def adam() -> Any:
    L: Any = fluid.layers
    return OPT.Adam(L.exponential_decay(0.05, 2, 0.5), regularization=fluid.regularizer.L2Decay(0.03))


def items(servers: Servers) -> list[tuple[str, dict[str, torch.Tensor]]]:
    return [item for server in servers.all for item in server.storage.state()]


def restored(servers: Servers, saved: list[tuple[str, dict[str, torch.Tensor]]]) -> Servers:
    for server in servers.all:
        for name, tensors in saved:
            server.storage.restore(name, tensors)
    return servers


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2), (2, 2)])
def test_another_number_of_servers_goes_on_where_these_were(before: int, after: int, is_sparse: bool) -> None:
    net = network(adam, is_sparse=is_sparse)
    local, servers = Local(net), serve(net, before)
    for number, feed in enumerate(feeds(6, net.dtype)):
        if number == 3:
            servers = restored(serve(network(adam, is_sparse=is_sparse, seed=9), after), items(servers))
        sent = local.step(feed)
        servers.begin_round()
        for parameter, tensors in sent.items():
            servers.push(parameter, tensors)
    for parameter in ("table", "weight"):
        assert torch.equal(servers.value(parameter), local.value(parameter))


def test_names_of_state_know_neither_blocks_nor_servers() -> None:
    one, three = (items(serve(network(adam, is_sparse=True), n)) for n in (1, 3))
    assert [name for name, _ in one] == ["numbers", "table@0", "weight@0"]
    assert sorted({name for name, _ in three}) == [
        "numbers", "table@0", "table@16", "table@8", "weight@0", "weight@2", "weight@4",
    ]  # fmt: skip
    kept = {"table", "adam_0.moment1.table", "adam_0.moment2.table", "adam_0.step", "exponential_decay_0.learning_rate"}
    for saved in (one, three):
        assert all(set(tensors) == kept for name, tensors in saved if name.startswith("table"))


def test_counters_of_immediate_modes_come_back() -> None:
    net = network(adam, is_sparse=False)
    local, servers = Local(net), serve(net, 2, "async")
    for number, feed in enumerate(feeds(4, net.dtype)):
        if number == 2:
            servers = restored(serve(net, 3, "async"), items(servers))
        for parameter, tensors in local.step(feed).items():
            servers.push(parameter, tensors)
    assert torch.equal(servers.value("weight"), local.value("weight"))
    assert torch.equal(servers.value("table"), local.value("table"))


def test_what_trainers_pulled_comes_back() -> None:
    net = network(lambda: OPT.SGD(0.05), is_sparse=False)
    servers = serve(net, 1, "async", dc_asgd=True)
    gradient = torch.full((5, 3), 2.0)
    assert servers.all[0].storage.pulled("weight", 1), "a log needs it"
    assert not serve(net, 1, "async").all[0].storage.pulled("weight", 1)
    servers.push("weight", [gradient], trainer=0)
    again = restored(serve(net, 2, "async", dc_asgd=True), items(servers))
    for each in (servers, again):
        each.push("weight", [gradient], trainer=1)
    assert torch.equal(servers.value("weight"), again.value("weight"))


def test_an_item_is_a_copy() -> None:
    servers = serve(network(adam, is_sparse=False), 1)
    saved = dict(items(servers))
    before = {name: tensor.clone() for name, tensor in saved["weight@0"].items()}
    servers.begin_round()
    servers.push("weight", [torch.ones(5, 3)])
    assert all(torch.equal(saved["weight@0"][name], tensor) for name, tensor in before.items())


def test_an_item_of_another_program_is_refused() -> None:
    servers = serve(network(adam, is_sparse=False), 1)
    with pytest.raises(ProgramError, match="another program wrote it"):
        servers.all[0].storage.restore("weight@0", {"weight": torch.zeros(5, 7)})
    servers.all[0].storage.restore("other@0", {"other": torch.zeros(5, 7)})
