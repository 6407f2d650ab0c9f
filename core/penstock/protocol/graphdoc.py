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


class Forms(_Doc):
    """What operators were besides their names: a column each, stored as `protocol.runs`.

    `type`, `kind`, `role`, `module` and `source` are indices into `Passes.texts`. A module that ends in a number is its
    text before it and `module_number`, else -1: "embedding_7" is "embedding_" and 7.
    """

    type: list[int]
    kind: list[int]
    role: list[int]
    module: list[int]
    module_number: list[int]
    source: list[int]


class Removed(Forms):
    """Operators that passes removed: a row for each, on `count` replicas from `first` on (-1: works for all of them).

    Their ids are consecutive. `name` and `name_number` as module and its number.
    """

    name: list[int]
    name_number: list[int]
    first: list[int]
    count: list[int]


class Pass(_Doc):
    """What one graph pass changed. Ids: below `len(ops)` those of `ops`, from there on those of `Passes.removed`."""

    name: str = Field(description="function, e.g. 'fuse_lookups'")
    title: str
    removed: int = Field(description="operators that it removed: that many ids, after those of the passes before")
    added: list[int] = Field(description="ids, as runs")
    changed: list[int] = Field(description="ids of operators that it replaced under their names, as runs")
    edges_removed: list[int] = Field(description="pairs of ids, as runs of rows")
    edges_added: list[int] = Field(description="pairs of ids, as runs of rows")


class Passes(_Doc):
    """How passes made the graph: enough to derive it as it was before and after each (`protocol.graphstages`)."""

    ran: list[Pass] = Field(description="passes that changed the graph, in order")
    unchanged: list[str] = Field(description="titles of passes that ran and changed nothing")
    texts: list[str]
    removed: Removed
    was: Forms = Field(description="the changed operators of all passes, each as it was before its pass")


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
    passes: Passes | None = Field(None, description="null: not recorded")


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
    """Return the canonical JSON of a document: sorted keys, no spaces.

    Without `passes` if there are none, so that the hash of a document is what it was before there were any.
    """
    plain = document.model_dump(mode="json", exclude={"passes"} if document.passes is None else None)
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def graph_hash(document: GraphDocument) -> GraphHash:
    """Return the SHA-256 (hex) of the canonical JSON."""
    return GraphHash(hashlib.sha256(canonical(document)).hexdigest())
