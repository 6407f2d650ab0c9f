"""The registry of capabilities: what is absent, how often a probe runs, what PENSTOCK_ABSENT may name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier

import pytest

from penstock.errors import SpecError
from penstock.machine.capability import Absent, Capability, Registry


def _registry(absent: str = "") -> Registry:
    registry = Registry({"PENSTOCK_ABSENT": absent})

    @registry.probe("works", fallback="nothing")
    def _works() -> str:
        return "version 3"

    @registry.probe("missing", fallback="a file")
    def _missing() -> str:
        raise Absent("this kernel has none")

    @registry.probe("throws", fallback="a slower way")
    def _throws() -> str:
        raise ZeroDivisionError("division\nby zero")

    return registry


def test_a_probe_that_returns_is_present() -> None:
    assert _registry().capability("works") == Capability("works", True, "version 3", "nothing")


def test_a_probe_that_raises_absent_gives_its_reason() -> None:
    assert _registry().capability("missing") == Capability("missing", False, "this kernel has none", "a file")


def test_any_other_exception_means_absent_on_one_line() -> None:
    found = _registry().capability("throws")
    assert (found.present, found.detail) == (False, "ZeroDivisionError: division by zero")


def test_the_environment_declares_a_capability_absent() -> None:
    found = _registry(" works ,").capability("works")
    assert (found.present, found.detail) == (False, "declared absent by PENSTOCK_ABSENT")


def test_an_unknown_name_in_the_environment_lists_the_known() -> None:
    with pytest.raises(SpecError, match=r"names wroks.* list of missing, throws, works"):
        _registry("wroks").capabilities()


def test_a_name_of_a_group_may_register_later() -> None:
    registry = _registry("matrix.fast")
    assert registry.capability("works").present


def test_a_group_that_has_registered_is_checked() -> None:
    registry = _registry("matrix.fsat")
    registry.probe("matrix.fast", fallback="torch's")(lambda: "yes")
    with pytest.raises(SpecError, match=r"names matrix\.fsat"):
        registry.capability("works")


def test_asking_for_an_unknown_capability_lists_the_known() -> None:
    with pytest.raises(SpecError, match="'nothing' is unknown; expected one of missing, throws, works"):
        _registry().capability("nothing")


def test_threads_that_ask_together_probe_once() -> None:
    registry, together, calls = Registry({}), Barrier(8), count()
    registry.probe("counted", fallback="none")(lambda: f"call {next(calls)}")

    def ask() -> Capability:
        together.wait()
        return registry.capability("counted")

    with ThreadPoolExecutor(8) as pool:
        found = [asked.result() for asked in [pool.submit(ask) for _ in range(8)]]
    assert {one.detail for one in found} == {"call 0"}


def test_forgotten_results_are_probed_again() -> None:
    answers = iter(["first", "second"])
    registry = Registry({})
    registry.probe("changes", fallback="none")(lambda: next(answers))
    registry.capability("changes")
    registry.forget()
    assert registry.capability("changes").detail == "second"


def test_a_probe_may_ask_for_another_capability() -> None:
    registry = _registry()
    registry.probe("above", fallback="none")(lambda: registry.capability("works").detail)
    assert registry.capability("above").detail == "version 3"
