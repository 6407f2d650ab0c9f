"""Oracle A (DESIGN 2, rule 11): the engine equals the graph interpreter to the bit, on every schedule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from tests.property.networks import NETWORKS, Network
from tests.property.oracle import assert_engine_equals_interpreter
from tests.property.random_programs import Recipe, build, recipes

from penstock.graph.ssa import Mode

MODES: tuple[Mode, ...] = ("all_reduce", "reduce")
REPLICAS = (1, 2, 3)
BATCHES = (6, 7, 2, 1, 7, 6, 5, 3)  # even, uneven, fewer rows than replicas, a single row


@pytest.fixture(scope="module")
def network_of() -> Callable[[str], Network]:
    made: dict[str, Network] = {}

    def get(name: str) -> Network:
        if name not in made:
            made[name] = NETWORKS[name]()
        return made[name]

    return get


@pytest.mark.parametrize("num_replicas", REPLICAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_give_the_same_bits_on_every_schedule(
    name: str, mode: Mode, num_replicas: int, network_of: Callable[[str], Network]
) -> None:
    first = 1 + 100 * num_replicas
    seeds = range(first, first + len(BATCHES))
    # 5 networks x 2 modes x 3 replica counts x 8 schedules = 240
    runs = assert_engine_equals_interpreter(
        network_of(name), mode=mode, num_replicas=num_replicas, batches=BATCHES, schedule_seeds=seeds, num_threads=4
    )
    assert runs == len(BATCHES)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_replica_with_all_cores_gives_the_same_bits(name: str, network_of: Callable[[str], Network]) -> None:
    assert_engine_equals_interpreter(network_of(name), mode="all_reduce", num_replicas=1, batches=(5, 1, 5))


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(recipe=recipes())
def test_random_programs_give_the_same_bits_on_every_schedule(recipe: Recipe) -> None:
    assert_same_bits(build(recipe))


@pytest.mark.soak
@settings(max_examples=100, deadline=None, database=None)
@given(recipe=recipes())
def test_many_random_programs_are_equal_on_every_schedule(recipe: Recipe) -> None:
    assert_same_bits(build(recipe))


def assert_same_bits(network: Network) -> None:
    for number, (mode, num_replicas) in enumerate(product(MODES, REPLICAS)):
        assert_engine_equals_interpreter(
            network, mode=mode, num_replicas=num_replicas, batches=(4, 5, 2, 1, 5),
            schedule_seeds=range(1 + 5 * number, 6 + 5 * number), num_threads=3,
        )  # fmt: skip
