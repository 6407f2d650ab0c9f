"""The codec: what goes in comes out, and bytes that are no message are refused with a reason and nothing else."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.ps.wire import ALIGNMENT, ITEM_SIZES, KINDS, Message, WireError, WireTensor, bytes_of, decode, encode

SENDER: dict[str, Any] = {"job": "j", "trainer": 1, "epoch": 0}


def push(*arrays: np.ndarray[Any, Any]) -> Message:
    """Return a push of these arrays."""
    tensors = [WireTensor(f"t{i}", str(a.dtype), a.shape, memoryview(a.tobytes())) for i, a in enumerate(arrays)]
    return Message("push", {**SENDER, "round": 7, "block": "w.block0"}, tensors)


def sent(message: Message) -> tuple[bytes, bytes]:
    """Return (head, body) as they arrive."""
    head, parts = encode(message)
    return head, b"".join(parts)


@given(
    dtype=st.sampled_from(sorted(set(ITEM_SIZES) - {"bfloat16"})),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4),
)
def test_what_goes_in_comes_out(dtype: str, shapes: list[list[int]]) -> None:
    arrays = [np.arange(np.prod(s, dtype=int)).astype(dtype).reshape(s) for s in shapes]
    head, body = sent(push(*arrays))
    back = decode(head, memoryview(body))
    assert (back.kind, back.fields) == ("push", {**SENDER, "round": 7, "block": "w.block0"})
    for array, tensor in zip(arrays, back.tensors, strict=True):
        got = np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1), (0,), (0, 3)], ids=str)
def test_the_bytes_of_a_tensor_are_its_own(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    bytes_of(tensor)[:] = bytes_of(torch.ones(shape))
    assert torch.equal(tensor, torch.ones(shape))


def test_the_bytes_of_one_element_of_any_stride_are_its_own() -> None:
    tensor = torch.arange(10.0)
    bytes_of(tensor[::3][1:2])[:] = 0
    assert tensor.tolist() == [0, 1, 2, 0, 4, 5, 6, 7, 8, 9]


def test_tensors_are_views_at_multiples_of_the_alignment() -> None:
    head, body = sent(push(np.ones(3, np.float32), np.ones(5, np.int64)))
    tensors = decode(head, memoryview(body)).tensors
    assert len(body) == ALIGNMENT + 40
    assert tensors[1].data.obj is body


def rewritten(head: bytes, change: Any) -> bytes:
    """Return the head with its JSON changed."""
    parsed = json.loads(head[8:])
    change(parsed)
    text = json.dumps(parsed).encode()
    return struct.pack("<4sI", b"PSW1", len(text)) + text


WRONG: dict[str, tuple[Any, str]] = {
    "unknown kind": (lambda h: h.update(kind="run"), "no message is called 'run'"),
    "missing field": (lambda h: h["fields"].pop("epoch"), "has the fields"),
    "extra field": (lambda h: h["fields"].update(code="x"), "has the fields"),
    "wrong type": (lambda h: h["fields"].update(round="7"), "field 'round' of a push message is '7'; expected int"),
    "a boolean for a number": (lambda h: h["fields"].update(round=True), "field 'round'"),
    "a number beyond int64": (lambda h: h["fields"].update(round=2**63), "field 'round'"),
    "dtype": (lambda h: h["tensors"][0].__setitem__(1, "object"), "has the dtype 'object'"),
    "negative size": (lambda h: h["tensors"][0].__setitem__(2, [-1]), r"has the shape \[-1\]"),
    "too many dims": (lambda h: h["tensors"][0].__setitem__(2, [1] * 9), "has the shape"),
    "beyond the body": (lambda h: h["tensors"][0].__setitem__(2, [2**40]), "is not inside a body"),
    "an offset that overlaps": (lambda h: h["tensors"][1].__setitem__(3, 0), "not where the one before it ends"),
    "less than the body": (lambda h: h["tensors"].pop(), "the tensors end at 12"),
    "another body": (lambda h: h.update(body=1), "announces 1 bytes"),
    "no tensors": (lambda h: h.update(tensors={}), "are no list"),
    "another key": (lambda h: h.update(more=1), "the head is not"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_head_is_refused_with_its_reason(what: str) -> None:
    change, reason = WRONG[what]
    head, body = sent(push(np.ones(3, np.float32), np.ones(5, np.int64)))
    with pytest.raises(WireError, match=reason):
        decode(rewritten(head, change), memoryview(body))


def test_mutated_messages_are_read_or_refused_without_a_crash() -> None:
    head, body = sent(push(np.ones(3, np.float32), np.ones(5, np.int64)))
    rng = random.Random(4)
    refused = 0
    for _ in range(1000):
        broken = bytearray(head)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        cut = bytes(broken[: rng.choice([len(broken), rng.randrange(len(broken) + 1)])])
        try:
            decode(cut, memoryview(body[: rng.choice([len(body), rng.randrange(len(body))])]))
        except WireError:
            refused += 1
    assert refused > 900


def test_what_decode_would_refuse_is_not_sent() -> None:
    with pytest.raises(WireError, match="no message is called 'run'"):
        encode(Message("run", {}))
    with pytest.raises(WireError, match="field 'round'"):
        encode(Message("answer", {"round": "1", "staleness": 0}))
    short = WireTensor("t", "float32", (4,), memoryview(bytes(8)))
    with pytest.raises(WireError, match=r"tensor 't', float32\[4\] at 0, is not inside a body of 8 bytes"):
        encode(Message("answer", {"round": 1, "staleness": 0}, [short]))
    with pytest.raises(WireError, match="too large"):
        encode(Message("refuse", {"reason": "x" * (1 << 20), "rejoin": False}))


def test_deeply_nested_json_is_refused() -> None:
    text = b"[" * 100_000
    with pytest.raises(WireError, match="no JSON"):
        decode(struct.pack("<4sI", b"PSW1", len(text)) + text, memoryview(b""))


def test_every_kind_has_fields_of_plain_types() -> None:
    assert all(t in {int, str, bool, float} for fields in KINDS.values() for t in fields.values())
