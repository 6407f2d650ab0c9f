"""Blocks of parameters on servers against the whole program in an Executor: equal to the bit, cut or not.

The Executor computes the gradients of each step; servers are given the same ones, cut by rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exec.ps_network import Local, Network, Servers, feeds, network, serve

import penstock as fluid
from penstock.errors import PeerError
from penstock.ps.storage import Gradient

OPT: Any = fluid.optimizer
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": OPT.SGD,
    "Momentum": lambda rate, **more: OPT.Momentum(rate, 0.9, use_nesterov=True, **more),
    "LarsMomentum": lambda rate, **more: OPT.LarsMomentum(rate, 0.9, 0.02, 0.1, **more),
    "Adagrad": OPT.Adagrad,
    "DecayedAdagrad": OPT.DecayedAdagrad,
    "Adam": OPT.Adam,
    "AdamW": OPT.AdamW,
    "Adamax": OPT.Adamax,
    "RMSProp": lambda rate, **more: OPT.RMSProp(rate, momentum=0.9, centered=True, **more),
    "Ftrl": lambda rate, **more: OPT.Ftrl(rate, l1=0.01, l2=0.1, **more),
}
STEPS = 4


@functools.cache
def made(kind: str, variant: str) -> Callable[[], Any]:
    """Return what makes an optimizer: plain, or with a schedule and a regulariser (AdamW has its own decay)."""
    L: Any = fluid.layers

    def make() -> Any:
        if variant == "plain":
            return OPTIMIZERS[kind](0.05)
        decay = {"L1": fluid.regularizer.L1Decay, "L2": fluid.regularizer.L2Decay}[variant](0.03)
        more = {} if kind == "AdamW" else {"regularization": decay}
        return OPTIMIZERS[kind](L.exponential_decay(0.05, 2, 0.5, staircase=True), **more)

    return make


def follow(local: Local, servers: Servers, steps: int) -> None:
    """Give the servers the gradients of `steps` steps of the local run."""
    for feed in feeds(steps, local.net.dtype):
        sent = local.step(feed)
        servers.begin_round()
        for parameter, tensors in sent.items():
            servers.push(parameter, tensors)


def follow_the_executor(net: Network, nums: tuple[int, ...]) -> None:
    """Compare, for each number of servers, what they come to with what an Executor does."""
    for num_servers in nums:
        local, servers = Local(net), serve(net, num_servers)
        first = servers.value("table")
        assert torch.equal(first, local.value("table")), "startup"
        follow(local, servers, STEPS)
        for parameter in ("table", "weight"):
            assert torch.equal(servers.value(parameter), local.value(parameter)), (num_servers, parameter)
        assert not torch.equal(servers.value("table"), first)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("kind", "variant"), [*((kind, v) for kind in OPTIMIZERS for v in ("plain", "L2")), ("SGD", "L1"), ("Adam", "L1")]
)
def test_servers_update_as_one_machine_does(kind: str, is_sparse: bool, variant: str) -> None:
    follow_the_executor(network(made(kind, variant), is_sparse=is_sparse), (1, 3))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_servers_update_as_one_machine_does_in_double_precision(kind: str) -> None:
    follow_the_executor(network(made(kind, "plain"), is_sparse=True, dtype="float64"), (2,))


def test_parameters_that_may_be_cut_are_cut() -> None:
    servers = serve(network(made("Adam", "L2"), is_sparse=True), 3)
    assert [s.storage.blocks() for s in servers.all] == [
        ["table.block0", "weight.block0"],
        ["table.block1", "weight.block1"],
        ["table.block2", "weight.block2"],
    ]


def test_clipped_gradients_are_what_servers_are_given() -> None:
    clip = fluid.clip.GradientClipByGlobalNorm(0.01)
    net = network(lambda: OPT.Adam(0.05, grad_clip=clip), is_sparse=False)
    local, servers = Local(net), serve(net, 2)
    follow(local, servers, STEPS)
    assert torch.equal(servers.value("weight"), local.value("weight"))


def test_a_round_advances_schedule_and_counters_once() -> None:
    net = network(made("Adam", "L2"), is_sparse=False)
    servers = serve(net, 1)
    scope = servers.all[0].scope
    for _ in range(3):
        servers.begin_round()
    step, rate = scope.find("adam_0.step"), scope.find("exponential_decay_0.learning_rate")
    assert step is not None and rate is not None
    assert float(step) == 3.0
    assert float(rate) == pytest.approx(0.025)  # runs 0 and 1 have 0.05, 2 and 3 the half


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_in_immediate_modes_each_block_counts_its_own_pushes(mode: Any) -> None:
    net = network(made("Adam", "L2"), is_sparse=False)
    servers = serve(net, 1, mode)
    alone, gradient = serve(net, 1, mode), torch.ones(5, 3)
    for _ in range(4):
        servers.push("table", [torch.ones(23, 5)])
    for _ in range(2):
        servers.push("weight", [gradient])
        alone.push("weight", [gradient])
    assert torch.equal(servers.value("weight"), alone.value("weight"))
    steps = {n: float(servers.all[0].scope.find(n) or 0) for n in ("adam_0.step@table", "adam_0.step@weight")}
    assert steps == {"adam_0.step@table": 4.0, "adam_0.step@weight": 2.0}


def test_one_async_trainer_is_the_local_run() -> None:
    net = network(made("Adamax", "L1"), is_sparse=True)
    local, servers = Local(net), serve(net, 3, "async")
    for feed in feeds(STEPS, "float32"):
        for parameter, tensors in local.step(feed).items():
            servers.push(parameter, tensors)
    # Blocks of the weight are pushed once a step, blocks of the table too: all counters equal the local one.
    assert torch.equal(servers.value("weight"), local.value("weight"))
    assert torch.equal(servers.value("table"), local.value("table"))


def test_geo_adds_deltas_dense_and_by_rows() -> None:
    servers = serve(network(made("Adam", "plain"), is_sparse=True), 2, "geo")
    table, weight = servers.value("table").clone(), servers.value("weight").clone()
    rows = torch.tensor([0, 22, 0])
    servers.push("weight", [torch.full((5, 3), 0.5)])
    servers.push("table", [rows, torch.ones(3, 5)])
    assert torch.equal(servers.value("weight"), weight + 0.5)
    table[0] += 2.0
    table[22] += 1.0
    assert torch.allclose(servers.value("table"), table)


def test_delay_compensation_is_against_what_the_trainer_pulled() -> None:
    net = network(made("SGD", "plain"), is_sparse=False)
    servers = serve(net, 1, "async", dc_asgd=True)
    storage, gradient = servers.all[0].storage, torch.full((5, 3), 2.0)
    first = storage.value("weight").clone()
    for trainer in (0, 1):
        storage.pulled("weight", trainer)
    servers.push("weight", [gradient], trainer=0)
    second = first - 0.05 * gradient  # nobody else has updated since
    assert torch.allclose(storage.value("weight"), second)
    servers.push("weight", [gradient], trainer=1)
    compensated = gradient + gradient * gradient * (second - first)
    assert torch.allclose(storage.value("weight"), second - 0.05 * compensated)


@pytest.mark.parametrize(
    ("block", "gradient", "words"),
    [
        ("table.block9", Gradient(torch.ones(1)), "table.block9"),
        ("weight.block0", Gradient(torch.ones(9, 3)), r"\[3, 3\]"),
        ("weight.block0", Gradient(torch.ones(3, 3, dtype=torch.float64)), "float32"),
        ("weight.block0", Gradient(torch.ones(1, 3), torch.tensor([0])), "rows"),
        ("table.block0", Gradient(torch.ones(12, 5)), "rows"),
        ("table.block0", Gradient(torch.ones(1, 5), torch.tensor([12])), "rows 0 to 11"),
        ("table.block0", Gradient(torch.ones(1, 5), torch.tensor([-1])), "rows 0 to 11"),
        ("table.block0", Gradient(torch.ones(2, 5), torch.tensor([1])), "expected"),
        ("table.block0", Gradient(torch.ones(1, 5), torch.tensor([1], dtype=torch.int32)), "int64"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(block: str, gradient: Gradient, words: str) -> None:
    servers = serve(network(made("Adam", "L2"), is_sparse=True), 2)
    before = [t.clone() for s in servers.all for _, items in s.storage.state() for t in items.values()]
    with pytest.raises(PeerError, match=words):
        servers.all[0].storage.update(block, gradient)
    after = [t for s in servers.all for _, items in s.storage.state() for t in items.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
