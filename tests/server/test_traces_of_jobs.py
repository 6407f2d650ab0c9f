"""Traces of jobs: what a real collector's port receives, and that spans follow from events alone."""

from __future__ import annotations

import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.server.harness import running, settings_for
from tests.support.waiting import until_answer

from penstock.errors import Unavailable
from penstock.protocol.states import JOB_TRANSITIONS, TERMINAL_JOB, JobState
from penstock_server.streams.spans import Seen, Span, Subject, parsed, root_of, spans_of
from penstock_server.streams.traces import CLOSE_S, Collector
from penstock_server.tables import EventRow
from penstock_server.uuid7 import uuid7

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class FakeCollector:
    """Takes traces over HTTP, as a collector of OpenTelemetry does."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    service: set[str] = field(default_factory=set)

    async def named(self, *names: str) -> dict[str, Any]:
        """Wait for spans of these names; return the spans by name."""

        async def found() -> dict[str, Any]:
            return {span.name: span for span in list(self.spans)}

        return await until_answer(found, lambda spans: set(names) <= set(spans))


@contextmanager
def collector() -> Iterator[FakeCollector]:
    made = FakeCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                made.service |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                for scope in resource.scope_spans:
                    made.spans.extend(scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.asyncio
async def test_a_job_is_one_trace(tmp_path: Path) -> None:
    with collector() as collected:
        async with running(settings_for(tmp_path, otlp_endpoint=collected.url)) as server:
            node = await server.join()
            spec = {"spec": {"name": "job", "entrypoint": ["true"]}}
            job = (await server.http.post("/api/v1/jobs", json=spec, headers={"traceparent": CALLER})).json()
            async with server.agent(node) as agent:
                (replica,) = await agent.desired(1)
                await agent.start(replica)
                await server.job_in(job["id"], "RUNNING")
                await collected.named("QUEUED", "STARTING", "trainer-0 ASSIGNED", "trainer-0 PREPARING")
                await agent.report(replica, "EXITED", exit_code=0)
                ended = await server.job_in(job["id"], "SUCCEEDED")
                spans = await collected.named("job job", "POST /api/v1/jobs", "RUNNING", "trainer-0 RUNNING")
    root, of_trace = spans["job job"], UUID(job["id"]).bytes
    assert collected.service == {"penstock-server"}
    assert {span.trace_id for name, span in spans.items() if name != "POST /api/v1/jobs"} == {of_trace}
    assert {span.parent_span_id for span in spans.values()} == {b"", root.span_id, bytes.fromhex("b7ad6b7169203331")}
    assert attributes(root)["penstock.state"] == "SUCCEEDED"
    seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    times = [datetime.fromisoformat(ended[key]) for key in ("created_at", "finished_at")]
    assert seconds == pytest.approx((times[1] - times[0]).total_seconds(), abs=1e-3)
    assert attributes(spans["trainer-0 RUNNING"])["penstock.node"] == "n1"
    submitted = spans["POST /api/v1/jobs"]
    assert submitted.trace_id.hex() == CALLER.split("-")[1]
    assert [(link.trace_id, link.span_id) for link in submitted.links] == [(of_trace, root.span_id)]
    names = [span.name for span in collected.spans]
    assert len(names) == len(set(names)), "each span is sent once"


@pytest.mark.asyncio
async def test_a_trace_goes_on_over_a_restart_of_the_server(tmp_path: Path) -> None:
    with collector() as collected:
        settings = settings_for(tmp_path, otlp_endpoint=collected.url)
        async with running(settings) as server:
            job = await server.submit()
            await collected.named("CREATED", "POST /api/v1/jobs")
        async with running(settings) as server:
            await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
            spans = await collected.named("job job", "QUEUED")
    assert spans["QUEUED"].start_time_unix_nano == spans["CREATED"].end_time_unix_nano
    assert spans["job job"].start_time_unix_nano == spans["CREATED"].start_time_unix_nano
    assert len({span.span_id for span in collected.spans if span.name == "CREATED"}) == 1


@pytest.mark.asyncio
async def test_an_unreachable_collector_holds_up_nothing(tmp_path: Path) -> None:
    """One that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with running(settings_for(tmp_path, otlp_endpoint=url)) as server:
            for _ in range(3):
                job = await server.submit()
                await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
                assert (await server.job_in(job["id"], "CANCELLED"))["state"] == "CANCELLED"
            stopping = time.monotonic()
        assert time.monotonic() - stopping < CLOSE_S + 8.0  # OpenTelemetry's own end takes 30 s
    for thread in threading.enumerate():
        if thread.name.startswith(("OtelBatch", "traces-close")):
            thread.join()  # it still tries, and draws its pauses from the generator that Hypothesis watches


def test_without_opentelemetry_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Unavailable, match=r"pip install 'penstock\[otel\]'"):
        Collector("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (CALLER, True),
        (CALLER[:-1] + "0", False),
        (CALLER + "-more", True),
        ("", False),
        (None, False),
        (CALLER.replace("00-", "ff-", 1), False),
        (CALLER.replace("b7ad6b7169203331", "0" * 16), False),
        (CALLER.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), False),
        (CALLER.replace("b7ad", "xyz-"), False),
    ],
)
def test_callers_that_are_sampled(text: str | None, sampled: bool) -> None:
    assert (parsed(text) is not None) == sampled


@st.composite
def lives(draw: st.DrawFn) -> list[EventRow]:
    """Events of one job, from its creation to its end."""
    job_id, state, at = uuid7(), JobState.CREATED, datetime(2026, 1, 1, tzinfo=UTC)
    events = [EventRow(id=uuid7(), at=at, kind="job", subject=job_id, to_state=state, reason="", detail="")]
    while state not in TERMINAL_JOB and len(events) < 40:
        after = draw(st.sampled_from(sorted(JOB_TRANSITIONS[state])) if draw(st.booleans()) else st.just(state))
        at += timedelta(seconds=draw(st.integers(0, 100)))
        change = {"from_state": state, "to_state": after, "reason": "r", "detail": ""}
        events.append(EventRow(id=uuid7(), at=at, kind="job", subject=job_id, **change))
        state = after
    return events


@given(lives(), st.integers(1, 40))
def test_states_fill_the_time_of_a_job(events: list[EventRow], size: int) -> None:
    job_id = events[0].subject
    subjects, seen = {job_id: Subject("", {})}, Seen()
    found: list[Span] = []
    for begin in range(0, len(events), size):
        found += spans_of(job_id, "n", events[begin : begin + size], subjects, seen)
    assert found == list(spans_of(job_id, "n", events, subjects, Seen()))
    states = [span for span in found if span.parent is not None]
    changes = [event for event in events if event.from_state != event.to_state]
    assert [(s.start, s.end) for s in states] == [(a.at, b.at) for a, b in pairwise(changes)]
    assert {span.parent for span in states} <= {root_of(job_id)}
    roots = [span for span in found if span.parent is None]
    assert len(roots) == (events[-1].to_state in TERMINAL_JOB)
    assert all((r.start, r.end) == (events[0].at, changes[-1].at) for r in roots)
    assert len({span.id for span in found}) == len(found)
