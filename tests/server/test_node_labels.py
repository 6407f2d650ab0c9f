"""Labels of nodes: jobs are placed on nodes that have theirs, and say which label no node has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.cluster.provisioner import Phase, Shape
from penstock.cluster.scaling import Limits, NodeFacts, PilotFacts, WaitingJob, decide
from penstock.errors import SpecError
from penstock.protocol.jobspec import labels_of
from penstock_server.services.placement import Room, Waits, labelled

GIB = 1 << 30


def room(name: str, **labels: str) -> Room:
    return Room(name, name, (4, 0, GIB), (4, 0, GIB), labels=labels)


def test_only_rooms_with_all_labels_are_left() -> None:
    rooms = [room("a", zone="east", gpu="a100"), room("b", zone="east"), room("c", zone="west", gpu="a100")]
    assert labelled({"zone": "east", "gpu": "a100"}, rooms) == rooms[:1]
    assert labelled({}, rooms) == rooms


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ({"gpu": "h100"}, "no READY node has the label gpu=h100 (its values there: a100)"),
        ({"ssd": "yes"}, "no READY node has the label ssd=yes. Start one"),
        ({"zone": "west", "gpu": "a100"}, "READY nodes have these labels, but none has all of them"),
    ],
)
def test_why_names_the_label_that_no_node_has(selector: dict[str, str], words: str) -> None:
    answer = labelled(selector, [room("a", zone="east", gpu="a100"), room("b", zone="west")])
    assert isinstance(answer, Waits)
    assert answer.forever, "it must not hold back jobs behind it"
    assert words in answer.why


@pytest.mark.parametrize("text", ["gpu", "=a100", "GPU=a100", "gpu=a b", "gpu=" + "a" * 64])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="KEY=VALUE"):
        labels_of([text])


def test_labels_are_read_once_for_each_key() -> None:
    assert labels_of(["gpu=a100", "example.org/rack=7", "spot="]) == {
        "gpu": "a100",
        "example.org/rack": "7",
        "spot": "",
    }
    with pytest.raises(SpecError, match="one value"):
        labels_of(["gpu=a100", "gpu=h100"])


def test_pilots_are_launched_for_labels_that_they_have() -> None:
    job = WaitingJob("j", ((1, 0, 1),), {"zone": "east"})
    east, none = Limits(Shape(1, 1), 2, labels={"zone": "east"}), Limits(Shape(1, 1), 2)
    elsewhere = [NodeFacts("READY", (4, 0, GIB), labels={"zone": "west"})]
    assert [one.count for one in decide([job], [], elsewhere, east).launches] == [1]
    refused = decide([job], [], elsewhere, none)
    assert refused.launches == ()
    assert "asks for nodes with zone=east" in refused.unmet[0]
    coming = [PilotFacts("p-0", Phase.PENDING, "")]
    assert decide([job], coming, elsewhere, east).launches == ()


async def why_of(server: Server, job: dict[str, Any], words: str) -> str:
    found = await until_answer(lambda: server.job(job["id"]), lambda job: words in job["why"])
    return str(found["why"])


@pytest.mark.asyncio
async def test_jobs_go_where_their_labels_are(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path), FakeClock()) as server:
        east, west = await server.join("east"), await server.join("west")
        async with (
            server.agent(east, labels={"zone": "east"}) as one,
            server.agent(west, labels={"zone": "west"}) as other,
        ):
            lost = await server.submit(name="lost", node_selector={"zone": "north"})
            await server.submit(name="to-west", node_selector={"zone": "west"})
            await server.submit(name="to-east", node_selector={"zone": "east"})
            assert [(await agent.desired(1))[0]["job_name"] for agent in (one, other)] == ["to-east", "to-west"]
            assert "zone=north (its values there: east, west)" in await why_of(server, lost, "node_selector")
            spec = {"name": "p", "entrypoint": ["a"], "node_selector": {"zone": "west"}}
            plan = (await server.http.post("/api/v1/jobs:plan", json={"spec": spec})).json()
            reasons = {node["name"]: node["reason"] for node in plan["nodes"]}
            assert reasons["east"] == "its label zone is 'east'; the job asks for 'west'"
            assert "takes trainer 0" in reasons["west"]
            shown = (await server.http.get("/api/v1/nodes")).json()["items"]
            assert [node["labels"] for node in shown] == [{"zone": "east"}, {"zone": "west"}]


@pytest.mark.asyncio
async def test_labels_are_those_of_the_newest_connection(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path), FakeClock()) as server:
        node = await server.join()
        async with server.agent(node, labels={"zone": "east"}):
            job = await server.submit(node_selector={"zone": "west"})
            await why_of(server, job, "no READY node has the label zone=west")
        async with server.agent(node, labels={"zone": "west"}) as agent:
            assert (await agent.desired(1))[0]["job_id"] == job["id"]
