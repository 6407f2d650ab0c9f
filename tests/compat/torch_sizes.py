"""Contracts of what torch asks of sizes and of fake tensors; `test_torch_names.py` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compat.contracts import contract

from penstock.compat import torch as private
from penstock.program.record.sizes import Sizes

META, CPU = torch.device("meta"), torch.device("cpu")


class Shown(torch.Tensor):
    """A tensor on the meta device that shows another one."""

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types an instance's
        if func is private.DEVICE_QUERY:
            return META if private.in_kernel() else CPU
        with private.as_kernel(meta=True):
            return func(*args, **(kwargs or {}))


def shown(*sizes: Any) -> Any:
    """Return one of these sizes."""
    return private.make_subclass(Shown, torch.ops.aten.empty.memory_format(list(sizes), device=META), CPU)


@contract
def SYMBOL_FILES() -> None:
    sizes = Sizes()
    size = sizes.new("s0", 7920)
    assert bool(size > 5) and not bool(size < 6)
    assert [asked.line.split(":")[0] for asked in sizes.asked] == [Path(__file__).name] * 2


@contract
def DEVICE_QUERY() -> None:
    fake = shown(2, 3)
    assert fake.device == CPU and not fake.is_meta


@contract
def disabled_torch_function() -> None:
    fake = shown(2, 3)
    assert type(fake + fake) is torch.Tensor
    assert not torch.overrides.has_torch_function((fake,))


@contract
def make_subclass() -> None:
    size = Sizes().new("s0", 7920)
    meta = torch.ops.aten.empty.memory_format([size, 2], device=META)
    fake = private.make_subclass(Shown, meta, CPU)
    assert isinstance(fake, Shown) and fake.shape[1] == 2 and str(fake.shape[0]) == "s0"
    assert private.storage_id(fake) == private.storage_id(meta)
    with pytest.raises(RuntimeError):
        fake.data_ptr()


@contract
def in_kernel() -> None:
    assert not private.in_kernel()
    with private.as_kernel(meta=True):
        assert private.in_kernel()
    with private.as_kernel(meta=False):
        assert not private.in_kernel()


@contract
def as_kernel() -> None:
    fake = shown(2, 3)
    with private.as_kernel(meta=True):
        found = torch.ops.aten.mm.default(fake, shown(3, 4))
    assert found.is_meta and found.shape == (2, 4)
    with private.as_kernel(meta=False):
        assert torch.ones(2).tolist() == [1.0, 1.0]


@contract
def functions_behind_dynamo() -> None:
    names = {function.__name__ for function in private.functions_behind_dynamo()}
    assert {"add", "cat", "where"} <= names


@contract
def without_dynamo() -> None:
    code = (
        "import sys, torch; from penstock.compat.torch import without_dynamo\n"
        "x = torch.empty(2, 3, device='meta')\n"
        "with without_dynamo(): (x + x).relu(); torch.cat([x, x])\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "x + x; assert 'torch._dynamo' in sys.modules, 'not needed any more'"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
