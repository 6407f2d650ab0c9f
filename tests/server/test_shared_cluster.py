"""One cluster of PostgreSQL serves all workers of a run: it is made once, and ends with the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen

import pytest
from tests.server import postgres_cluster
from tests.server.postgres_cluster import Cluster, shared_cluster

Share = Callable[[], AbstractContextManager[Cluster]]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to clusters, of which none is really started."""
    done: list[str] = []

    def make(binaries: Path) -> Path:
        done.append("make")
        (tmp_path / f"cluster{len(done)}").mkdir()
        return tmp_path / f"cluster{len(done)}"

    monkeypatch.setattr(postgres_cluster, "_make", make)
    monkeypatch.setattr(Cluster, "start", lambda cluster: done.append("start"))
    monkeypatch.setattr(Cluster, "stop", lambda cluster, mode: done.append(f"stop {mode}"))
    return done


@pytest.fixture
def share(tmp_path: Path, steps: list[str]) -> Share:
    return lambda: shared_cluster(tmp_path, lambda made: steps.append("prepare"))


def test_the_next_worker_finds_it_prepared_and_the_last_ends_it(
    share: Share, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with share() as first:
        with monkeypatch.context() as another:
            another.setattr(os, "getpid", os.getppid)
            with share() as second:
                assert first.url == second.url
        assert steps == ["make", "start", "prepare"]
    assert steps[3:] == ["stop immediate"]


def test_a_worker_that_was_killed_keeps_nothing_running(tmp_path: Path, share: Share, steps: list[str]) -> None:
    ended = Popen(["true"])
    ended.wait()
    with share():
        users = tmp_path / "postgres.users"
        users.write_text(f"{users.read_text()}\n{ended.pid}")
    assert steps[-1] == "stop immediate"


def test_after_the_last_the_next_makes_another(share: Share, steps: list[str]) -> None:
    for _ in range(2):
        with share():
            pass
    assert steps == ["make", "start", "prepare", "stop immediate"] * 2
