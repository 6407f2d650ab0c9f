"""`penstock.hash_rows`: hashes of rows of integers, the same on every device, platform and run.

XXH64 of a row's bytes, little-endian, once for each seed 0, 1, …, modulo a number, as an unsigned 64-bit integer; that
is Fluid's operator `hash`, so that tables that were trained with it keep their rows. Arithmetic is torch's int64, which
wraps as uint64 does. No derivative. Source: the specification of xxHash (xxhash_spec.md 0.2); hash_op.h (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import check_value

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("hash_rows(Tensor x, int num_hash, int mod_by) -> Tensor")


def _signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


_P1, _P2, _P3, _P4, _P5 = map(
    _signed,
    (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
_STRIPE = 4
"""Lanes of 8 bytes that are hashed beside each other, in rows that have so many."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rotated(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shifted(x, 64 - bits)


def _round(state: Tensor | int, lane: Tensor) -> Tensor:
    return _rotated(state + lane * _P2, 31) * _P1


def _merged(value: Tensor, state: Tensor) -> Tensor:
    return (value ^ _round(0, state)) * _P1 + _P4


def _of_stripes(lanes: Tensor, seed: int) -> tuple[Tensor, int]:
    """The hash of the whole stripes of rows of lanes [n, k], and how many lanes these are."""
    whole = lanes.shape[1] // _STRIPE * _STRIPE
    starts = [_signed(seed + _P1 + _P2), _signed(seed + _P2), seed, _signed(seed - _P1)]
    states = [torch.full_like(lanes[:, 0], start) for start in starts]
    for first in range(0, whole, _STRIPE):
        states = [_round(state, lanes[:, first + i]) for i, state in enumerate(states)]
    value = sum(_rotated(state, bits) for state, bits in zip(states, (1, 7, 12, 18), strict=True))
    for state in states:
        value = _merged(value, state)  # type: ignore[arg-type]  # a sum of tensors is one
    return value, whole  # type: ignore[return-value]  # as above


def _xxh64(lanes: Tensor, rest: Tensor | None, seed: int) -> Tensor:
    """XXH64 of rows of 8-byte lanes int64 [n, k] and 4 bytes behind them, int64 [n], if there are any: int64 [n]."""
    done, size = 0, 8 * lanes.shape[1] + (0 if rest is None else 4)
    if lanes.shape[1] >= _STRIPE:
        value, done = _of_stripes(lanes, seed)
    else:
        value = torch.full([len(lanes)], _signed(seed + _P5), dtype=torch.int64, device=lanes.device)
    value = value + size
    for i in range(done, lanes.shape[1]):
        value = _rotated(value ^ _round(0, lanes[:, i]), 27) * _P1 + _P4
    if rest is not None:
        value = _rotated(value ^ (rest * _P1), 23) * _P2 + _P3
    value = (value ^ _shifted(value, 33)) * _P2
    value = (value ^ _shifted(value, 29)) * _P3
    return value ^ _shifted(value, 32)


def _modulo(value: Tensor, mod_by: int) -> Tensor:
    """The remainder of a uint64 that an int64 stands for. The parts of the sum stay below 2^63 for mod_by < 2^61."""
    return (_shifted(value, 1) % mod_by * 2 + (value & 1)) % mod_by


def _lanes(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of int64 or int32 as lanes of 8 bytes, and the 4 bytes behind them, not negative, of an odd int32 row."""
    if x.dtype == torch.int64:
        return x, None
    words = x.to(torch.int64) & 0xFFFFFFFF
    even = words.shape[1] // 2 * 2
    lanes = words[:, 0:even:2] | (words[:, 1:even:2] << 32)
    return lanes, words[:, -1] if even < words.shape[1] else None


def _hash_rows(x: Tensor, num_hash: int, mod_by: int) -> Tensor:
    _check(x, num_hash, mod_by)
    lanes, rest = _lanes(x)
    return torch.stack([_modulo(_xxh64(lanes, rest, seed), mod_by) for seed in range(num_hash)], 1).to(x.dtype)[
        ..., None
    ]


def _check(x: Tensor, num_hash: int, mod_by: int) -> None:
    check_value(x.dim() == 2, lambda: f"penstock.hash_rows: x has shape {list(x.shape)}; expected [rows, width]")
    known = x.dtype in (torch.int32, torch.int64)
    check_value(known, lambda: f"penstock.hash_rows: x is of {x.dtype}; expected int32 or int64")
    check_value(num_hash >= 1, lambda: f"penstock.hash_rows: num_hash is {num_hash}; expected 1 or more")
    most = 2**31 - 1 if x.dtype == torch.int32 else 2**61
    check_value(
        1 <= mod_by <= most, lambda: f"penstock.hash_rows: mod_by is {mod_by}; expected 1 to {most} for {x.dtype}"
    )


def _shape(x: Tensor, num_hash: int, mod_by: int) -> Tensor:
    _check(x, num_hash, mod_by)
    return x.new_empty([x.shape[0], num_hash, 1])


_LIBRARY.impl("hash_rows", _hash_rows, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::hash_rows", _shape, lib=_LIBRARY)
