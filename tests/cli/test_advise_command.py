"""`penstock advise`: ranks of servers and trainers go on after those of settings, and submit the job with them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.command import advise
from penstock.errors import SpecError
from penstock.protocol.masking import MASK
from penstock.protocol.rest import Advice, AdvisedCluster, Job

SPEC = {"name": "ctr", "env": {"A": "1"}, "pservers": {"count": 1, "cpus": 2}, "trainers": {"count": 1, "cpus": 3}}


def cluster(name: str, pservers: int, trainers: int, *, can_run: bool) -> AdvisedCluster:
    return {
        "name": name, "pservers": pservers, "trainers": trainers, "mode": "sync", "link_gbit": None,
        "shares_cores": True, "step_ms": 20.0, "wait_ms": 5.0, "rows": 100, "samples_per_s": 5000.0,
        "current": not can_run, "can_run": can_run, "reason": "why",
    }  # fmt: skip


ANSWER = cast(
    Advice,
    {
        "options": [{"name": "2 threads", "env": {"CPU_NUM": "2"}}],
        "clusters": [cluster("two trainers", 4, 2, can_run=True), cluster("now", 1, 1, can_run=False)],
    },
)


class Server:
    """In place of a client: what is submitted."""

    url = "http://server"

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}

    def submit(self, spec: dict[str, Any], *, key: str) -> dict[str, Any]:
        self.spec = spec
        return {"id": "new", "name": spec["name"]}


def run(rank: int, **job: Any) -> dict[str, Any]:
    """Return the specification that a rank submits."""
    server = Server()
    found = cast(Job, {"name": "ctr", "kind": "managed", "spec": SPEC, **job})
    advise._run(cast(Any, server), found, ANSWER, rank, json=False)
    return server.spec


def test_a_rank_of_servers_and_trainers_submits_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(2) == {**SPEC, "pservers": {"count": 4, "cpus": 2}, "trainers": {"count": 2, "cpus": 3}}
    assert capsys.readouterr().out == "new\n"
    assert run(1) == {**SPEC, "env": {"A": "1", "CPU_NUM": "2"}}


def test_what_a_specification_cannot_ask_for_is_refused() -> None:
    with pytest.raises(SpecError, match="the script sets the mode"):
        run(3)
    with pytest.raises(SpecError, match="1 settings and 2 clusters are ranked"):
        run(4)


def test_jobs_that_cannot_be_copied_say_what_to_start() -> None:
    with pytest.raises(SpecError, match="4 servers and 2 trainers"):
        run(2, kind="attached")
    with pytest.raises(SpecError, match="started by hand; start its script with CPU_NUM=2"):
        run(1, kind="attached")
    with pytest.raises(SpecError, match=r"value of A is not shown.* --env CPU_NUM=2"):
        run(1, spec={**SPEC, "env": {"A": MASK}})


def test_rows_are_ranked_after_those_before() -> None:
    rows = advise.cluster_rows_of(ANSWER["clusters"], 1)
    assert rows[0] == ["2", "two trainers", "20.00", "5000", "25%", "why"]
    assert rows[1][:2] == ["3", "now (now)"]
