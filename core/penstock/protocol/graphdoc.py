"""The graph document: what a browser needs to draw a built SSA graph. Immutable, addressed by its hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NewType, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

GraphHash = NewType("GraphHash", str)
"""SHA-256, lower-case hex, of a graph document's canonical JSON."""
OpKind = Literal[
    "computation", "scale_loss_grad", "all_reduce", "reduce", "broadcast", "gather", "fetch", "feed", "rpc"
]
_ITEM_BYTES = {
    "complex128": 16, "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2,
}  # fmt: skip
RoleName = Literal["forward", "backward", "optimize", "lr_sched", "loss", "communication", "input"]


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Value(_Doc):
    """A variable that an operator reads or writes. `shape`: concrete sizes of this plan."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """Its size; a dtype that is not known counts as one byte an element."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


class Op(_Doc):
    """One operator handle. Its position in `GraphDocument.ops` is its index in OP_* frames."""

    name: str = Field(description="unique in the program, e.g. 'addmm_3'")
    type: str = Field(description="e.g. 'aten.addmm.default'")
    kind: OpKind
    role: RoleName
    replica: int = Field(description="-1: works for all replicas")
    module: str = Field(description="dotted path, e.g. 'tower.fc_0'; '' if none")
    source: str = Field(description="user's file:line; '' if none")
    inputs: list[Value]
    outputs: list[Value]
    bytes: int = Field(description="bytes of inputs and outputs together")
    flops: int = Field(0, description="multiply-adds times two, 0 if unknown")


class Sync(_Doc):
    """The gradient exchange of one parameter. Its position is the PARAM column of SYNC frames."""

    parameter: str
    gradient: str
    mode: Literal["all_reduce", "reduce"]
    owner: int = Field(description="replica that updates the parameter; -1: every replica")
    bytes: int = Field(description="bytes of one replica's gradient; 0 for sparse rows, which vary")
    sparse: bool
    ops: list[int] = Field(description="indices of the operator handles that exchange it")


class GraphDocument(_Doc):
    """A built graph for one feed shape."""

    version: Literal[1] = 1
    program: str
    mode: Literal["local", "all_reduce", "reduce"]
    num_replicas: int
    num_threads: int
    batch: list[int] = Field(description="rows of each replica")
    ops: list[Op]
    edges: list[tuple[int, int]] = Field(description="from, to: indices into ops; dependencies of any kind")
    syncs: list[Sync]


@dataclass(frozen=True, slots=True)
class Threads:
    """How a process runs its graphs: `workers` operators at once, each on up to `intra_op` threads.

    `matrix_gflops`: 10^9 floating-point operations a second that one thread multiplies in float32, 0 if unknown.

    Part of GRAPH_USED and not of the document, so that a graph has one hash on machines of different sizes.
    """

    workers: int
    intra_op: int
    matrix_gflops: float = 0.0

    def body(self) -> dict[str, float]:
        """Return the fields of a GRAPH_USED frame."""
        return {
            "workers": self.workers, "intra_op_threads": self.intra_op,
            **({"matrix_gflops": self.matrix_gflops} if self.matrix_gflops else {}),
        }  # fmt: skip

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Threads | None:
        """Read them from a frame's body; None if they are not there (an older process), or no numbers of threads."""
        workers, intra_op, rate = (body.get(name) for name in ("workers", "intra_op_threads", "matrix_gflops"))
        if not _is_count(workers) or not _is_count(intra_op):
            return None
        return cls(workers, intra_op, rate if isinstance(rate, float) and 0 < rate < math.inf else 0.0)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 16


def canonical(document: GraphDocument) -> bytes:
    """Return the canonical JSON of a document: sorted keys, no spaces."""
    return json.dumps(document.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


def graph_hash(document: GraphDocument) -> GraphHash:
    """Return the SHA-256 (hex) of the canonical JSON."""
    return GraphHash(hashlib.sha256(canonical(document)).hexdigest())
