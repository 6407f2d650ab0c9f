"""Prometheus metrics of one server. Labels are few and bounded: never an identifier."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Instruments:
    """The metrics, in a registry of their own, so that two servers in one process do not share them."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_http_requests", "Answered requests", ["method", "route", "status"], registry=r
        )
        self.request_s = Histogram(
            "penstock_http_request_seconds", "Time to answer", ["route"], buckets=_LATENCY_S, registry=r
        )
        self.frames = Counter("penstock_frames", "Telemetry frames taken", ["kind"], registry=r)
        self.frame_bytes = Counter("penstock_frame_bytes", "Bytes of telemetry frames taken", registry=r)
        self.removed_recordings = Counter(
            "penstock_removed_recordings", "Recordings of ended jobs that were removed", ["reason"], registry=r
        )
        self.removed_bytes = Counter(
            "penstock_removed_recording_bytes", "Bytes of recordings that were removed", ["reason"], registry=r
        )
        self.lost = Counter("penstock_lost_frames", "Telemetry frames that never came", registry=r)
        self.refused = Counter("penstock_refused", "Messages and frames that were refused", ["reason"], registry=r)
        self.metric_points = Counter("penstock_metric_points", "Metric points written", registry=r)
        self.dropped = Counter(
            "penstock_browser_dropped_rows", "Operator events not sent to a slow browser", registry=r
        )
        self.slow_closed = Counter("penstock_browser_slow_closed", "Browsers closed for being slow", registry=r)
        self.stalls = Counter("penstock_event_loop_stalls", "Times that the event loop stood for a second", registry=r)
        self.browsers = Gauge("penstock_browsers", "Connected browsers", registry=r)
        self.agents = Gauge("penstock_agents", "Connected agents", registry=r)
        self.jobs = Gauge("penstock_jobs", "Jobs that have not ended", ["state"], registry=r)
        self.nodes = Gauge("penstock_nodes", "Nodes", ["state"], registry=r)
