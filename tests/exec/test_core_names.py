"""`fluid.core`: places of any kind, flags as a mapping, kinds of variables, and a program that is compiled ahead."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.networks import fit_a_line
from tests.property.oracle import started

import penstock as fluid
from penstock.errors import SpecError, UserError
from penstock.exec.executor import _as_lodtensor
from penstock.scope import Scope

KIND, DTYPE = methodcaller("_type"), methodcaller("_dtype")


def test_a_place_of_any_kind_is_the_one_that_was_set() -> None:
    place = fluid.core.Place()
    place.set_place(fluid.CUDAPlace(2))
    assert place.is_gpu_place()
    assert not place.is_cpu_place()
    assert place.gpu_device_id() == 2
    assert KIND(place) == KIND(fluid.CUDAPlace(0)) != KIND(fluid.CPUPlace())
    assert place._equals(fluid.CUDAPlace(2))
    assert not fluid.CUDAPlace(2)._equals(fluid.CUDAPlace(1))
    place.set_place(fluid.CPUPlace())
    with pytest.raises(SpecError, match="ask is_gpu_place"):
        place.gpu_device_id()


def test_flags_are_a_mapping(caplog: pytest.LogCaptureFixture) -> None:
    flags, name = fluid.core.globals(), "FLAGS_fuse_parameter_groups_size"
    before = flags[name]
    flags[name] = 7
    assert fluid.get_flags(name) == {name: 7}
    flags[name] = before
    flags["FLAGS_of_another_release"] = True
    assert "FLAGS_of_another_release has no effect" in caplog.text
    assert flags["FLAGS_of_another_release"] is True
    assert {name, "FLAGS_of_another_release"} <= set(flags)
    with pytest.raises(SpecError, match="'other' has no effect"):
        flags["other"] = 1
    with pytest.raises(SpecError, match="cannot be taken away"):
        del flags[name]


def test_variables_of_a_block_say_their_kind() -> None:
    network = fit_a_line()
    kinds = {v.type for v in network.main.global_block().vars.values()}
    assert fluid.core.VarDesc.VarType.LOD_TENSOR in kinds


def test_a_program_is_compiled_for_one_scope() -> None:
    network = fit_a_line()
    scope = started(network.startup)
    compiled = fluid.CompiledProgram(network.main)._compile(scope, fluid.CPUPlace())
    with pytest.raises(ValueError, match="compiled for another scope"):
        compiled._compile(Scope(), fluid.CPUPlace())
    assert fluid.Executor().run(compiled, network.feed(4, 0), [network.loss], scope=scope)[0].shape == (1,)


def test_a_compiled_program_says_for_which_places_it_is() -> None:
    """Scripts of Fluid that make a feed for each place look there."""
    compiled, places = fluid.CompiledProgram(fit_a_line().main), [fluid.CPUPlace()] * 2
    assert (compiled._is_data_parallel, compiled._places) == (False, None)
    compiled.with_data_parallel(places=places)
    assert (compiled._is_data_parallel, compiled._places) == (True, places)


def test_values_become_a_lod_tensor() -> None:
    tensor = _as_lodtensor(np.ones((2, 3), "float32"), fluid.CPUPlace())
    assert (tensor.shape(), tensor._place()) == ([2, 3], fluid.CPUPlace())
    with pytest.raises(SpecError, match=r"use fluid\.create_lod_tensor"):
        _as_lodtensor([[1], [2, 3]], fluid.CPUPlace())


def test_a_number_becomes_a_lod_tensor_of_one_element() -> None:
    tensor = _as_lodtensor(1, fluid.CPUPlace(), fluid.core.VarDesc.VarType.FP64)
    assert (tensor.shape(), DTYPE(tensor), np.asarray(tensor).tolist()) == ([1], torch.float64, [1.0])
    with pytest.raises(SpecError, match="a number without a dtype"):
        _as_lodtensor(1, fluid.CPUPlace())


@pytest.mark.parametrize("data", [((1, 2), (3, 4)), torch.tensor([[1, 2], [3, 4]])], ids=["tuple", "tensor"])
def test_what_is_no_array_becomes_a_lod_tensor_of_the_dtype(data: Any) -> None:
    tensor = _as_lodtensor(data, fluid.CPUPlace(), "float32")
    assert (DTYPE(tensor), np.asarray(tensor).tolist()) == (torch.float32, [[1.0, 2.0], [3.0, 4.0]])
    kept = _as_lodtensor(np.ones(2, "float64"), fluid.CPUPlace(), "float32")
    assert DTYPE(kept) == torch.float64, "an array stays as it is, as in Fluid"


@pytest.mark.parametrize("data", ["text", b"text", np.str_("text"), ("a", "b"), ((1,), (2, 3)), None], ids=str)
def test_what_holds_no_numbers_is_refused_by_name(data: Any) -> None:
    with pytest.raises(SpecError, match=r"_as_lodtensor is given .*(; expected numbers|no array of numbers)"):
        _as_lodtensor(data, fluid.CPUPlace(), "float32")


@pytest.mark.parametrize("kind", ["ParallelExecutor", "CompiledProgram"])
def test_a_dry_run_builds_the_graph_and_computes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = fit_a_line()
    scope, execution = started(network.startup), fluid.ExecutionStrategy()
    execution._dry_run = True
    names = [v.name for v in network.main.all_parameters()]
    before = [np.array(scope.find_var(name)) for name in names]
    if kind == "ParallelExecutor":
        executor = fluid.ParallelExecutor(False, network.loss, network.main, exec_strategy=execution, scope=scope)
        assert executor.run([network.loss], network.feed(4, 0)) == []
    else:
        compiled = fluid.CompiledProgram(network.main).with_data_parallel(network.loss, exec_strategy=execution)
        assert fluid.Executor().run(compiled, scope=scope) == []  # needs no feed
    for name, value in zip(names, before, strict=True):
        np.testing.assert_array_equal(np.array(scope.find_var(name)), value)


def test_lengths_may_be_set_before_rows() -> None:
    tensor = fluid.LoDTensor()
    tensor.set_recursive_sequence_lengths([[1, 2, 3]])
    assert not tensor.has_valid_recursive_sequence_lengths()
    tensor.set(np.zeros((6, 2), "float32"), fluid.CPUPlace())
    assert tensor.has_valid_recursive_sequence_lengths()
    with pytest.raises(UserError, match="do not add up"):
        tensor.set_recursive_sequence_lengths([[1, 2]])
    with pytest.raises(UserError, match="do not add up"):
        fluid.LoDTensor().set_recursive_sequence_lengths([[1], [2, 3]])


def test_a_lod_tensor_says_whether_it_has_rows() -> None:
    """Scripts of Fluid that turn fetched values into arrays ask first."""
    tensor = fluid.LoDTensor()
    assert not tensor._is_initialized()
    tensor.set(np.zeros((6, 2), "float32"), fluid.CPUPlace())
    assert (tensor._is_initialized(), tensor._get_dims()) == (True, [6, 2])
    network = fit_a_line()
    (fetched,) = fluid.Executor().run(
        network.main, network.feed(4, 0), [network.loss], scope=started(network.startup), return_numpy=False
    )
    assert fetched._is_initialized()
