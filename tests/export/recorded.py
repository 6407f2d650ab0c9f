"""A recorded job without a server: what `Recording` asks of a client, answered from frames in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from penstock.client import Client, Event, GraphUse, Job, Replica, Series
from penstock.export.recording import Recording
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Frame, Kind, encode
from penstock.protocol.graphdoc import GraphDocument, Op, graph_hash
from penstock.protocol.rest import MediaSeries

T0_NS = 1_790_000_000_000_000_001
CREATED = "2026-09-21T14:13:20.000000Z"


def graph(*names: str, program: str = "main") -> GraphDocument:
    """A graph of operators; 'allreduce…' exchanges, all others compute."""
    ops = [
        Op(
            name=name, type="aten.relu.default", kind="all_reduce" if name.startswith("allreduce") else "computation",
            role="backward", replica=-1 if name.startswith("allreduce") else 0, module="tower.fc", source=f"a.py:{i}",
            inputs=[], outputs=[], bytes=1000 * i,
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    return GraphDocument(
        program=program, mode="local", num_replicas=1, num_threads=2, batch=[4], ops=ops, edges=[], syncs=[]
    )


def events(step: int, rows: Sequence[tuple[int, int, int, int]], *, t0_ns: int = T0_NS, whole: bool = True) -> Frame:
    """An OP_EVENTS frame of rows (start, duration, operator, thread)."""
    names = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)
    columns = dict(zip(names, np.array(rows, np.int64).T, strict=True))
    return Frame(
        Kind.OP_EVENTS, 0, 1, 0, t0_ns=t0_ns, step=step, flags=FLAG_WHOLE_STEP if whole else 0, columns=columns
    )


def sums(rows: Sequence[tuple[int, int, int, int]]) -> Frame:
    """An OP_SUMS frame of rows (operator, count, total, maximum)."""
    names = (Column.OP, Column.COUNT, Column.TOTAL_NS, Column.MAX_NS)
    return Frame(Kind.OP_SUMS, 0, 1, 0, columns=dict(zip(names, np.array(rows, np.int64).T, strict=True)))


def used(document: GraphDocument) -> Frame:
    """A GRAPH_USED frame."""
    return Frame(Kind.GRAPH_USED, 0, 1, 0, body={"hash": graph_hash(document)})


class RecordedJob:
    """A job whose processes have sent frames. Pages hold one frame each."""

    def __init__(self, **processes: Sequence[Frame]) -> None:
        """`processes`: frames by role and index, as 'trainer_0'; headers are completed here."""
        self.documents: dict[str, GraphDocument] = {}
        self.uses: list[GraphUse] = []
        self.metrics_of: dict[str, Series] = {}
        self.events_of: list[Event] = []
        self.media_of: dict[str, list[tuple[int, dict[str, Any]]]] = {}  # step and content, by name
        self.replicas_of: list[Replica] = []
        self.sent: dict[int, list[bytes]] = {}
        for stream, (name, frames) in enumerate(processes.items(), start=11):
            role, _, index = name.partition("_")
            self.replicas_of.append(
                cast(
                    Replica,
                    {
                        "id": f"replica-{name}", "stream": stream, "role": role, "index": int(index), "attempt": 1,
                        "host": "host-a", "pid": 100 + stream, "started_at": CREATED,
                        "endpoint": f"10.0.0.1:{6170 + int(index)}" if role == "pserver" else None,
                    },
                )
            )  # fmt: skip
            self.sent[stream] = [self._encoded(frame, stream, seq) for seq, frame in enumerate(frames)]

    @staticmethod
    def _encoded(frame: Frame, stream: int, seq: int) -> bytes:
        return encode(
            Frame(
                frame.kind, stream, 1, seq, t0_ns=frame.t0_ns, step=frame.step, flags=frame.flags,
                columns=frame.columns, body=frame.body,
            )
        )  # fmt: skip

    def knows(self, *documents: GraphDocument) -> RecordedJob:
        """Add graph documents."""
        self.documents.update({graph_hash(one): one for one in documents})
        return self

    def recording(self) -> Recording:
        """The recording of the job."""
        job = {"id": "job-1", "name": "ctr", "created_at": CREATED, "attempt": 1, "state": "SUCCEEDED", "spec": {}}
        return Recording(cast(Client, self), cast(Job, job))

    # What `Client` has

    def replicas(self, _: str) -> list[Replica]:
        return self.replicas_of

    def graphs(self, _: str) -> list[GraphUse]:
        return self.uses

    def graph(self, wanted: str) -> dict[str, Any]:
        return self.documents[wanted].model_dump(mode="json")

    def events(self, _: str) -> Iterator[Event]:
        return iter(self.events_of)

    def metrics(self, _: str, *, max_points: int) -> dict[str, Series]:
        assert max_points > 0
        return self.metrics_of

    def media(self, _: str) -> list[MediaSeries]:
        return [
            {
                "name": name, "type": "table", "removed": 0,
                "items": [
                    {"id": f"{name} {step}", "attempt": 1, "step": step, "time_ns": T0_NS + step, "size_bytes": 1}
                    for step, _ in logged
                ],
            }
            for name, logged in self.media_of.items()
        ]  # fmt: skip

    def media_content(self, _: str, wanted: str) -> dict[str, Any]:
        name, _, step = wanted.rpartition(" ")
        return dict(self.media_of[name])[int(step)]

    def frames(self, _: str, *, stream: int, kinds: Sequence[int], after_seq: int | None, limit_bytes: int) -> bytes:
        assert limit_bytes > 0
        for data in self.sent[stream][0 if after_seq is None else after_seq + 1 :]:
            if data[3] in kinds:
                return struct.pack("<I", len(data)) + data
        return b""
