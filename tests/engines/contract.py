"""What every provisioner keeps, whichever scheduler it talks to: the tests that each engine's module inherits.

A subclass gives the fixtures `engine` and `agents`; `agents` waits until pilots run, and makes one's node vanish.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tests.support.waiting import until

from penstock.cluster.provisioner import Phase, Pilot, Provisioner, Request, Shape


class Agents(Protocol):
    """The engine's side of a test. `capacity`: so many pilots run at once, and no more."""

    capacity: int

    def lose_node_of(self, name: str) -> None: ...


def request(folder: Path, name: str, count: int) -> Request:
    """Return a gang whose agents have a server that is not there: they retry for as long as they live."""
    token = folder / "join.token"
    token.write_text("psp_of_nobody\n")
    return Request(name, count, Shape(2, 500 << 20), 600.0, "http://127.0.0.1:9", "psp_of_nobody", token)


def phases(engine: Provisioner, handle: str) -> dict[str, Phase]:
    return {pilot.name: pilot.phase for pilot in engine.poll(handle)}


def wait_for(engine: Provisioner, handle: str, *wanted: Phase) -> None:
    """Wait until the pilots of a gang are in these phases, in any order. Unknown is ended."""

    def done() -> bool:
        found = sorted(phases(engine, handle).values())
        return found == sorted(wanted) or (not found and set(wanted) == {Phase.ENDED})

    until(done, f"{handle} is {wanted}", limit_s=180.0)


class ProvisionerContract:
    """The tests."""

    def test_plan_shows_no_token_and_submits_nothing(self, engine: Provisioner, tmp_path: Path) -> None:
        asked = request(tmp_path, "planned", 1)
        assert asked.token not in engine.plan(asked)
        assert engine.poll(engine.launch(request(tmp_path, "other", 1))) != ()

    def test_launch_runs_each_pilot_under_its_name(self, engine: Provisioner, tmp_path: Path) -> None:
        handle = engine.launch(request(tmp_path, "gang", 2))
        wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)
        assert sorted(phases(engine, handle)) == ["gang-0", "gang-1"]
        engine.cancel(handle)
        wait_for(engine, handle, Phase.ENDED, Phase.ENDED)

    def test_second_launch_of_a_name_gives_the_first_handle(self, engine: Provisioner, tmp_path: Path) -> None:
        asked = request(tmp_path, "gang", 1)
        assert engine.launch(asked) == engine.launch(asked)

    def test_pilot_without_room_waits_and_says_for_what(
        self, engine: Provisioner, agents: Agents, tmp_path: Path
    ) -> None:
        first = engine.launch(request(tmp_path, "first", agents.capacity))
        wait_for(engine, first, *[Phase.RUNNING] * agents.capacity)
        second = engine.launch(request(tmp_path, "second", 1))

        def waiting() -> Pilot | None:
            (pilot,) = engine.poll(second)
            return pilot if pilot.phase is Phase.PENDING and pilot.detail else None

        until(waiting, "the second gang waits, with a reason")
        engine.cancel(second)  # before it started
        wait_for(engine, second, Phase.ENDED)
        found = engine.poll(first)
        assert {pilot.phase for pilot in found} == {Phase.RUNNING}, found

    def test_one_of_a_gang_is_cancelled_alone(self, engine: Provisioner, tmp_path: Path) -> None:
        handle = engine.launch(request(tmp_path, "gang", 2))
        wait_for(engine, handle, Phase.RUNNING, Phase.RUNNING)
        engine.cancel(handle, ["gang-1"])
        until(lambda: phases(engine, handle).get("gang-1", Phase.ENDED) is Phase.ENDED)
        found = engine.poll(handle)
        assert next(pilot.phase for pilot in found if pilot.name == "gang-0") is Phase.RUNNING, found

    def test_cancel_of_what_has_ended_or_is_unknown_is_no_error(self, engine: Provisioner, tmp_path: Path) -> None:
        handle = engine.launch(request(tmp_path, "gang", 1))
        engine.cancel(handle)
        engine.cancel(handle)
        engine.cancel(handle, ["gang-0"])
        engine.cancel(self.UNKNOWN)
        assert engine.poll(self.UNKNOWN) == ()

    def test_pilot_whose_node_vanishes_is_seen_not_to_run(
        self, engine: Provisioner, agents: Agents, tmp_path: Path
    ) -> None:
        handle = engine.launch(request(tmp_path, "gang", agents.capacity))
        wait_for(engine, handle, *[Phase.RUNNING] * agents.capacity)
        agents.lose_node_of("gang-0")
        until(lambda: phases(engine, handle).get("gang-0", Phase.ENDED) is not Phase.RUNNING)

    UNKNOWN = "999999"
