"""The actors of a gang while Ray's head answers late: what they have to tell it, or to give back, is not lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray.exceptions
import ray.util
from tests.support.waiting import until

from penstock.cluster.ray import actors

AWAY = ray.exceptions.GetTimeoutError("the GCS does not answer")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "AGAIN_S", 0.0)
    monkeypatch.setattr(actors, "KEPT_S", 0.0)
    context = SimpleNamespace(current_actor="this actor", was_current_actor_reconstructed=True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def plan(folder: Path) -> actors.Plan:
    return {
        "gang": "gang", "handle": "gang.1x0", "count": 1, "bundle": {}, "strategy": "PACK", "python": "/nowhere/python",
        "agent": [], "environ": {}, "pilot_dir": str(folder), "lock": "lock",
    }  # fmt: skip


def test_pilot_whose_folder_cannot_be_made_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang, killed = Mock(), Mock()
    monkeypatch.setattr(ray, "get_actor", Mock(side_effect=[gang, ValueError]))
    monkeypatch.setattr(ray, "get", Mock())
    monkeypatch.setattr(ray, "kill", killed)
    actors.Pilot(plan(tmp_path / "missing"), 0)
    until(lambda: killed.called, "the pilot has ended")
    assert str(tmp_path / "missing") in gang.ended.remote.call_args.args[1]


def test_pilot_reports_its_end_when_the_head_is_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang, killed = Mock(), Mock(side_effect=[AWAY, None])
    monkeypatch.setattr(ray, "get_actor", Mock(side_effect=[AWAY, gang, ValueError, ValueError]))
    monkeypatch.setattr(ray, "get", Mock())
    monkeypatch.setattr(ray, "kill", killed)
    actors.Pilot(plan(tmp_path), 0)
    until(lambda: killed.call_count == 2, "the pilot has ended")
    gang.ended.remote.assert_called_once()
    assert gang.ended.remote.call_args.args[1].startswith("its agent cannot be started: ")
    assert not list(tmp_path.iterdir())


def test_gang_gives_its_place_back_when_the_head_is_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    removed, killed = Mock(side_effect=[AWAY, AWAY, None]), Mock(side_effect=[None, AWAY, None])
    monkeypatch.setattr(ray.util, "list_named_actors", list)  # the pilot is gone
    monkeypatch.setattr(ray.util, "get_placement_group", lambda name: name)
    monkeypatch.setattr(ray.util, "remove_placement_group", removed)
    monkeypatch.setattr(ray, "get_actor", lambda name: name)
    monkeypatch.setattr(ray, "kill", killed)
    actors.Gang(plan(tmp_path))
    until(lambda: killed.call_count == 3, "the pilot and the gang are killed")
    assert removed.call_args.args == ("gang.1x0",)
    assert removed.call_count == 3
    assert killed.call_args.args == ("gang.1x0",)
