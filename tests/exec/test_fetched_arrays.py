"""Tensor arrays of elements with other shapes: what is read, its gradients, and what a fetch of the array gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FetchError, ProgramError
from penstock.lod_tensor import LoDTensor

L = fluid.layers
A = np.arange(12.0).reshape(4, 3)
B = np.arange(6.0).reshape(3, 2) - 1


@pytest.fixture
def made() -> tuple[Any, Any]:
    """A program that writes a [n, 3], b [3, 2] and their product [n, 2] to an array: (array, product)."""
    a = L.data("a", [3], dtype="float64")
    b = L.create_parameter([3, 2], "float64", name="b", default_initializer=fluid.initializer.NumpyArrayInitializer(B))
    i = L.zeros([1], "int64")
    array = L.array_write(a, i)
    L.array_write(b, L.increment(i), array)
    product = L.mul(a, b)
    L.array_write(product, L.increment(i), array)
    return array, product


@pytest.fixture(autouse=True)
def program() -> Any:
    scope = fluid.core.Scope()
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(scope):
        yield


def executor() -> Any:
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    return exe


def replicas() -> Callable[..., list[Any]]:
    exe = executor()
    two = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(places=fluid.cpu_places(2))
    return lambda fetches, feed, **options: exe.run(two, feed=feed, fetch_list=fetches, **options)


def same(found: list[Any], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-12)


def test_a_fetched_array_is_a_list_of_its_elements(made: tuple[Any, Any]) -> None:
    array, product = made
    exe = executor()
    whole, last = exe.run(feed={"a": A}, fetch_list=[array, product])
    same(whole, [A, B, A @ B])
    same([last], [A @ B])
    (tensors,) = exe.run(feed={"a": A}, fetch_list=[array], return_numpy=False)
    assert all(isinstance(one, LoDTensor) for one in tensors)
    same(tensors, [A, B, A @ B])


def test_replicas_merge_the_elements_of_an_array(made: tuple[Any, Any]) -> None:
    array, _ = made
    run = replicas()
    (merged,) = run([array.name], feed={"a": A})
    same(merged, [A, np.concatenate([B, B]), A @ B])
    (each,) = run([array.name], feed={"a": A}, return_merged=False)
    same(each[1], [A[2:], B, A[2:] @ B])
    (tensors,) = run([array.name], feed={"a": A}, return_numpy=False)
    assert all(isinstance(one, LoDTensor) for one in tensors)


def test_arrays_of_unequal_lengths_are_not_merged() -> None:
    a, i = L.data("a", [1], dtype="int64"), L.zeros([1], "int64")
    array = L.array_write(a, i)
    count = L.reduce_sum(a)
    with L.Switch() as switch, switch.case(count > 1):
        L.array_write(a, L.increment(i), array)
    run = replicas()
    feed = {"a": np.array([[1], [2]])}
    with pytest.raises(FetchError, match=r"have \[1, 2\] elements"):
        run([array.name], feed=feed)
    assert [len(one) for one in run([array.name], feed=feed, return_merged=False)[0]] == [1, 2]


@pytest.mark.parametrize(
    ("at", "wanted", "grad"),
    [(0, A.sum(), np.zeros((3, 2))), (1, B.sum(), np.ones((3, 2))), (2, (A @ B).sum(), np.outer(A.sum(0), [1, 1]))],
)
def test_an_element_is_read_with_its_shape(made: tuple[Any, Any], at: int, wanted: float, grad: np.ndarray) -> None:
    array, _ = made
    element = L.array_read(array, L.fill_constant([1], "int64", at))
    loss = L.reduce_sum(element)
    fluid.backward.append_backward(loss)
    found, got = executor().run(feed={"a": A}, fetch_list=[loss, "b@GRAD"])
    np.testing.assert_allclose(found, wanted)
    np.testing.assert_allclose(got, grad, rtol=1e-12)


def ranks() -> Any:
    i = L.zeros([1], "int64")
    array = L.array_write(L.zeros([2, 2], "float32"), i)
    return L.array_write(L.ones([2], "float32"), L.increment(i), array)


def dtypes() -> Any:
    i, array = L.zeros([1], "int64"), L.create_array("float32")
    L.array_write(L.zeros([2, 2], "float32"), i, array)
    return L.array_write(L.ones([2], "int64"), L.increment(i), array)


@pytest.mark.parametrize(("build", "dtype"), [(ranks, "float32"), (dtypes, "int64")])
@pytest.mark.parametrize("is_test", [False, True])
def test_elements_of_several_kinds_are_fetched_and_not_read(
    build: Callable[[], Any], dtype: str, is_test: bool
) -> None:
    array = build()
    exe, program = executor(), fluid.default_main_program()
    (found,) = exe.run(program.clone(for_test=True) if is_test else program, fetch_list=[array])
    same(found, [np.zeros((2, 2)), np.ones(2)])
    assert np.asarray(found[1]).dtype == dtype
    for call in (L.array_read, lambda array, i: L.tensor_array_to_tensor(array, 0)):
        with pytest.raises(ProgramError, match="differ in dtype or number of dimensions"):
            call(array, L.zeros([1], "int64"))


def test_elements_of_a_loop_have_one_shape() -> None:
    i, limit = L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
    array = L.array_write(L.zeros([2, 2], "float32"), i)
    going = L.less_than(i, limit)
    with L.While(going).block():
        with pytest.raises(ProgramError, match="written in a loop have one dtype and shape"):
            L.array_write(L.zeros([2, 3], "float32"), L.increment(i), array)
        L.less_than(i, limit, cond=going)


@pytest.mark.parametrize(
    "call",
    [
        lambda: L.array_read(np.zeros(3), L.zeros([1], "int64")),
        lambda: L.array_read(L.create_array("float32"), 0),
        lambda: L.array_write(L.zeros([2], "float32"), L.zeros([1], "float32")),
        lambda: L.array_length(L.zeros([2], "float32")),
    ],
)
def test_arguments_of_arrays_of_another_type_are_type_errors(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="needs an"):
        call()
