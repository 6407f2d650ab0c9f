"""Random faults in one process: a few runs in every run of the tests, a thousand in the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.faults.control_plane import ControlPlane


def run(examples: int, template: Path) -> None:
    ControlPlane.template = template
    run_state_machine_as_test(
        ControlPlane,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # shrinking takes an hour; the steps are printed as they were
            database=None,
        ),
    )


def test_invariants_hold_under_random_faults(migrated: Path) -> None:
    run(12, migrated)


@pytest.mark.soak
def test_invariants_hold_in_a_thousand_runs(migrated: Path) -> None:
    run(1000, migrated)
