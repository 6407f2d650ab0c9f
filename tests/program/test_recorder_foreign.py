"""A Program from elsewhere may call functions of tensors, and nothing else that torch offers."""

from __future__ import annotations

import pytest

from penstock.errors import ProgramError
from penstock.program import kernels
from penstock.program.ir import Operator, TorchConst

FOREIGN = [
    "aten.from_file.default",
    "aten.from_file.out",
    "aten.set_.source_Tensor",
    "aten._print.default",
    "aten._backward.default",
    "aten.resize_.default",
    "aten._cufft_clear_plan_cache.default",
]


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_function_of_tensors_is_refused(kind: str) -> None:
    with pytest.raises(ProgramError, match=r"operator 'bad_0' \(at:1\).*is no function of tensors"):
        kernels.resolve(Operator("bad_0", kind, (), (), source="at:1"))


@pytest.mark.parametrize(
    "kind", ["aten.add.__doc__", "aten.add.op", "penstock.lookup_table.schemas", "aten.__name__.x"]
)
def test_an_attribute_that_is_no_overload_is_unknown(kind: str) -> None:
    with pytest.raises(ProgramError, match="is unknown to torch"):
        kernels.resolve(Operator("bad_0", kind, (), ()))


def test_a_dtype_is_a_dtype() -> None:
    with pytest.raises(ProgramError, match="'load' is no dtype"):
        kernels.constant(TorchConst("dtype", "load"))


@pytest.mark.parametrize(
    "kind", ["aten.add.Tensor", "aten.zeros.default", "aten.sort.values", "penstock.dropout.default"]
)
def test_functions_of_tensors_are_found(kind: str) -> None:
    assert str(kernels.resolve(Operator("good_0", kind, (), ()))) == kind
