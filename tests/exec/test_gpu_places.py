"""Which GPUs a program runs on, decided where there is none: torch's count of visible cards is replaced."""

from __future__ import annotations

import os

import pytest
import torch
from tests.property.networks import fit_a_line

import penstock as fluid
from penstock.compat.torch import schema_of
from penstock.errors import SpecError
from penstock.exec.devices import on_device, put_on_device, refuse_without_kernel
from penstock.graph.devices import build_device_graph
from penstock.program.ir import Operator
from penstock.program.kernels import resolve


def num_visible_of_four() -> int:
    """Count as CUDA does: unset means all cards."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return len({int(card) for card in visible.split(",") if card} & {0, 1, 2, 3})


@pytest.fixture
def four_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cards as CUDA_VISIBLE_DEVICES leaves of four."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FLAGS_selected_gpus", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", num_visible_of_four)


def trainer() -> fluid.ParallelExecutor:
    network = fit_a_line()
    return fluid.ParallelExecutor(True, network.loss, network.main, scope=fluid.Scope())


@pytest.mark.usefixtures("four_cards")
def test_row_4_use_cuda_takes_every_visible_gpu() -> None:
    executor = trainer()
    try:
        assert executor.device_count == len(fluid.cuda_places()) == 4
        assert executor.core.memory.devices == tuple(torch.device("cuda", i) for i in range(4))
        assert executor.core.num_threads == 16, "4 a device"
    finally:
        executor.close()


@pytest.mark.usefixtures("four_cards")
@pytest.mark.parametrize(("text", "count"), [("0", 1), ("2,3", 2), ("0,1,2", 3)])
def test_row_5_cuda_visible_devices_restricts_the_gpus(text: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    executor = trainer()
    try:
        assert executor.device_count == count
    finally:
        executor.close()


@pytest.mark.usefixtures("four_cards")
def test_no_visible_gpu_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        SpecError, match=r"use_cuda=True: 0 are visible \(CUDA_VISIBLE_DEVICES is ''\); pass use_cuda=False"
    ):
        trainer()


@pytest.mark.usefixtures("four_cards")
def test_selected_gpus_choose_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_selected_gpus", "1, 3")
    assert fluid.cuda_places() == [fluid.CUDAPlace(1), fluid.CUDAPlace(3)]
    assert fluid.cuda_places([2]) == [fluid.CUDAPlace(2)]
    monkeypatch.setenv("FLAGS_selected_gpus", "0,4")
    with pytest.raises(SpecError, match="GPU 4 is asked for, but 4 are visible"):
        fluid.cuda_places()
    monkeypatch.setenv("FLAGS_selected_gpus", "all")
    with pytest.raises(SpecError, match="FLAGS_selected_gpus is 'all'"):
        fluid.cuda_places()


def test_an_executor_on_a_missing_gpu_shows_what_to_pass() -> None:
    with pytest.raises(SpecError, match=r"CUDAPlace\(index=0\): .*; pass use_cuda=False, or CPU places"):
        fluid.Executor(fluid.CUDAPlace(0))


@pytest.mark.usefixtures("four_cards")
def test_places_of_two_kinds_are_refused() -> None:
    network = fit_a_line()
    mixed = [fluid.CPUPlace(), fluid.CUDAPlace(0)]
    with pytest.raises(SpecError, match="mixes CPU and GPU"):
        fluid.CompiledProgram(network.main).with_data_parallel(network.loss, places=mixed)
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(network.loss, places=[fluid.CUDAPlace(0)])
    with pytest.raises(SpecError, match=r"places are cuda:0, but the Executor runs on CPUPlace\(\)"):
        fluid.Executor().run(compiled, network.feed(2, 0), [network.loss])


@pytest.mark.usefixtures("four_cards")
def test_training_and_testing_share_their_devices() -> None:
    executor = trainer()
    executor._ran = True
    try:
        test = fluid.ParallelExecutor(
            True, main_program=executor.core.program.clone(for_test=True), share_vars_from=executor
        )
        assert test.core.memory is executor.core.memory
        test.close()
    finally:
        executor.close()


def test_factories_and_recorded_devices_follow_the_replica() -> None:
    card = torch.device("cuda", 1)
    full = schema_of(torch.ops.aten.full.default)
    arguments: list[tuple[str, object]] = [("const", None)] * len(full.arguments)
    put_on_device(full, arguments, card)
    names = [a.name for a in full.arguments]
    assert arguments[names.index("device")] == ("const", card)
    like = schema_of(torch.ops.aten.zeros_like.default)
    arguments = [("slot", 0), *[("const", None)] * (len(like.arguments) - 1)]
    put_on_device(like, arguments, card)
    assert ("const", card) not in arguments, "it follows its operand"
    kwargs: dict[str, object] = {"device": torch.device("cpu")}
    copy = schema_of(resolve(Operator("copy", "aten._to_copy.default", (), ())))
    on_device(copy, [torch.zeros(1)], kwargs, card)
    assert kwargs == {"device": card}


def test_an_operator_without_a_kernel_for_the_device_is_named() -> None:
    graph = build_device_graph(fit_a_line().main, mode="all_reduce", num_replicas=1, active=1)
    refuse_without_kernel(graph)
    with pytest.raises(SpecError, match=r"operator '.*' \(penstock\..*networks\.py:\d+\) has no kernel for MPS"):
        refuse_without_kernel(graph, "MPS")
