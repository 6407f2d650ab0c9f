"""The environment of every process of the tests. Imported before anything that imports torch.

Here and not in a fixture: processes that tests start inherit it.
"""

from __future__ import annotations

import os

# A test that wants another kernel forces it.
os.environ.setdefault("PENSTOCK_MATRIX_KERNELS", "torch")

# What one process of the tests has compiled, the next one need not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Threads that wait for their share of a sum would spin, and keep the processor from the tests beside: small networks
# train ten times slower. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
