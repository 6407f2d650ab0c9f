"""A hello that waits for the database beside the verdict on its node's lease: the node's replicas are not lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.faults.control_plane import ControlPlane

WAITS_S = 0.2
"""How long a task has to come to the lock that the test holds. If it needs more, the race is not played."""


@pytest.mark.parametrize("silent_s", [7.0, 100.0])
@pytest.mark.parametrize("is_hello_first", [False, True])
def test_hello_beside_a_lease_that_is_over_loses_nothing(
    plane: ControlPlane, silent_s: float, *, is_hello_first: bool
) -> None:
    plane.submit(trainers=1, pservers=0, restarts=0, on=[], cpus=1)
    plane.settle_down(4)
    assert [one.state for one in plane.seen().replicas] == ["RUNNING"]
    plane.wait(silent_s)
    _reconnect(plane)
    plane.do(_race(plane, is_hello_first=is_hello_first))
    plane.settle_messages(3)
    plane.step("watch")
    assert [one.state for one in plane.seen().replicas] == ["RUNNING"]
    assert {node.state for node in plane.seen().nodes} == {"READY"}


def test_order_that_waits_for_a_hello_is_not_lost(plane: ControlPlane) -> None:
    """What an agent has not taken yet goes to another node only if its agent is away."""
    plane.submit(trainers=1, pservers=0, restarts=0, on=[], cpus=1)
    plane.step("schedule")
    plane.wait(7.0)
    _reconnect(plane)
    plane.do(_race(plane, is_hello_first=False))
    assert [one.state for one in plane.seen().replicas] == ["ASSIGNED"]


def _reconnect(plane: ControlPlane) -> None:
    for node in plane.nodes:
        node.drop()
        plane._connect(node)


async def _race(plane: ControlPlane, *, is_hello_first: bool) -> None:
    """Have the watch and the hellos wait for a writer, in one order or the other, and then go on."""
    runtime = plane.server.runtime
    assert runtime is not None
    hellos = [(wire, wire.to_server.popleft()) for wire in plane.wires[-len(plane.nodes) :]]
    tasks: list[asyncio.Task[Any]] = []
    async with runtime.database.write():
        if not is_hello_first:
            tasks.append(asyncio.create_task(plane.server.step("watch")))
            await asyncio.sleep(WAITS_S)
        tasks += [asyncio.create_task(plane.server.receive(*hello)) for hello in hellos]
        await asyncio.sleep(WAITS_S)
        if is_hello_first:
            tasks.append(asyncio.create_task(plane.server.step("watch")))
            await asyncio.sleep(WAITS_S)
    await asyncio.gather(*tasks)
