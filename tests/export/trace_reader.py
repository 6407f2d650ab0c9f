"""A reader of Perfetto traces by Perfetto's own messages: tracks, slices, counters and instants, as its tools see them.

Begins and ends of a track are paired as a stack in the order of time, those of one time in the order of the file.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice. `track`: names of its track and of what the track belongs to, outermost first."""

    name: str
    category: str
    track: tuple[str, ...]
    start_ns: int
    duration_ns: int
    args: dict[str, Any]
    depth: int


@dataclass(slots=True)
class Trace:
    """What a file holds. `counters`: (time, value) by track."""

    processes: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    threads: dict[int, tuple[int, str]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[tuple[str, ...], str, int, dict[str, Any]]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


def read(path: Path) -> Trace:
    """Read a file, whole. Fails on what Perfetto would count as an error: an end without a begin, an unknown name."""
    content = path.read_bytes()
    file = messages.Trace.FromString(gzip.decompress(content) if path.suffix == ".gz" else content)
    return _Reader().read(file)


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self.names: dict[str, dict[int, str]] = defaultdict(dict)
        self.tracks: dict[int, Any] = {}
        self.events: list[tuple[int, Any]] = []

    def read(self, file: Any) -> Trace:
        assert file.packet[0].sequence_flags == messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for packet in file.packet:
            if packet.HasField("track_descriptor"):
                self._track(packet.track_descriptor)
            for name, known in packet.interned_data.ListFields():
                texts = {one.iid: one.str.decode() if hasattr(one, "str") else one.name for one in known}
                assert not texts.keys() & self.names[name.name].keys()
                self.names[name.name].update(texts)
            if packet.HasField("track_event"):
                self.events.append((packet.timestamp, self._resolved(packet.track_event)))
        self._pair()
        return self.trace

    def _track(self, given: Any) -> None:
        assert given.uuid not in self.tracks
        assert not given.parent_uuid or given.parent_uuid in self.tracks
        self.tracks[given.uuid] = given
        if given.HasField("process"):
            assert given.process.pid not in self.trace.processes
            self.trace.processes[given.process.pid] = given.process.process_name, list(given.process.process_labels)
        if given.HasField("thread"):
            assert given.thread.tid not in self.trace.threads
            self.trace.threads[given.thread.tid] = given.thread.pid, given.thread.thread_name

    def _path(self, uuid: int) -> tuple[str, ...]:
        given = self.tracks[uuid]
        name = given.name or given.thread.thread_name or given.process.process_name
        return (*(self._path(given.parent_uuid) if given.parent_uuid else ()), name)

    def _resolved(self, event: Any) -> tuple[Any, str, str, dict[str, Any]]:
        names = self.names
        args: dict[str, Any] = {}
        for one in event.debug_annotations:
            value = one.uint_value if one.HasField("uint_value") else None
            text = names["debug_annotation_string_values"][one.string_value_iid] if value is None else value
            args[names["debug_annotation_names"][one.name_iid]] = text
        name = names["event_names"][event.name_iid] if event.name_iid else event.name
        category = names["event_categories"][event.category_iids[0]] if event.category_iids else ""
        return event, name, category, args

    def _pair(self) -> None:
        open_slices: dict[int, list[tuple[int, str, str, dict[str, Any]]]] = defaultdict(list)
        for at, (event, name, category, args) in sorted(self.events, key=lambda one: one[0]):
            path, stack = self._path(event.track_uuid), open_slices[event.track_uuid]
            match event.type:
                case messages.TrackEvent.TYPE_SLICE_BEGIN:
                    stack.append((at, name, category, args))
                case messages.TrackEvent.TYPE_SLICE_END:
                    began, name, category, args = stack.pop()
                    self.trace.slices.append(Slice(name, category, path, began, at - began, args, len(stack)))
                case messages.TrackEvent.TYPE_INSTANT:
                    self.trace.instants.append((path, name, at, args))
                case messages.TrackEvent.TYPE_COUNTER:
                    self.trace.counters.setdefault(path[-1], []).append((at, event.double_counter_value))
        assert not any(open_slices.values())
