"""Penstock: PaddlePaddle Fluid's training system on PyTorch, made visible.

`import penstock as fluid` runs Fluid-style scripts. Attributes are loaded on first use, so that the
control plane, which needs no torch, can import `penstock.protocol` without paying for it.
"""

from __future__ import annotations

__version__ = "0.1.0"
