"""Contracts of torch's private names: what Penstock relies on, one test for each name, called after it.

A name of `penstock.compat.torch` without a contract fails, as does a contract without a name.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from tests.compat import torch_sizes as _contracts  # noqa: F401 - of sizes and fake tensors
from tests.compat.contracts import CONTRACTS, contract
from tools import private_names
from torch.overrides import TorchFunctionMode

from penstock.compat import torch as private
from penstock.distributed import interfaces
from penstock.program.record.sizes import Sizes

COMPAT = Path(private.__file__)
aten = torch.ops.aten


class Calls(private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """Keeps the names of ATen calls, and what `ask` returns at each."""

    def __init__(self, ask: Callable[[], Any] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.names: list[str] = []
        self.answers: list[Any] = []
        self.ask = ask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(private.schema_of(func).name)
        self.answers.append(self.ask())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Keeps the names of torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.modules_and_names: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.modules_and_names.append((getattr(func, "__module__", None) or "", getattr(func, "__name__", "")))
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
    """Put `value` in the place of a global of torch's that must exist; gives the original."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield original
    finally:
        setattr(module, name, original)


# ---------------------------------------------------------------- modes and nests


@contract
def TorchDispatchMode() -> None:
    x = torch.ones(2, requires_grad=True)
    with Calls() as calls:
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    assert calls.names[:2] == ["aten::mul", "aten::sum"]
    assert "aten::expand" in calls.names[2:]


@contract
def disable_current_modes() -> None:
    with Calls() as calls, private.disable_current_modes():
        torch.ones(2).clone()
    assert calls.names == []


NEST = ([1, {"x": 2}], (3, None))


@contract
def tree_map() -> None:
    assert private.tree_map(lambda leaf: leaf and leaf * 2, NEST) == ([2, {"x": 4}], (6, None))


@contract
def tree_leaves() -> None:
    assert private.tree_leaves(NEST) == [1, 2, 3, None]


@contract
def tree_flatten() -> None:
    leaves, _ = private.tree_flatten(NEST, is_leaf=lambda value: isinstance(value, dict))
    assert leaves == [1, {"x": 2}, 3, None]


@contract
def tree_unflatten() -> None:
    leaves, structure = private.tree_flatten(NEST)
    assert private.tree_unflatten(leaves, structure) == NEST


# ---------------------------------------------------------------- operators


@contract
def OpOverload() -> None:
    assert isinstance(aten.add.Tensor, private.OpOverload)
    assert not isinstance(aten.add, private.OpOverload)


@contract
def schema_of() -> None:
    schema = private.schema_of(aten.add_.Tensor)
    assert (schema.name, schema.overload_name) == ("aten::add_", "Tensor")
    assert [(spec.name, str(spec.type)) for spec in schema.arguments][:2] == [("self", "Tensor"), ("other", "Tensor")]
    assert [bool(spec.alias_info and spec.alias_info.is_write) for spec in schema.arguments] == [True, False, False]
    assert [spec.default_value for spec in schema.arguments] == [None, None, 1]
    assert [str(spec.type) for spec in schema.returns] == ["Tensor"]


@contract
def qualified_name() -> None:
    assert private.qualified_name(aten.add) == "aten::add"
    assert private.qualified_name(torch.add) == ""


@contract
def has_kernel() -> None:
    assert private.has_kernel("aten::add.Tensor", "CPU")
    assert private.has_kernel("aten::matmul", "CompositeImplicitAutograd")
    assert not private.has_kernel("aten::matmul", "CPU")


@contract
def check_value() -> None:
    size = Sizes().new("s0", 7920)
    private.check_value(size > 5, lambda: "unused")
    assert [str(asked.relation.right) for asked in size.node.sizes.asked] == ["5"]
    with pytest.raises(ValueError, match="two and three"):
        private.check_value(False, lambda: "two and three")


# ---------------------------------------------------------------- autograd and memory


@contract
def running_sequence_number() -> None:
    assert private.running_sequence_number() is None
    x = torch.ones(2, requires_grad=True)
    y = torch.sin(x)
    forward = private.next_sequence_number() - 1
    with Calls(private.running_sequence_number) as calls:
        y.sum().backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    answers = dict(zip(calls.names, calls.answers, strict=True))
    assert (answers["aten::sum"], answers["aten::cos"]) == (None, forward)


