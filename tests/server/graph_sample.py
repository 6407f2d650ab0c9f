"""A graph document small enough to read."""

from __future__ import annotations

from penstock.protocol.graphdoc import GraphDocument, Op, Value


def sample_graph(program: str = "main") -> GraphDocument:
    """Return a document of one operator."""
    value = Value(name="x", dtype="float32", shape=[4, 1])
    op = Op(
        name="relu_0", type="aten.relu.default", kind="computation", role="forward", replica=0, module="",
        source="train.py:3", inputs=[value], outputs=[value], bytes=32, flops=0,
    )  # fmt: skip
    return GraphDocument(
        program=program, mode="local", num_replicas=1, num_threads=1, batch=[4], ops=[op], edges=[], syncs=[]
    )
