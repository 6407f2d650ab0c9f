"""How the end of a process reads in words."""

from __future__ import annotations

import json

import pytest

from penstock.telemetry.outcome import MAX_ERROR, decide


class Unspeakable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("exit_code", [None, 0, False])
def test_an_exit_code_of_zero_is_no_failure(exit_code: object) -> None:
    assert not decide(uncaught=None, exit_code=exit_code, returned=False).failed


def test_an_exit_that_was_caught_is_no_failure() -> None:
    assert not decide(uncaught=None, exit_code=3, returned=True).failed


def test_an_exception_counts_more_than_an_exit_code() -> None:
    assert decide(uncaught=ValueError("boom"), exit_code=3, returned=False).error == "ValueError: boom"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(), "ValueError"),
        (ValueError("a\0b"), "ValueError: ab"),
        (ValueError("\ud800"), "ValueError: ?"),
        (Unspeakable(), "Unspeakable: (its text raised RuntimeError)"),
    ],
)
def test_any_exception_can_be_told(error: Exception, words: str) -> None:
    body = decide(uncaught=error, exit_code=None, returned=False).body()
    assert json.loads(json.dumps(body)) == {"failed": True, "error": words}


def test_a_long_text_is_cut() -> None:
    assert len(decide(uncaught=ValueError("x" * 9999), exit_code=None, returned=False).error) == MAX_ERROR
