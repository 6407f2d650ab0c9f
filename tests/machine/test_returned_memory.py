"""Memory that was freed goes back to the machine on request."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from penstock.machine.memory import return_freed

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_memory_below_a_used_block_is_returned() -> None:
    large = torch.ones(6 * MIB)
    del large  # from now on smaller blocks come from the heap
    blocks = [torch.ones(MIB) for _ in range(24)]  # 4 MiB each
    del blocks[:-1]
    before = resident_bytes()
    return_freed()
    assert before - resident_bytes() > 48 * MIB
