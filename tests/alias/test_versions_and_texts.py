"""`paddle.version`, `paddle.compat`, `paddle.utils.plot` and loggers of scripts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.alias import compat, log_helper, plot, version, wrapped_decorator
from penstock.errors import SpecError
from penstock.program.layers import nests


def test_a_logger_writes_once_and_alone(capfd: pytest.CaptureFixture[str]) -> None:
    for level in ("INFO", "WARNING"):
        logger = log_helper.get_logger("test_of_log_helper", getattr(logging, level), fmt="%(levelname)s|%(message)s")
    logger.info("quiet")
    logger.warning("once")
    assert capfd.readouterr().err == "WARNING|once\n"


@pytest.mark.parametrize(("least", "most"), [("1.6.0", None), ("1.8.5", "1.8.5"), ("1.8", "2"), ("0", "1.8.5.0")])
def test_a_range_with_the_release_passes(least: str, most: str | None) -> None:
    version.require_version(least, most)


@pytest.mark.parametrize(("least", "most"), [("1.8.6", None), ("2.0", None), ("1.5", "1.7"), ("1.10", None)])
def test_a_range_without_the_release_is_refused(least: str, most: str | None) -> None:
    with pytest.raises(SpecError, match=r"Penstock has the API of 1\.8\.5"):
        version.require_version(least, most)


@pytest.mark.parametrize("text", ["1.8.x", "", 1.8])
def test_a_text_that_is_no_version_is_refused(text: Any) -> None:
    with pytest.raises(SpecError, match="is no version"):
        version.require_version(text)


def test_text_and_bytes_convert_alone_and_in_containers() -> None:
    assert (compat.to_text(b"a"), compat.to_bytes("\u00e9"), compat.to_text(3)) == ("a", b"\xc3\xa9", 3)
    words: list[Any] = [b"a", "b"]
    assert compat.to_text(words) == ["a", "b"]
    assert words == [b"a", "b"]
    assert compat.to_text(words, inplace=True) is words == ["a", "b"]
    assert compat.to_bytes({"a"}) == {b"a"}


@pytest.mark.parametrize(
    ("value", "digits", "expected"), [(0.5, 0, 1.0), (-2.5, 0, -3.0), (2.25, 1, 2.3), (2.4, 0, 2.0)]
)
def test_halves_round_away_from_zero(value: float, digits: int, expected: float) -> None:
    assert compat.round(value, digits) == expected


def test_curves_are_kept_and_not_drawn_when_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_PLOT", "True")
    curves = plot.Ploter("train", "test")
    curves.append("train", 1, 0.5)
    curves.plot("/nonexistent/curves.png")
    with pytest.raises(KeyError):
        curves.append("other", 1, 0.5)
    curves.reset()


def test_a_manager_is_made_at_each_call_and_decorates_functions() -> None:
    entered: list[str] = []

    @wrapped_decorator.signature_safe_contextmanager
    def noted(name: str) -> Iterator[str]:
        """Note a name."""
        entered.append(name)
        yield name

    with noted("a") as first, noted("b"):
        assert (first, noted.__doc__) == ("a", "Note a name.")
    assert noted("c")(lambda: len(entered))() == 3


def test_a_wrapped_decorator_applies_at_each_call() -> None:
    applied: list[str] = []

    def counting(func: Callable[[int], int]) -> Callable[[int], int]:
        applied.append(func.__name__)
        return lambda value: func(value) + 1

    @wrapped_decorator.wrap_decorator(counting)
    def doubled(value: int) -> int:
        return 2 * value

    assert not applied
    assert (doubled(1), doubled(2), applied) == (3, 5, ["doubled", "doubled"])


@pytest.mark.parametrize(("value", "expected"), [(3, [3, 3]), ((1, 2), [1, 2])])
def test_a_number_or_several_become_a_list(value: Any, expected: list[int]) -> None:
    assert nests.convert_to_list(value, 2, "stride") == expected


@pytest.mark.parametrize("value", [[1, 2, 3], "ab", [1, None]])
def test_other_counts_and_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"stride is .*; expected a number or 2"):
        nests.convert_to_list(value, 2, "stride")