@contract
def next_sequence_number() -> None:
    x, before = torch.ones(2, requires_grad=True), private.next_sequence_number()
    torch.sin(torch.sin(x))
    assert private.next_sequence_number() == before + 2


@contract
def gradients() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    loss = (x * x).sum()
    for _ in range(2):  # the tape is kept
        found, none = private.gradients(loss, torch.tensor(10.0), [x, unused])
        assert none is None and found is not None and found.tolist() == [40.0, 60.0]
    assert x.grad is None


@contract
def version_of() -> None:
    x = torch.ones(2)
    before = private.version_of(x)
    x.view(2).add_(1)
    assert private.version_of(x) == before + 1


@contract
def set_versions() -> None:
    x = torch.ones(2, requires_grad=True).clone()
    y, version = (x * x).sum(), private.version_of(x)
    with torch.no_grad():
        x.add_(0)
    private.set_versions((x,), (version,))
    y.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    assert private.version_of(x) == version


@contract
def autograd_in_kernels() -> None:
    x = torch.ones(2)
    with torch._C._AutoDispatchBelowAutograd():  # as a kernel is called
        assert not (x.detach().requires_grad_() * 2).requires_grad
        with private.autograd_in_kernels():
            assert (x.detach().requires_grad_() * 2).requires_grad
        assert not (x.detach().requires_grad_() * 2).requires_grad


@contract
def storage_id() -> None:
    metas = [torch.empty(4, device="meta") for _ in range(2)]
    for one, other in (metas, (torch.ones(4), torch.ones(4))):
        assert private.storage_id(one) == private.storage_id(one[2:]) != private.storage_id(other)


@contract
def StorageWeakRef() -> None:
    tensor = torch.ones(4)
    reference = private.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch
    assert not reference.expired()  # type: ignore[no-untyped-call]  # torch has not typed it
    del tensor
    gc.collect()
    assert reference.expired()  # type: ignore[no-untyped-call]  # torch has not typed it


@contract
def storage_behind() -> None:
    tensor = torch.ones(4)
    reference = private.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch
    storage = private.storage_behind(reference)
    assert storage is not None and storage.data_ptr() == tensor.data_ptr()
    del tensor, storage
    gc.collect()
    assert private.storage_behind(reference) is None


# ---------------------------------------------------------------- what the recorder replaces


@contract
def module_tensors() -> None:
    module = torch.nn.BatchNorm1d(2)
    parameters, buffers = private.module_tensors(module)
    assert (set(parameters), set(buffers)) == (
        {"weight", "bias"}, {"running_mean", "running_var", "num_batches_tracked"},
    )  # fmt: skip
    parameters["weight"] = stand_in = torch.zeros(2)
    assert module.weight is stand_in


@contract
def enter_bottom() -> None:
    below, above = Functions(), Functions()
    with above:
        private.enter_bottom(below)
        torch.zeros(2)
    assert len(above.modules_and_names) == len(below.modules_and_names) == 1
    torch.zeros(2)
    assert (len(above.modules_and_names), len(below.modules_and_names)) == (1, 2)
    assert private.leave_bottom(below)


@contract
def leave_bottom() -> None:
    below, above = Functions(), Functions()
    private.enter_bottom(below)
    with above:
        assert private.leave_bottom(below)
        torch.zeros(2)
    assert not private.leave_bottom(below)
    assert (len(above.modules_and_names), len(below.modules_and_names)) == (1, 0)


@contract
def FUNCTIONAL_CHECKS() -> None:
    assert [bool(getattr(F, name)) for name in private.FUNCTIONAL_CHECKS] == [True] * 3
    x = torch.ones(2)
    with replaced(F, private.FUNCTIONAL_CHECKS[1], lambda *operands: False), Functions() as functions:
        F.softmax(x, 0)
    assert ("torch.nn.functional", "softmax") not in functions.modules_and_names
    assert [name for _, name in functions.modules_and_names] == ["softmax"]


