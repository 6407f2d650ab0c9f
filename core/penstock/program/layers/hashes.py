"""`hash`: ids for a table from ids, or rows of them, of any range. Source: fluid.layers.hash (Fluid 1.8)."""

from __future__ import annotations

from typing import Any

import torch

from penstock.program.layers.expected import expect_ids, expect_rank
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.unsized import reads_unsized
from penstock.program.record.variable import record_call


@reads_unsized
def hash(input: Any, hash_size: int, num_hash: int = 1, name: str | None = None) -> Any:
    """Return hashes of the rows of ids, below `hash_size`, one for each of the seeds 0 to num_hash - 1.

    Shapes: input int32 or int64 [n, w], ragged or not; result [n, num_hash, 1] of its dtype and sequences. The values
    are Fluid's: XXH64 of a row's bytes modulo `hash_size`.
    """
    expect_ids("hash", input)
    expect_rank("hash", input, 2)
    with name_scope(name or default_main_program().unique("hash")):
        return record_call(torch.ops.penstock.hash_rows, (input, int(num_hash), int(hash_size)), {})
