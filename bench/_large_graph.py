"""A training graph of any size and no repetition, as a browser has to draw it: blocks with names of their own."""

from __future__ import annotations

from penstock.protocol.graphdoc import GraphDocument, Op, OpKind, RoleName, Value

OPS_OF_A_BLOCK = 16
_TYPES = ("aten.addmm.default", "aten.native_layer_norm.default", "aten.bmm.default", "aten.relu.default")


def _letters(number: int) -> str:
    """0, 1, 2 … as aa, ab, ac …: names that differ by more than a number are not folded."""
    return chr(97 + number // 26 % 26) + chr(97 + number % 26)


def large_graph(num_ops: int) -> GraphDocument:
    """Return a document of `num_ops` operators: blocks forward, the same blocks backward, and an update for each."""
    num_blocks = max(1, num_ops // (OPS_OF_A_BLOCK * 5 // 2))
    ops: list[Op] = []
    edges: list[tuple[int, int]] = []

    def add(name: str, role: RoleName, module: str, reads: list[int], kind: OpKind = "computation") -> int:
        index = len(ops)
        value = Value(name=f"{name}.out", dtype="float32", shape=[512, 1024])
        inputs = [ops[read].outputs[0] for read in reads]
        ops.append(
            Op(name=name, type=_TYPES[index % len(_TYPES)], kind=kind, role=role, replica=0, module=module,
               source=f"train.py:{40 + index % 90}", inputs=inputs, outputs=[value],
               bytes=2_097_152 * (1 + len(inputs)), flops=0)
        )  # fmt: skip
        edges.extend((read, index) for read in reads)
        return index

    last = add("feed", "input", "", [], "feed")
    made: list[list[int]] = []
    for block in range(num_blocks):
        module = f"{_letters(block // 12)}_tower.{_letters(block)}_block"
        first, row = last, []
        for i in range(OPS_OF_A_BLOCK):
            reads = [last] if i % 5 else sorted({last, first})
            last = add(f"{_letters(block)}_{i}", "forward", module, reads)
            row.append(last)
        made.append(row)
    for block in reversed(range(num_blocks)):
        module = f"{_letters(block // 12)}_tower.{_letters(block)}_block"
        for i in reversed(range(OPS_OF_A_BLOCK)):
            last = add(f"{_letters(block)}_{i}_grad", "backward", module, sorted({last, made[block][i]}))
        for i in range(OPS_OF_A_BLOCK // 2):
            add(f"{_letters(block)}_{i}_adam", "optimize", module, [last])
    while len(ops) < num_ops:
        add(f"norm_{len(ops)}", "optimize", "clip", [last])
    return GraphDocument(
        program="large", mode="local", num_replicas=1, num_threads=2, batch=[512], ops=ops[:num_ops],
        edges=[(a, b) for a, b in edges if b < num_ops], syncs=[],
    )  # fmt: skip
