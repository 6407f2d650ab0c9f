"""Kernels of matrix products are probed: absent, failing and wrong ones are not available, and fallbacks are right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.native.products import fails, gives_nan, in_bfloat16

from penstock.machine import capability
from penstock.native import intra_op, matrix_probe
from penstock.native.matrix_kernels import KERNELS, Product
from penstock.native.matrix_probe import Multiply, available, operands_of, report, why_wrong

SHAPES = [
    Product(33, 48, 20, transpose_x, transpose_w) for transpose_x in (False, True) for transpose_w in (False, True)
]


@pytest.fixture(autouse=True)
def _probed_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PENSTOCK_ABSENT", raising=False)
    capability.forget()
    yield
    capability.forget()


def test_torchs_kernel_is_always_available() -> None:
    assert available()[0] == "torch"
    assert set(available()) <= set(KERNELS)


@pytest.mark.parametrize("by", [fails, in_bfloat16, gives_nan])
@pytest.mark.parametrize("kernel", ["onednn", "onednn_matmul"])
def test_a_kernel_that_fails_or_is_wrong_is_not_there(
    kernel: str, by: Multiply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_probe, "multiply", by)
    found = capability.capability(f"matrix.{kernel}")
    assert not found.present
    assert "avx512bw" in found.detail or "rounding" in found.detail
    assert available() == ("torch",)


@pytest.mark.parametrize("kernel", ["onednn", "onednn_matmul"])
def test_a_kernel_declared_absent_is_not_available(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ABSENT", f"matrix.{kernel}")
    assert kernel not in available()


def test_the_report_names_kernels_and_thread_settings() -> None:
    names = {found.name for found in report()}
    assert names == {"matrix.onednn", "matrix.onednn_matmul", "matrix.mkl_vendor", "threads.openmp", "threads.mkl"}


@pytest.mark.parametrize("seed", range(20))
def test_right_products_are_never_called_wrong(seed: int) -> None:
    sizes = torch.randint(1, 300, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    for transpose_x in (False, True):
        product = Product(sizes[0], sizes[1], sizes[2], transpose_x)
        operands = operands_of(product, seed)
        for kernel in set(product.candidates()) & set(available()):
            assert why_wrong(product, kernel, operands) == ""


@pytest.mark.parametrize("product", [*SHAPES, Product(64, 400, 2, transpose_x=True)], ids=str)
def test_onednn_equals_float64_for_every_layout(product: Product) -> None:
    x, w, _ = operands_of(product, 1)
    left = x.t() if product.transpose_x else x
    right = w.t() if product.transpose_w else w
    result = torch.ops.penstock.product(x, w, None, product.transpose_x, product.transpose_w, "none", "onednn")
    assert result.is_contiguous()
    # k roundings of products of size one, and their sums
    torch.testing.assert_close(result.double(), left.double() @ right.double(), rtol=0.0, atol=product.k * 1.2e-6)


def _in_another_process(absent: str, code: str, cache: Path) -> str:
    environ = {**os.environ, "PENSTOCK_ABSENT": absent, "PENSTOCK_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


THREADS = """
import penstock as fluid, numpy as np
from penstock.native import intra_op, matrix_probe
x = fluid.layers.data(name="x", shape=[8], dtype="float32")
loss = fluid.layers.mean(fluid.layers.fc(x, 4))
fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
trainer = fluid.ParallelExecutor(use_cuda=False, loss_name=loss.name)
trainer.run(fetch_list=[loss.name], feed={"x": np.ones((4, 8), "float32")})
print(*intra_op.intra_op_runtimes(), *[c.present for c in matrix_probe.report() if c.name.startswith("threads")])
"""


@pytest.mark.parametrize("absent", ["threads.openmp", "threads.openmp, threads.mkl"])
def test_a_step_runs_without_a_threads_setter(absent: str, tmp_path: Path) -> None:
    mkl = intra_op.intra_op_runtimes()[1] and "threads.mkl" not in absent  # not every torch has MKL
    assert _in_another_process(absent, THREADS, tmp_path) == f"False {mkl} False {mkl}"


def test_probes_do_not_depend_on_torchs_defaults() -> None:
    before = available()
    capability.forget()
    torch.set_default_dtype(torch.float64)
    try:
        assert available() == before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def _runtimes_as_probed() -> Iterator[None]:
    yield
    capability.forget()
    intra_op.use_probed_runtimes()


@pytest.mark.usefixtures("_runtimes_as_probed")
def test_openmp_that_ignores_its_setting_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    mkl = intra_op.intra_op_runtimes()[1]
    ignores: Callable[[int], None] = lambda num_threads: None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(intra_op, "use_intra_op_threads_here", ignores)
        patch.setattr(intra_op, "intra_op_threads_here", lambda: (7, 7))
        capability.forget()
        intra_op.use_probed_runtimes()
    found = capability.capability("threads.openmp")
    assert not found.present
    assert "gets 7" in found.detail
    assert intra_op.intra_op_runtimes() == (False, mkl)
    assert intra_op.intra_op_threads_here()[0] == 0  # what the engine would set is left alone
