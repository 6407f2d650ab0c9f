"""Times of kernels where nothing can be kept between processes: measured anew, and no job ends for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.capabilities import absent

from penstock.native.matrix_cache import CacheFile, Unkept, store_of_machine


@pytest.mark.parametrize("name", ["cache_folder", "file_locks"])
def test_without_a_folder_or_locks_times_live_with_the_process(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with absent(name):
        store = store_of_machine()
    assert isinstance(store, Unkept)
    assert "times of matrix kernels live as long as this process" in caplog.text


def test_without_a_home_folder_times_live_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PENSTOCK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with absent():
        assert isinstance(store_of_machine(), Unkept)


def test_with_a_folder_and_locks_times_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    with absent():
        assert isinstance(store_of_machine(), CacheFile)


def test_what_is_not_kept_is_what_was_measured() -> None:
    assert (Unkept().add({"a": {"torch": 1.0}}), Unkept().load()) == ({"a": {"torch": 1.0}}, {})
