"""The pilots of a gang on Ray, from Ray's tables; what the command prints and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.contract import request
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cluster.provisioner import Phase, Pilot
from penstock.cluster.ray import states
from penstock.cluster.ray.engine import Options, Ray
from penstock.errors import SpecError

NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}
FREE = "free: 1 of 4 CPUs, 2 of 8 GiB"


def found(placed: states.Group, ended: dict[int, str] | None = None) -> tuple[Pilot, ...]:
    return states.pilots("ray-0", 2, placed, ended or {}, NODES, FREE)


def test_pilot_runs_where_its_bundle_is() -> None:
    placed = states.group({"state": "CREATED", "bundles_to_node_id": {0: "a", 1: "b"}})
    assert found(placed) == (
        Pilot("ray-0-0", Phase.RUNNING, "running on 10.0.0.1"),
        Pilot("ray-0-1", Phase.RUNNING, "running on 10.0.0.2"),
    )


@pytest.mark.parametrize("places", [{0: "a", 1: "gone"}, {0: "a"}, {0: "a", 1: ""}])
def test_pilot_of_a_lost_node_waits(places: dict[int, str]) -> None:
    first, second = found(states.group({"state": "RESCHEDULING", "bundles_to_node_id": places}))
    assert first.phase is Phase.RUNNING
    assert second == Pilot("ray-0-1", Phase.PENDING, f"its node was lost; waits for room on another; {FREE}")


def test_gang_without_room_says_what_is_free() -> None:
    assert {one.detail for one in found(states.Group("PENDING"))} == {f"its gang waits for room; {FREE}"}
    assert {one.detail for one in found(states.Group())} == {"its placement group is being made"}
    gib = float(1 << 30)
    assert states.free({"CPU": 1.0, "memory": 2 * gib}, {"CPU": 4.0, "memory": 8 * gib}) == FREE


def test_ended_pilot_says_how() -> None:
    placed = states.Group("CREATED", {0: "a", 1: "b"})
    assert found(placed, {1: "its agent has ended"})[1] == Pilot("ray-0-1", Phase.ENDED, "its agent has ended")


def test_handle_names_gang_and_count() -> None:
    handle = states.new_handle("my.cluster-0", 12, "0a1b")
    assert states.gang_and_count(handle) == ("my.cluster-0", 12)
    assert states.gang_and_count("999999") is None
    names = [handle, f"{handle}.0", states.new_handle("cluster-0", 1, "ff")]
    assert states.handles_of("my.cluster-0", names) == [handle]


def test_ray_client_and_unknown_strategies_are_refused() -> None:
    with pytest.raises(SpecError, match="HOST:PORT"):
        Ray(Options("ray://head:10001"))
    with pytest.raises(SpecError, match="STRICT_SPREAD"):
        Ray(Options(strategy="WIDE"))


def test_plan_needs_no_ray_and_shows_no_token(tmp_path: Path) -> None:
    asked = request(tmp_path, "gang", 2)
    shown = Ray(Options("127.0.0.1:9")).plan(asked)
    assert asked.token not in shown
    assert '"CPU": 2' in shown and "127.0.0.1:9" in shown


def test_command_prints_its_plan(tmp_path: Path) -> None:
    argv = ["cluster", "ray", "--plan", "--url", "http://127.0.0.1:9", "--token", "psk_mine"]
    done = CliRunner().invoke(app, [*argv, "--cpus", "3", "--state-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert '"CPU": 3' in done.stdout and "psk_mine" not in done.stdout
