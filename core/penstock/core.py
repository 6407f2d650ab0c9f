"""`fluid.core`: what Fluid's scripts name of its C++ module."""

from __future__ import annotations

from penstock.errors import EOFException
from penstock.exec.places import CPUPlace, CUDAPlace

__all__ = ["CPUPlace", "CUDAPlace", "EOFException"]
