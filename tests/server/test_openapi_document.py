"""The OpenAPI document says what the server does: schemathesis finds nothing that contradicts it (flaw 14)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.server.harness import Server

from penstock_server.app import create_app
from penstock_server.settings import Settings

if TYPE_CHECKING:
    from tests.server.openapi_attack import Outcome

WHO = pytest.mark.parametrize("authenticated", [True, False], ids=["authenticated", "anonymous"])


PHASES = ("examples", "coverage", "fuzzing", "stateful")


def check(outcome: Outcome, described: int) -> None:
    """Nothing failed, and the run reached every operation."""
    assert not outcome.errors, outcome.errors
    assert not outcome.failures, "\n\n".join(f"{key}: {text}" for key, text in outcome.failures.items())
    assert len(outcome.operations) == described, sorted(outcome.operations)


def attack(folder: Path, *, authenticated: bool, examples: int, phases: Collection[str] = PHASES) -> Outcome:
    from tests.server import openapi_attack  # loads schemathesis, a second that each worker would pay to collect this

    return openapi_attack.attack(folder / "state", authenticated=authenticated, examples=examples, phases=phases)


def num_operations(folder: Path) -> int:
    document = create_app(Settings(state_dir=folder)).openapi()
    return sum(len(item) for item in document["paths"].values())


@pytest.mark.slow
def test_flaw_14_document_and_server_agree(tmp_path: Path) -> None:
    outcome = attack(tmp_path, authenticated=True, examples=2)
    check(outcome, num_operations(tmp_path))
    assert set(outcome.cases) >= set(PHASES)
    assert {200, 201, 202, 204, 404, 405, 422} <= set(outcome.statuses)


@pytest.mark.slow
def test_document_and_server_agree_about_anonymous_calls(tmp_path: Path) -> None:
    """Nearly all are refused before anything is read, so one phase of the three meets every answer."""
    outcome = attack(tmp_path, authenticated=False, examples=2, phases=["fuzzing"])
    check(outcome, num_operations(tmp_path))
    assert set(outcome.cases) == {"fuzzing"}
    assert 401 in outcome.statuses


@pytest.mark.soak
@WHO
def test_flaw_14_document_and_server_agree_for_long(tmp_path: Path, authenticated: bool) -> None:
    check(attack(tmp_path, authenticated=authenticated, examples=300), num_operations(tmp_path))


def test_each_problem_is_described_by_its_own_status(tmp_path: Path) -> None:
    document = create_app(Settings(state_dir=tmp_path)).openapi()
    for path, item in document["paths"].items():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                assert status.isdigit(), (path, status)
                if int(status) >= 400:
                    named = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
                    assert list(named["content"]) == ["application/problem+json"], (path, status)


def test_document_says_who_may_call_what(tmp_path: Path) -> None:
    document = create_app(Settings(state_dir=tmp_path)).openapi()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "session"}
    needed = {
        operation["operationId"]: operation["security"]
        for item in document["paths"].values()
        for operation in item.values()
    }
    assert {name for name, security in needed.items() if not security} == {
        "getHealth", "getReadiness", "openSession", "joinNode",
    }  # fmt: skip
    assert needed["submitJob"] == [{"bearer": []}, {"session": []}]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/v1/join-tokens", "POST"),
        ("DELETE", "/api/v1/tokens", "GET, POST"),
        ("GET", "/api/v1/jobs/x:cancel", "POST"),
        ("DELETE", "/api/v1/jobs/x:cancel", "POST"),
        ("HEAD", "/healthz", "GET"),
        ("POST", "/jobs/x", "GET, HEAD"),
    ],
)
async def test_wrong_method_is_answered_with_the_right_ones(
    sqlite_server: Server, method: str, path: str, allowed: str
) -> None:
    answer = await sqlite_server.http.request(method, path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)


@pytest.mark.asyncio
async def test_no_such_call_is_404_by_any_method(sqlite_server: Server) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = await sqlite_server.http.request(method, "/api/v1/no-such-call")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), method
