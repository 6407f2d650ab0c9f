"""An Executor's matmuls run the kernels that engines take for the same products, so that both give the same bits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.compat.torch import TorchDispatchMode
from penstock.graph import matmuls
from penstock.native.matrix_cache import Unkept
from penstock.native.matrix_kernels import Conditions, KernelTimes, Product
from penstock.native.matrix_probe import available
from penstock.program.program import Program
from penstock.scope import Scope

WIDTH = 160
ROWS = 24


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it without types
    """Notes the kernel of each matmul that is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.penstock.product.default:
            self.seen.append(args[6])
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.seen.append("torch")
        return func(*args, **(kwargs or {}))


def faster(kernel: str) -> KernelTimes:
    """Times by which a kernel is the fastest for all that it can multiply."""

    def measure(
        products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
    ) -> dict[Product, dict[str, float | None]]:
        return {p: {name: 1.0 if name == kernel else 2.0 for name in p.candidates()} for p in products}

    return KernelTimes(Unkept(), measure, available=lambda: ("torch", "onednn"))


def network() -> tuple[Program, Program, str, str]:
    """Layers with a relu, and a product of batches whose right operand is read transposed: (main, startup, loss, h)."""
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[WIDTH], dtype="float32")
        hidden = fluid.layers.fc(fluid.layers.fc(x, WIDTH, act="relu"), WIDTH, act="relu")
        rows = fluid.layers.reshape(hidden, [-1, 4, WIDTH // 4])
        loss = fluid.layers.mean(fluid.layers.matmul(rows, rows, transpose_y=True))
        fluid.optimizer.SGD(0.01).minimize(loss)
    return main, startup, loss.name, hidden.name


def feed(rows: int = ROWS) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).normal(size=(rows, WIDTH)).astype("float32")}


def trained(compiled: bool, threads: int = 0, fetches: tuple[str, ...] = ()) -> list[np.ndarray]:
    """Losses of three steps, and then the parameters."""
    main, startup, loss, _ = network()
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    program: Any = main
    if compiled:
        strategy = fluid.ExecutionStrategy()
        strategy.num_threads = threads
        places = fluid.cpu_places(1)
        program = fluid.CompiledProgram(main).with_data_parallel(loss, exec_strategy=strategy, places=places)
    losses = [exe.run(program, feed(), [loss, *fetches], scope=scope)[0] for _ in range(3)]
    return [*losses, *(np.asarray(scope.find(p.name)) for p in main.all_parameters())]


@pytest.mark.parametrize("kernel", ["onednn", "torch"])
def test_executor_calls_the_kernels_that_were_chosen(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    times = faster(kernel)
    monkeypatch.setattr(matmuls, "known_times", lambda: times)
    with Kernels() as kernels:
        trained(compiled=False)
    wide = [k for k in kernels.seen if k == kernel]
    assert len(wide) >= 3 * 5  # two layers: forward, gradients of weights, gradient of one input
    assert set(kernels.seen) <= {kernel, "torch"}


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_compiled_and_plain_programs_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    times = faster("onednn")
    monkeypatch.setattr(matmuls, "known_times", lambda: times)
    plain, compiled = trained(compiled=False), trained(compiled=True, threads=threads)
    assert [a.tobytes() for a in plain] == [b.tobytes() for b in compiled]


def test_a_fetch_between_layers_changes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Product] = []

    def measure(
        products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
    ) -> dict[Product, dict[str, float | None]]:
        asked.extend(products)
        return {p: {"torch": 2.0, "onednn": 1.0} for p in products}

    times = KernelTimes(Unkept(), measure, available=lambda: ("torch", "onednn"))
    monkeypatch.setattr(matmuls, "known_times", lambda: times)
    first = trained(compiled=True)
    known = len(asked)
    relu = next(op.input_names()[0] for op in network()[0].operators if op.type == "aten.relu.default")
    assert [a.tobytes() for a in trained(compiled=True, fetches=(relu,))] == [a.tobytes() for a in first]
    assert len(asked) == known > 0


def test_executor_follows_the_flag_that_forces_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = 0 if "onednn_matmul" in available() else 3 * 3  # torch's oneDNN has none for AVX2
    for wanted in ("torch", "onednn"):
        monkeypatch.setenv("PENSTOCK_MATRIX_KERNELS", wanted)
        with Kernels() as kernels:
            trained(compiled=False)
        assert kernels.seen.count(wanted) >= 3 * 5
        assert wanted == "torch" or kernels.seen.count("torch") == batches


def test_products_of_other_sizes_are_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = faster("onednn")
    monkeypatch.setattr(matmuls, "known_times", lambda: times)
    main, startup, loss, _ = network()
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    found = []
    for rows in (ROWS, 1, ROWS):
        with Kernels() as kernels:
            exe.run(main, feed(rows), [loss], scope=scope)
        found.append("onednn" in kernels.seen)
    assert found == [True, False, True]
