"""`bench matrix` reports every kernel of every product: measured, or missing with the reason."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench import matrix
from penstock.machine import capability
from penstock.native.matrix_probe import available


def test_every_kernel_is_measured_or_missing() -> None:
    threads = torch.get_num_threads()
    report = matrix.main(2, json=True, extra=argparse.Namespace())
    measured = {name.partition("_gflops")[0] for name in report.figures if name.endswith("_gflops")}
    racing = {f"{k}_{name}" for name, p in matrix.PRODUCTS.items() for k in p.candidates() if k in available()}
    assert measured == racing
    assert {*report.missing, *available()} == {"torch", "onednn", "onednn_matmul"}
    assert torch.get_num_threads() == threads


def test_a_kernel_that_is_absent_is_missing_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ABSENT", "matrix.onednn")
    capability.forget()
    try:
        report = matrix.main(2, json=True, extra=argparse.Namespace())
    finally:
        monkeypatch.undo()
        capability.forget()
    assert "declared absent" in report.missing["onednn"]
    assert not [name for name in report.ratios if name.startswith("onednn_forward")]
