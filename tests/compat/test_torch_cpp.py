"""Contracts of torch's private C++ names: what the compiled libraries rely on, one test for each name.

A changed header or a missing strong symbol fails the build. What that cannot see is held here: weak symbols, operators
that are found by name, the order of arguments of one type, and that the built libraries behave as each name is for.
`c10::impl::getDeviceGuardImpl` runs with a CUDA build alone; elsewhere its contract holds the registry that it reads.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tools import private_names

from penstock import native
from penstock.compat import torch as private
from penstock.machine import capability
from penstock.native.engine import DevicePlan, Engine, PretendedDevices, TorchPlan
from penstock.native.fused_ops import mkl_vendor_check
from penstock.native.matrix_probe import available
from penstock.settings import ABSENT

CONTRACTS: dict[str, Callable[[], None]] = {}
MATMUL = "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"  # void (const Tensor& x 3, float, float)
IS_X86 = platform.machine() in {"x86_64", "AMD64"}
aten = torch.ops.aten


def cpp(name: str) -> Callable[[Callable[[], None]], None]:
    """Make a function the contract of a C++ name."""

    def keep(function: Callable[[], None]) -> None:
        CONTRACTS[name] = function

    return keep


def is_exported(symbol: str) -> bool:
    """Tell whether a symbol is found from the library of operators, as its weak references are."""
    return hasattr(ctypes.CDLL(str(Path(native.__path__[0]) / "_ops.so")), symbol)


def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch has not typed it


def operands(overload: object) -> list[tuple[str, str]]:
    return [(spec.name, str(spec.type)) for spec in private.schema_of(overload).arguments]


def run(plan: TorchPlan) -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1)
    try:
        plan.seal()
        engine.run(plan, 0)
    finally:
        engine.close()


# ---------------------------------------------------------------- weak symbols and what is found by name


@cpp("at::native::mkldnn_matmul")
def _() -> None:
    assert is_exported(MATMUL) or not (IS_X86 and has_onednn())


@cpp("mkl_serv_intel_cpu_true")
def _() -> None:
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch has not typed it
    assert mkl_vendor_check() in {"yes", "no"} or not (IS_X86 and has_mkl)


@cpp("mkldnn::_linear_pointwise")
def _() -> None:
    assert not has_onednn() or operands(torch.ops.mkldnn._linear_pointwise.default) == [
        ("X", "Tensor"), ("W", "Tensor"), ("B", "Optional[Tensor]"), ("attr", "str"),
        ("scalars", "List[Optional[number]]"), ("algorithm", "Optional[str]"),
    ]  # fmt: skip


# ---------------------------------------------------------------- operators by their C++ functions


@cpp("at::_assert_async")
def _() -> None:
    assert operands(aten._assert_async.msg) == [("self", "Tensor"), ("assert_msg", "str")]
    counts = torch.zeros(11, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="no probability"):
        torch.ops.penstock_composed.auc(torch.tensor([1.5]), torch.tensor([1]), counts, counts.clone())


@cpp("at::_fused_adagrad_")
def _() -> None:
    assert [name for name, _ in operands(aten._fused_adagrad_.default)][:9] == [
        "self", "grads", "state_sums", "state_steps", "lr", "lr_decay", "weight_decay", "eps", "maximize",
    ]  # fmt: skip


@cpp("at::_fused_sgd_")
def _() -> None:
    assert [name for name, _ in operands(aten._fused_sgd_.default)][:10] == [
        "self", "grads", "momentum_buffer_list", "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize",
        "is_first_step",
    ]  # fmt: skip


_ATTENTION = "_scaled_dot_product_efficient_attention"
BY_OPERANDS = {
    "_foreach_add": ("List", ["self", "other", "alpha"]),
    "_foreach_add_": ("Tensor", ["self", "other", "alpha"]),
    "_foreach_addcmul_": ("Scalar", ["self", "tensor1", "tensor2", "value"]),
    "_foreach_div": ("List", ["self", "other"]),
    "_foreach_lerp_": ("Scalar", ["self", "tensors1", "weight"]),
    "_foreach_mul_": ("Tensor", ["self", "other"]),
    "_foreach_sqrt": ("default", ["self"]),
    "_foreach_sub_": ("List", ["self", "other", "alpha"]),
    _ATTENTION: (
        "default",
        ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"],
    ),
    f"{_ATTENTION}_backward": (
        "default",
        [
            *("grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp", "philox_seed", "philox_offset"),
            *("dropout_p", "grad_input_mask", "is_causal", "scale"),
        ],
    ),
}


def _hold_operands(name: str, overload: str, wanted: list[str]) -> None:
    def contract() -> None:
        assert [operand for operand, _ in operands(getattr(getattr(aten, name), overload))] == wanted

    CONTRACTS[f"at::{name}"] = contract


for _name, (_overload, _operands) in BY_OPERANDS.items():
    _hold_operands(_name, _overload, _operands)


# ---------------------------------------------------------------- dispatch keys


@cpp("at::AutoDispatchBelowADInplaceOrView")
def _() -> None:
    x, plan = torch.ones(2), TorchPlan(2)
    plan.set(0, x)
    plan.add("aten::zero_", "", [("slot", 0)], [1], 0)
    run(plan)
    assert (x.tolist(), private.version_of(x)) == ([0.0, 0.0], 0)


class Calls(private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """Keeps the names of ATen calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        self.names.append(private.schema_of(func).name)


