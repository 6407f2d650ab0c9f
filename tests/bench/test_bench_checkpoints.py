"""`bench checkpoints`: that it writes checkpoints, and reports."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import checkpoints


def test_it_reports_what_a_checkpoint_costs(tmp_path: Path) -> None:
    report = checkpoints.main(2, True, argparse.Namespace(width=64, folder=tmp_path))
    assert report.figures["megabytes"] > 0
    for name in ("held_ms", "committed_after_ms", "step_ms", "step_while_writing_ms", "torch_save_ms"):
        assert report.figures[name] > 0, name
    assert report.figures["load_before"] >= 0
    assert report.ratios["torch_save"] > 0