@contract
def CHECKPOINT_FUNCTION() -> None:
    class Once:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args), preserve

    with replaced(checkpoints, private.CHECKPOINT_FUNCTION, Once):
        assert checkpoints.checkpoint(lambda a, b: a + b, 1, 2, use_reentrant=True) == (3, True)


@contract
def CHECKPOINT_GENERATOR() -> None:
    arguments: list[Any] = []

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        arguments.append(args)
        return iter((None,))

    with replaced(checkpoints, private.CHECKPOINT_GENERATOR, generator):
        assert checkpoints.checkpoint(lambda a, b: a + b, 1, 2, use_reentrant=False) == 3
    assert len(arguments) == 1


@contract
def PACK_PADDED_SEQUENCE() -> None:
    with Functions() as functions:
        torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 1), torch.tensor([2, 1]))
    assert private.PACK_PADDED_SEQUENCE in [name for _, name in functions.modules_and_names]


# ---------------------------------------------------------------- process groups


@contextmanager
def one_rank() -> Iterator[Any]:
    interfaces.choose_for_gloo("localhost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public
    try:
        yield dist.new_group([0])
    finally:
        dist.destroy_process_group()


@contract
def set_group_timeout() -> None:
    with one_rank() as group:
        private.set_group_timeout(group, timedelta(seconds=77))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


@contract
def abort_group() -> None:
    with one_rank() as group:
        private.abort_group(group, torch.device("cpu"))


# ---------------------------------------------------------------- operators by name


@contract
def WITHOUT_DERIVATIVE() -> None:
    library: Any = torch.library.Library("penstock_contract", "DEF")  # type: ignore[no-untyped-call]  # torch
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x.detach() * 2, "CPU")
    result = torch.ops.penstock_contract.plain(torch.ones(2, requires_grad=True))
    assert result.grad_fn.name() == private.WITHOUT_DERIVATIVE


@contract
def FUNCTIONAL_COLLECTIVES() -> None:
    collectives = getattr(torch.ops, private.FUNCTIONAL_COLLECTIVES)
    assert [spec.name for spec in private.schema_of(collectives.all_reduce.default).arguments][:2] == [
        "input", "reduce_op",
    ]  # fmt: skip
    assert isinstance(collectives.wait_tensor.default, private.OpOverload)


@contract
def REFUSED_OPERATORS() -> None:
    assert len(private.REFUSED_OPERATORS) == 12
    assert [name for name in private.REFUSED_OPERATORS if not hasattr(aten, name)] == []


@contract
def ATTENTION_ON_CPU() -> None:
    called, q = Calls(), torch.ones(1, 1, 2, 8, requires_grad=True)
    with called:
        F.scaled_dot_product_attention(q, q, q).sum().backward()  # type: ignore[no-untyped-call]  # torch: no types
    assert [name for name in called.names if "attention" in name] == [f"aten::{n}" for n in private.ATTENTION_ON_CPU]


@contract
def RESIZING_OPERATORS() -> None:
    image, called = torch.ones(1, 1, 4, 4), Functions()
    with called, replaced(F, private.FUNCTIONAL_CHECKS[1], lambda *operands: False):
        F.interpolate(image, scale_factor=2, mode="bilinear", antialias=True)
        F.interpolate(image, scale_factor=2, mode="bicubic", antialias=True)
        for dims in (3, 4, 5):
            F.interpolate(torch.ones([2] * dims), scale_factor=2, mode="nearest-exact")
    assert {name for _, name in called.modules_and_names} >= set(private.RESIZING_OPERATORS)


@contract
def all_threads_config() -> None:
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        ready.wait(10)
        torch.ones(3).cumprod(0)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=private.all_threads_config()) as found:
        ready.set()
        done.wait(10)
    thread.join()
    assert "aten::cumprod" in {event.key for event in found.key_averages()}


# ---------------------------------------------------------------- the table itself


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_torch_keeps(name: str) -> None:
    CONTRACTS[name]()


def test_every_name_of_torch_has_a_contract() -> None:
    assert {entry.name for entry in private_names.entries(COMPAT) if entry.kind == "name"} == set(CONTRACTS)
