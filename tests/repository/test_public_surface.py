"""What users rely on stays: names and parameters, routes and their fields, commands and their options."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import surface

import penstock as fluid


def test_nothing_public_was_removed_or_changed() -> None:
    recorded, now = set(surface.GOLDEN.read_text().splitlines()), set(surface.lines())
    removed, added = sorted(recorded - now), sorted(now - recorded)
    assert not removed, "removed or changed:\n" + "\n".join(removed) + "\nin its place:\n" + "\n".join(added)
    assert not added, "added (record it with `python -m tools.surface --write`):\n" + "\n".join(added)


def test_a_changed_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(program: object, path: Path, overwrite: bool = True) -> None:
        """Not as it is."""

    save.__module__ = "penstock.io.saves.variables"
    before = set(surface.python_names())
    monkeypatch.setattr(fluid, "save", save)
    changed = {line for line in before ^ set(surface.python_names()) if line.startswith("penstock.save(")}
    assert "penstock.save(program, path, overwrite=True)" in changed
    assert len(changed) == 2