@cpp("c10::impl::ForceDispatchKeyGuard")
def _() -> None:
    x, plan = torch.ones(2), TorchPlan(2)
    plan.set(0, x)
    plan.add("aten::zero_", "", [("slot", 0)], [1], 0)
    with Calls() as calls:
        run(plan)
    assert (x.tolist(), calls.names) == ([0.0, 0.0], [])


# ---------------------------------------------------------------- devices


@cpp("c10::impl::DeviceGuardImplInterface")
def _() -> None:
    devices = PretendedDevices()
    plan = DevicePlan([0], timed=False, pretended=devices)
    plan.place(0, exchange=False)
    plan.seal([])
    plan.begin()
    plan.end()
    assert devices.log(), "its virtual functions were called"


@cpp("c10::impl::getDeviceGuardImpl")
def _() -> None:
    assert is_exported("_ZN3c104impl26device_guard_impl_registryE")


@cpp("c10::impl::hasDeviceGuardImpl")
def _() -> None:
    try:
        DevicePlan([0], timed=False)
        is_built = True
    except ValueError:
        is_built = False
    except RuntimeError:  # CUDA's own, where there is no driver
        is_built = True
    assert is_built == torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]  # torch has not typed it


# ---------------------------------------------------------------- headers of torch's binding


@cpp("torch/csrc/autograd/python_variable.h")
def _() -> None:
    x, plan = torch.ones(2), TorchPlan(1)
    plan.set(0, x)
    assert plan.get(0) is x


@cpp("torch/csrc/jit/python/pybind_utils.h")
def _() -> None:
    x, plan = torch.arange(6.0).reshape(2, 3), TorchPlan(2)
    plan.set(0, x)
    arguments = [("slot", 0), ("const", [1]), ("const", True), ("const", torch.float64)]
    plan.add("aten::sum", "dim_IntList", arguments, [1], 0)
    plan.keep(1)
    run(plan)
    torch.testing.assert_close(plan.get(1), x.sum([1], True, dtype=torch.float64))


@cpp("torch/csrc/utils/pybind.h")
def _() -> None:
    plan = TorchPlan(1)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        plan.set(0, 1.0)  # type: ignore[arg-type]  # what it has to refuse


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_torch_keeps_cpp(name: str) -> None:
    CONTRACTS[name]()


def test_every_cpp_name_has_a_contract() -> None:
    held = private_names.entries(Path(private.__file__))
    assert {entry.name for entry in held if entry.kind == "C++"} == set(CONTRACTS)


def runs_avx512() -> bool:
    """Whether oneDNN's matmul accepts this process: the processor has the instructions, and no setting hides them."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.exists() else set()
    is_hidden = bool({"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys())
    has_all = {"avx512bw", "avx512vl", "avx512dq"} <= flags
    return has_all and torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_hidden and has_onednn()


@pytest.fixture
def _probed_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ABSENT.name, raising=False)
    capability.forget()
    yield
    capability.forget()


@pytest.mark.usefixtures("_probed_anew")
def test_onednn_matmul_is_available_with_avx512() -> None:
    assert "onednn_matmul" in available() or not runs_avx512()
