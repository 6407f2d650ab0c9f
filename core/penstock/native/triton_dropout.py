"""Dropout as one kernel, in Triton: the bits are those of the CPU kernel (`src/ops/dropout.h`, `philox.h`).

Imports triton, which torch's CUDA builds bring; only `card_kernels` imports this.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):  # type: ignore[no-untyped-def]  # Triton compiles it, and has no types
    """The finaliser of SplitMix64 on uint64: mix64 of philox.h."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["op_seed", "per_row", "threshold"])  # type: ignore[untyped-decorator]  # as above
def dropout(  # type: ignore[no-untyped-def]  # as above
    x, rng, out, mask, count, batch, inner, outer, per_row, op_seed, threshold, scale, block: tl.constexpr
):
    """Write x * scale where a random word is at least `threshold`, else 0, and which; both contiguous, as `x`.

    `x` lies as [outer, batch, inner]; words are numbered as [batch, outer, inner], from `rng[2] * per_row` on. `rng`:
    int64[3], seed of the program, step, first row. A launch covers `block` elements a program.
    """
    position = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = position < count
    rest = position // inner
    number = ((rest % batch) * outer + rest // batch) * inner + position % inner + tl.load(rng + 2) * per_row
    seeds = tl.cast(op_seed, tl.int64).to(tl.uint64, bitcast=True)
    key = mixed(mixed(tl.load(rng).to(tl.uint64, bitcast=True)) ^ seeds)
    step = tl.load(rng + 1) + position * 0
    counter = (number // 128) * 32 + number % 32  # four words for each of 32 counters: kPhiloxLanes
    first, second, third, fourth = tl.philox(
        key,
        (counter & 0xFFFFFFFF).to(tl.uint32),
        (counter >> 32).to(tl.uint32),
        (step & 0xFFFFFFFF).to(tl.uint32),
        ((step >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    which = (number % 128) // 32
    word = tl.where(which == 0, first, tl.where(which == 1, second, tl.where(which == 2, third, fourth)))
    keep = word.to(tl.int64) >= threshold
    value = tl.load(x + position, mask=inside, other=0.0)
    tl.store(out + position, tl.where(keep, value * scale, 0.0), mask=inside)
    tl.store(mask + position, keep, mask=inside)
