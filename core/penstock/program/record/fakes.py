"""Fake: a tensor without values that stands for one of a Program while it is recorded.

To autograd, to torch's functions and to the user's code it is a tensor on its device, with sizes that may be symbols
and a storage that its views share; to torch's kernels it is on the meta device, so that nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.compat.torch import DEVICE_QUERY, as_kernel, disabled_torch_function, in_kernel, make_subclass

META, CPU = torch.device("meta"), torch.device("cpu")


class Fake(torch.Tensor):
    """See the module. `place`: the device that it shows."""

    place: torch.device
    called: Callable[[Any, Any, Any], Any]
    """Returns the results of an ATen call on fakes; shapes.py, which knows this module, puts itself here."""

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types an instance's
        if func is DEVICE_QUERY:
            return args[0].device
        return cls.called(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch has it as an attribute
        """The device that it shows; within a kernel, the meta device."""
        return META if in_kernel() else self.place


def fake_of(meta: torch.Tensor, place: torch.device = CPU) -> Fake:
    """Return a fake on `place` that shares the storage of a tensor on the meta device."""
    fake: Fake = make_subclass(Fake, meta, place)
    fake.place = place
    return fake


@contextmanager
def kernels() -> Iterator[None]:
    """Within the block, calls run torch's kernels for the meta device, of fakes too, and no mode sees them."""
    with as_kernel(meta=True):
        yield


def empty_fake(
    sizes: Iterable[Any], strides: Iterable[Any] | None, dtype: torch.dtype, place: torch.device = CPU
) -> Fake:
    """Return a fake of these sizes (int or SymInt); `strides`: None for contiguous."""
    sizes = list(sizes)
    with kernels():
        if strides is None:
            meta = torch.ops.aten.empty.memory_format(
                sizes, dtype=dtype, device=META
            )  # not torch.empty, which is patched
        else:
            meta = torch.empty_strided(sizes, list(strides), dtype=dtype, device=META)
    return fake_of(meta, place)
