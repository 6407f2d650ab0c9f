"""Protobuf messages as rows of bytes: many messages of one shape at once, without a Python object for each.

A message is a list of parts: bytes that all of its rows share, or an array (rows, width) with the bytes of each.
Numbers of one part have as many bytes as the largest of them needs. Protobuf's decoders accept a varint that is longer
than necessary, up to ten bytes (Perfetto's own writer reserves the lengths of messages in this way), so that all rows
have one size, and a file of millions of slices is a few copies of arrays. Pure.
Source: the encoding of Protocol Buffers (protobuf.dev, "Encoding").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.integer]
Part = bytes | Rows
_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int, width: int = 1) -> bytes:
    """Return a varint of at least `width` bytes. `value`: from 0 to 2^64 - 1."""
    width = max(width, width_of(value))
    return bytes((value >> 7 * i) & 0x7F | (0x80 if i < width - 1 else 0) for i in range(width))


def width_of(largest: int) -> int:
    """Return the bytes of a varint that holds `largest`."""
    return max(1, -(-largest.bit_length() // 7))


def varints(values: Numbers) -> Rows:
    """Return varints of one width, one a row. `values`: not negative."""
    width = width_of(int(values.max(initial=0)))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    rows = ((values.astype(np.uint64)[:, None] >> shifts) & np.uint64(0x7F)).astype(np.uint8)
    rows[:, :-1] |= 0x80
    return rows


def number(field: int, value: int | Numbers) -> list[Part]:
    """Return a field that holds an unsigned number, of each row if `value` is an array."""
    tag = varint(field << 3 | _VARINT)
    return [tag + varint(value)] if isinstance(value, int) else [tag, varints(value)]


def doubles(field: int, values: npt.NDArray[np.float64]) -> list[Part]:
    """Return a field that holds a double of each row."""
    return [varint(field << 3 | _FIXED64), np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)]


def text(field: int, value: str) -> list[Part]:
    """Return a field that holds a text."""
    content = value.encode("utf-8", "replace")
    return [varint(field << 3 | _LENGTH) + varint(len(content)) + content]


def message(field: int, parts: Sequence[Part]) -> list[Part]:
    """Return a field that holds a message of these parts."""
    return [varint(field << 3 | _LENGTH) + varint(sum(_width(part) for part in parts)), *parts]


def rows_of(parts: Sequence[Part], count: int) -> Rows:
    """Return the messages as an array (count, bytes of one)."""
    rows = np.empty((count, sum(_width(part) for part in parts)), np.uint8)
    at = 0
    for part in parts:
        rows[:, at : at + _width(part)] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += _width(part)
    return rows


def _width(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.shape[1]
