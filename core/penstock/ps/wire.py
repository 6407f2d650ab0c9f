"""Messages between trainers and parameter servers: bytes to Message and back, tensors without copies.

A message is a *head* (what is asked, of which tensors; at most 1 MiB of JSON behind a fixed prefix) and a *body* (the
tensors' raw little-endian bytes, one after another, each at a multiple of 64). Head and body travel apart: the body may
be cut into chunks, or lie in shared memory. Nothing is unpickled, and nothing that the head claims is believed before
it is checked against the kind's fields and the body's length: `decode` raises WireError and has no other effect.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from penstock.errors import PeerError

MAGIC = b"PSW1"
ALIGNMENT = 64
MAX_HEAD_BYTES = 1 << 20
MAX_DIMS = 8
MAX_TENSORS = 4096
_PREFIX = struct.Struct("<4sI")

ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip

Value = int | float | str | bool

# kind -> field -> type. A request names its sender (trainer, epoch) and its job; an answer the open round.
# Where there are no rounds, that to a join names the newest push of the sender that was applied.
_SENDER = {"job": str, "trainer": int, "epoch": int}
KINDS: Mapping[str, Mapping[str, type]] = {
    "hello": {"job": str, "token": str},
    "where": {},
    # where channels from other hosts are opened; 0: nowhere
    "port": {},
    "listens": {"port": int},
    # from now on the connection is a channel of `native/src/ps`; answered with [blocks], their names in order as JSON
    "channel": _SENDER,
    # what the trainer's program was made for; refused if the server's was made for another job. Answered with the
    # server's [lease_s]; one of an older version names none
    "agree": {**_SENDER, "mode": str, "trainers": int},
    "join": _SENDER,
    "beat": _SENDER,
    "leave": _SENDER,
    "push": {**_SENDER, "round": int, "block": str},
    "barrier": {**_SENDER, "round": int},
    # what is left to push of a round, its barrier, and a pull of what it has made
    "step": {**_SENDER, "round": int, "blocks": str},
    "pull": {**_SENDER, "round": int, "blocks": str},
    "lookup": {**_SENDER, "round": int, "table": str},
    "changed": {**_SENDER, "block": str},
    "save": {**_SENDER, "path": str},
    # the same in two: answered when all is copied, and when the copy is written
    "cut": {**_SENDER, "path": str},
    "written": {**_SENDER, "path": str},
    # whether the server's values are those of a checkpoint, answered with its `Origin` as text
    "origin": {**_SENDER, "copy": str},
    # to a meeting of all trainers with [values] or nothing, answered with the sum; number -1: which one is next
    "meet": {**_SENDER, "number": int},
    "here": {"host": str, "address": str},
    "answer": {"round": int, "staleness": int},
    "refuse": {"reason": str, "rejoin": bool},
    # records of the log: a closed round with its merged gradients, an applied push
    "round": {"round": int},
    "applied": {"trainer": int, "epoch": int, "round": int, "block": str},
    # membership: `round` is the first that waits for a trainer; what a trainer read in async mode
    "joined": {"trainer": int, "epoch": int, "round": int},
    "left": {"trainer": int},
    "lost": {"trainer": int},
    "finished": {},
    "pulled": {"trainer": int, "block": str},
}

VALUES, ROWS = "values:", "rows:"
"""Prefixes of a block's tensors in a message about several blocks: `step`, and the record `round`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server's values come from: the content of its answer to `origin`.

    `knows`: it has the values of the copy that it was asked for, or newer ones: it began from it, has written it since,
    or goes on from a state of its own. `began`: what it began from, in words.

    `epochs`: trainer -> the newest incarnation of it that has joined this run of the servers.
    """

    knows: bool
    began: str
    epochs: Mapping[int, int]

    def text(self) -> str:
        """Return JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str | bytes) -> Origin:
        """Read `text`. Raises PeerError."""
        try:
            content = json.loads(text)
            epochs = {int(trainer): int(epoch) for trainer, epoch in content["epochs"].items()}
            return Origin(bool(content["knows"]), str(content["began"]), epochs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(f"a server says where its values come from with {text!r}: {error!r}") from error


class WireError(PeerError):
    """Bytes that are no message."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor of a message. `data`: its contiguous bytes; a view, so it lives as long as what it was cut from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def num_bytes(self) -> int:
        """Bytes that dtype and shape ask for."""
        return ITEM_SIZES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` with exactly the fields that `KINDS` names for it, and tensors."""

    kind: str
    fields: Mapping[str, Value]
    tensors: Sequence[WireTensor] = field(default=())


def encode(message: Message) -> tuple[bytes, list[memoryview | bytes]]:
    """Return (head, the parts of the body in order, padding included). Raises WireError for what `decode` would refuse.

    The parts are the tensors' own bytes, not copies.
    """
    _check_fields(message.kind, message.fields)
    specs: list[list[Any]] = []
    parts: list[memoryview | bytes] = []
    offset = 0
    for tensor in message.tensors:
        padding = -offset % ALIGNMENT
        if padding:
            parts.append(bytes(padding))
        offset += padding
        view = tensor.data.cast("B") if tensor.data.format != "B" or tensor.data.ndim != 1 else tensor.data
        specs.append([tensor.name, tensor.dtype, list(tensor.shape), offset])
        _tensor(specs[-1], view, base=offset)
        parts.append(view)
        offset += len(view)
    text = json.dumps({"kind": message.kind, "fields": dict(message.fields), "tensors": specs, "body": offset})
    head = text.encode()
    if len(head) > MAX_HEAD_BYTES or len(specs) > MAX_TENSORS:
        raise WireError(
            f"a {message.kind} message with {len(specs)} tensors has a head of {len(head)} bytes: too large"
        )
    return _PREFIX.pack(MAGIC, len(head)) + head, parts


def announced_body(head: bytes) -> int:
    """Return how many bytes of body a head announces. Raises WireError."""
    parsed = _parse(head)
    size: Any = parsed.get("body") if isinstance(parsed, dict) else None
    if not _is_size(size):
        raise WireError(f"the head announces {size!r} bytes")
    return int(size)


def decode(head: bytes, body: memoryview) -> Message:
    """Return the message; its tensors are views of `body`. Raises WireError."""
    parsed = _parse(head)
    if not isinstance(parsed, dict) or parsed.keys() != {"kind", "fields", "tensors", "body"}:
        raise WireError("the head is not {kind, fields, tensors, body}")
    kind, fields, specs = parsed["kind"], parsed["fields"], parsed["tensors"]
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise WireError("the head's kind or fields have the wrong type")
    _check_fields(kind, fields)
    if parsed["body"] != len(body) or isinstance(parsed["body"], bool):
        raise WireError(f"the head announces {parsed['body']!r} bytes, but {len(body)} came")
    if not isinstance(specs, list) or len(specs) > MAX_TENSORS:
        raise WireError(f"the head's tensors are no list of at most {MAX_TENSORS}")
    tensors, end = [], 0
    for spec in specs:
        tensor = _tensor(spec, body, base=0)
        if spec[3] != end + (-end % ALIGNMENT):
            raise WireError(f"tensor {tensor.name!r} begins at {spec[3]}, not where the one before it ends")
        end = spec[3] + tensor.num_bytes
        tensors.append(tensor)
    if end != len(body):
        raise WireError(f"the tensors end at {end}, but the body has {len(body)} bytes")
    return Message(kind, fields, tensors)


def _parse(head: bytes) -> Any:
    if len(head) < _PREFIX.size:
        raise WireError(f"a head of {len(head)} bytes is too short")
    magic, size = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise WireError(f"the head begins with {magic!r}; expected {MAGIC!r}")
    if size > MAX_HEAD_BYTES or size != len(head) - _PREFIX.size:
        raise WireError(f"the head announces {size} bytes, but has {len(head) - _PREFIX.size}")
    try:
        return json.loads(head[_PREFIX.size :])
    except (ValueError, RecursionError) as error:
        raise WireError(f"the head is no JSON: {error}") from error


def _check_fields(kind: str, fields: Mapping[str, Any]) -> None:
    expected = KINDS.get(kind)
    if expected is None:
        raise WireError(f"no message is called {kind!r}")
    if fields.keys() != expected.keys():
        raise WireError(f"a {kind} message has the fields {sorted(expected)}, not {sorted(map(str, fields))}")
    for name, wanted in expected.items():
        value = fields[name]
        fits = not isinstance(value, int) or -(2**63) <= value < 2**63
        if type(value) is not wanted or not fits:
            raise WireError(f"field {name!r} of a {kind} message is {value!r}; expected {wanted.__name__}")


def _tensor(spec: Any, body: memoryview, *, base: int) -> WireTensor:
    """Check one tensor's claims. `base`: offset of `body` within the whole body."""
    if not isinstance(spec, list) or len(spec) != 4:
        raise WireError("a tensor is [name, dtype, shape, offset]")
    name, dtype, shape, offset = spec
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise WireError(f"tensor {name!r} has the dtype {dtype!r}; expected one of {', '.join(ITEM_SIZES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(d) for d in shape):
        raise WireError(f"tensor {name!r} has the shape {shape!r}; expected up to {MAX_DIMS} sizes")
    sizes: list[int] = shape
    size = ITEM_SIZES[dtype] * math.prod(sizes)
    if not _is_size(offset) or offset - base + size > len(body):
        raise WireError(f"tensor {name!r}, {dtype}{shape} at {offset!r}, is not inside a body of {len(body)} bytes")
    return WireTensor(name, dtype, tuple(sizes), body[offset - base : offset - base + size])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return what a message calls it. Raises PeerError for one that does not travel."""
    name = _NAMES.get(dtype)
    if name is None:
        raise PeerError(f"{dtype} does not travel; what does is {', '.join(ITEM_SIZES)}")
    return name


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor, as a numpy array that looks at them."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2:
        # Torch takes any stride of no or one element for contiguous, but does not view it as bytes (numpy's empty: 0).
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def to_wire(name: str, tensor: torch.Tensor) -> WireTensor:
    """Return a view of a contiguous CPU tensor's bytes. Raises PeerError for one that does not travel."""
    try:
        dtype = dtype_name(tensor.dtype)
    except PeerError as error:
        raise PeerError(f"tensor {name!r}: {error}") from error
    if tensor.dim() > MAX_DIMS:
        shape = list(tensor.shape)
        raise PeerError(f"tensor {name!r} is {shape}; what travels has up to {MAX_DIMS} dimensions: reshape it")
    return WireTensor(name, dtype, tuple(tensor.shape), memoryview(bytes_of(tensor.contiguous())))


def from_wire(tensor: WireTensor) -> torch.Tensor:
    """Return a tensor that looks at the message's bytes: valid as long as they are. Never write to it."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    # torch warns of memory that it may not write; bytes are such.
    data = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
