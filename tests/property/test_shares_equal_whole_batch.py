"""Oracle B (DESIGN 2, rules 6 and 8): replicas on shares of a batch train like one replica on the whole batch.

In float64; row-independent programs; a loss that is a mean over rows. Tolerance 1e-9 after 20 steps: sums are
split differently, so each step adds a few units in the last place (1e-16 relative), which Adam's division by
sqrt(v) + 1e-8 can enlarge by 1e6 where a gradient is as good as zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from tests.property.networks import Network, conv_module, conv_net, ctr_dnn, fit_a_line, transformer
from tests.property.oracle import copy_of, started, value
from tests.property.random_programs import Recipe, build, recipes

from penstock.exec.data_parallel import DataParallel
from penstock.exec.feeding import share_sizes
from penstock.exec.memory import ReplicaMemory
from penstock.graph.ssa import Mode
from penstock.scope import Scope

BATCHES = (6, 7, 5, 2, 1, 9, 4, 7, 3, 8) * 2  # even, uneven, fewer rows than replicas, a single row
TOLERANCE = 1e-9

ROW_INDEPENDENT: dict[str, Callable[[], Network]] = {
    "fit_a_line sgd": lambda: fit_a_line("sgd", "float64"),
    "fit_a_line adam": lambda: fit_a_line("adam", "float64"),
    "ctr_dnn sgd": lambda: ctr_dnn("sgd", "float64", metrics=False),
    "ctr_dnn adam": lambda: ctr_dnn("adam", "float64", metrics=False),
    "ctr_dnn sgd dense": lambda: ctr_dnn("sgd", "float64", sparse=False, metrics=False),
    "ctr_dnn adam dense": lambda: ctr_dnn("adam", "float64", sparse=False, metrics=False),
    "summed weights": lambda: build(Recipe((("summed weights", 0, 0),), 1, "sgd"), "float64"),
    "transformer sgd": lambda: transformer("sgd", "float64"),
    "transformer adam": lambda: transformer("adam", "float64"),
}


def trained(
    network: Network, start: Scope, mode: Mode, num_replicas: int, batches: Sequence[int]
) -> tuple[Scope, list[float]]:
    """Train from a copy of `start`; return the scope and the losses over all rows."""
    scope = copy_of(start)
    core = DataParallel(
        network.main, ReplicaMemory(scope), mode=mode, num_replicas=num_replicas, loss_name=network.loss
    )
    losses = []
    try:
        for number, rows in enumerate(batches):
            (parts,) = core.run(network.feed(rows, number), [network.loss])
            weights = share_sizes(rows, num_replicas)
            losses.append(sum(float(p) * w for p, w in zip(parts, weights, strict=True)) / rows)
    finally:
        core.close()
    return scope, losses


def assert_close(whole: tuple[Scope, list[float]], shared: tuple[Scope, list[float]], where: str) -> None:
    """Compare losses of every step and all persistables at the end."""
    assert shared[1] == pytest.approx(whole[1], abs=TOLERANCE, rel=TOLERANCE), where
    for name in whole[0].names():
        difference = (value(whole[0], name) - value(shared[0], name)).abs().max().item()
        assert difference <= TOLERANCE, f"{where}: {name} differs by {difference}"


@pytest.mark.parametrize("name", ROW_INDEPENDENT)
def test_networks_on_shares_train_like_the_whole_batch(name: str) -> None:
    network = ROW_INDEPENDENT[name]()
    start = started(network.startup)
    whole = trained(network, start, "all_reduce", 1, BATCHES)
    for mode in ("all_reduce", "reduce"):
        for num_replicas in (2, 3):
            shared = trained(network, start, mode, num_replicas, BATCHES)
            assert_close(whole, shared, f"{name} {mode} x{num_replicas}")


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(recipe=recipes(rows_independent=True))
def test_random_programs_on_shares_train_like_the_whole_batch(recipe: Recipe) -> None:
    assert_shares_equal_whole(build(recipe, "float64"))


@pytest.mark.soak
@settings(max_examples=100, deadline=None, database=None)
@given(recipe=recipes(rows_independent=True))
def test_many_random_programs_on_shares_equal_the_whole_batch(recipe: Recipe) -> None:
    assert_shares_equal_whole(build(recipe, "float64"))


def assert_shares_equal_whole(network: Network) -> None:
    start = started(network.startup)
    whole = trained(network, start, "all_reduce", 1, BATCHES)
    assert_close(whole, trained(network, start, "reduce", 2, BATCHES), "reduce x2")
    assert_close(whole, trained(network, start, "all_reduce", 3, BATCHES), "all_reduce x3")


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
def test_batch_norm_equals_torch_run_share_by_share(mode: Mode) -> None:
    """Each replica normalises its own rows and keeps its own statistics; gradients add up weighted by rows."""
    batches = [b for b in BATCHES if b >= 3]
    network = conv_net("sgd", "float64")
    scope, _ = trained(network, started(network.startup), mode, 3, batches)
    master = conv_module(torch.float64)
    buffers = [copy.deepcopy(dict(master.named_buffers())) for _ in range(3)]
    for number, rows in enumerate(batches):
        feed = {n: torch.from_numpy(v) for n, v in network.feed(rows, number).items()}
        master.zero_grad()
        first = 0
        for replica, size in enumerate(share_sizes(rows, 3)):
            x, label = (feed[n][first : first + size] for n in ("x", "label"))
            first += size
            out = torch.func.functional_call(master, {**dict(master.named_parameters()), **buffers[replica]}, x)
            picked = out.softmax(-1).gather(1, label)
            (-(picked.log()).mean() * (size / rows)).backward()
        with torch.no_grad():
            for parameter in master.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    for name, wanted in {**dict(master.named_parameters()), **buffers[0]}.items():
        assert torch.allclose(value(scope, f"sequential_0.{name}"), wanted, rtol=1e-12, atol=1e-14), name
