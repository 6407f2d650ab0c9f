"""Everything that a running server has, put together once. Opened before the first request, closed after the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from penstock.errors import Unavailable
from penstock.protocol.states import TERMINAL_JOB
from penstock_server.auth.rates import Rates, of_tokens
from penstock_server.auth.tokens import Held, Tokens
from penstock_server.auth.wrong import WrongSecrets
from penstock_server.clock import Clock, SystemClock
from penstock_server.db import Database, Effects, upgrade
from penstock_server.instruments import Instruments
from penstock_server.pipelines import LeaseWatch, Loop, Pipeline, Publisher
from penstock_server.services.advice import Advices
from penstock_server.services.attach import Attach
from penstock_server.services.audit import Audit
from penstock_server.services.changes import Changes
from penstock_server.services.completeness import Completeness
from penstock_server.services.conditions import Conditions
from penstock_server.services.deliveries import Deliveries
from penstock_server.services.diagnosis import Diagnoses
from penstock_server.services.drains import Drains
from penstock_server.services.exchange import Exchanges
from penstock_server.services.hangs import Hangs
from penstock_server.services.jobs import Jobs
from penstock_server.services.leases import Leases
from penstock_server.services.listing import Listing
from penstock_server.services.media import Media
from penstock_server.services.nodes import Nodes
from penstock_server.services.pilots import PilotBoard
from penstock_server.services.plans import Plans
from penstock_server.services.projects import Projects
from penstock_server.services.recordings import Recordings
from penstock_server.services.reports import Reports
from penstock_server.services.retention import Retention, Sweeper
from penstock_server.services.scheduling import Scheduling
from penstock_server.services.series import Metrics
from penstock_server.services.stacks import Stacks
from penstock_server.services.storage import JobStorage
from penstock_server.services.telemetry import Telemetry
from penstock_server.services.webhooks import Webhooks
from penstock_server.settings import Settings
from penstock_server.statedir import locked
from penstock_server.streams.agents import Agents
from penstock_server.streams.counts import Counts
from penstock_server.streams.hub import Hub
from penstock_server.streams.ingest import Ingest
from penstock_server.streams.live import Live
from penstock_server.streams.logstore import LogStore
from penstock_server.streams.metricswriter import MetricsWriter
from penstock_server.streams.recorder import Recorder
from penstock_server.streams.traces import Collector, Traces
from penstock_server.succession import go_on
from penstock_server.webhooksender import Sender

SCHEDULE_EVERY_S = 5.0
PUBLISH_EVERY_S = 60.0
KEEP_EVERY_S = 1.0
CHECKPOINT_EVERY_S = 2.0
SWEEP_EVERY_S = 600.0
SCHEDULE_REST_S = 0.1
REFUSED_EVERY_S = 60.0
REFUSED_REST_S = 10.0
"""Refused requests of one peer are at most one row in so long."""
PUBLISH_REST_S = 0.01
LIST_REST_S = 0.25
"""What changes in the list of jobs goes to browsers at most so often: each of them gets every change."""
TRACE_REST_S = 0.25
FIGURES_REST_S = 1.0
"""Figures and nodes go to browsers at most so often: each change sends a job, or all nodes, to every one of them."""


@dataclass(slots=True)
class Runtime:
    """The parts of one server, for routers."""

    settings: Settings
    clock: Clock
    database: Database
    meters: Instruments
    tokens: Tokens
    wrong: WrongSecrets
    rates: Rates
    held: Held
    jobs: Jobs
    changes: Changes
    log_changes: Changes
    nodes: Nodes
    listing: Listing
    pilots: PilotBoard
    reports: Reports
    attach: Attach
    storage: JobStorage
    series: Metrics
    media: Media
    sweeper: Sweeper
    agents: Agents
    hub: Hub
    ingest: Ingest
    logs: LogStore
    recorder: Recorder
    completeness: Completeness
    exchanges: Exchanges
    diagnoses: Diagnoses
    advices: Advices
    metrics: MetricsWriter
    leases: LeaseWatch
    publisher: Publisher
    scheduling: Scheduling
    plans: Plans
    projects: Projects
    audit: Audit
    hangs: Hangs
    drains: Drains
    stacks: Stacks
    recordings: Recordings
    webhooks: Webhooks
    deliveries: Deliveries
    traces: Traces
    conditions: Conditions
    loops: list[Pipeline]

    async def log_offsets(self, node_id: str) -> dict[str, int]:
        """Return how much of each log is stored, for the replicas on a node that may still send some."""
        rows = await self.reports.recent_on(node_id)
        return {replica_id: self.logs.size(job_id, replica_id) for replica_id, job_id in rows}


@asynccontextmanager
async def open_runtime(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Runtime]:
    """Lock the state folder, migrate, start the pipelines; undo all of it at the end.

    Raises Unavailable if another server holds the folder.
    """
    with locked(settings.state_dir):
        database = Database(settings.url)
        try:
            async with database.alone():
                await upgrade(database)
                await database.begin_term()
                await go_on(database)
                runtime = build(settings, clock or SystemClock(), database)
                await runtime.tokens.ensure_admin()
                async with _running(runtime):
                    yield runtime
                await runtime.metrics.settled()
                await runtime.reports.settled()
        finally:
            await database.close()


@asynccontextmanager
async def _running(runtime: Runtime) -> AsyncIterator[None]:
    # No task group: it would wrap what the caller's block raises, and a loop raises nothing by itself.
    tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in runtime.loops]
    try:
        yield
    finally:
        runtime.scheduling.stop()
        for loop in runtime.loops:
            loop.stop()
        await asyncio.wait(tasks)
        with suppress(Unavailable):  # without its database nothing more can be stored
            await runtime.audit.step()
            await runtime.tokens.step()
            await runtime.traces.step()
        await asyncio.to_thread(runtime.traces.close)
        runtime.recorder.close()


def build(settings: Settings, clock: Clock, database: Database) -> Runtime:
    """Return the parts of a server on a migrated database. Its loops do not run yet."""
    jobs_dir = settings.state_dir / "jobs"
    meters, hub, live, agents = Instruments(), Hub(), Live(), Agents()
    logs = LogStore(jobs_dir, clock, quota_bytes=settings.log_quota_bytes)
    recorder = Recorder(jobs_dir, segment_bytes=settings.segment_bytes, quota_bytes=settings.segment_quota_bytes)
    tokens = Tokens(database, clock, settings.state_dir)
    grace_s = settings.grace_s
    changes, log_changes = Changes(), Changes()
    scheduling = Scheduling(database, clock, agents)
    jobs = Jobs(database, clock, live, logs.tail, changes, scheduling, grace_s=grace_s)
    nodes = Nodes(database, clock, tokens, agents)
    reports = Reports(
        database, clock, nodes, logs.tail, grace_s=grace_s, stop_patience_s=settings.stop_patience_s,
        pserver_grace_s=settings.pserver_grace_s,
    )  # fmt: skip
    attach = Attach(database, clock, Leases(settings.lease_ttl_s, grace_s), logs.tail, grace_s=grace_s)
    metrics = MetricsWriter(database, hub, live, meters)
    hangs = Hangs(database, clock, logs.tail, grace_s=grace_s)
    media = Media(database, hub.publish_media)
    telemetry = Telemetry(database, clock, live=live, metrics=metrics, hub=hub, hangs=hangs, media=media)
    counts = Counts(database, clock, recorder, metrics)
    ingest = Ingest(
        telemetry.find, telemetry.on_frame, metrics.lose, hub=hub, recorder=recorder, logs=logs, meters=meters,
        counts=counts, on_log=lambda job_id: log_changes.note([job_id]),
    )  # fmt: skip
    leases = LeaseWatch(database, clock, Leases(settings.lease_ttl_s, grace_s), reports, nodes, agents)
    publisher = Publisher(database, clock, hub, live, agents, released=lambda: reports.released)
    storage = JobStorage(database, clock, settings.state_dir / "snapshots")
    exchanges = Exchanges(jobs, recorder)
    diagnoses = Diagnoses(database, jobs, storage, exchanges, recorder, agents, silent_s=telemetry.silent_s)
    advices = Advices(jobs, storage, recorder, diagnoses)
    webhooks = Webhooks(database, clock, settings.webhook_allow)
    runtime = Runtime(
        settings, clock, database, meters, tokens, WrongSecrets(), of_tokens(settings.requests_per_s),
        Held(database, clock), jobs, changes, log_changes, nodes,
        Listing(jobs, nodes), PilotBoard(clock), reports, attach, storage, Metrics(database), media,
        _sweeper(settings, clock, database, recorder, counts, meters),
        agents, hub, ingest, logs, recorder,
        Completeness(jobs, recorder, counts), exchanges, diagnoses, advices, metrics, leases, publisher, scheduling,
        Plans(database, scheduling, agents), Projects(database), Audit(database), hangs,
        Drains(database, clock, agents, logs.tail),
        Stacks(database, clock, jobs, agents), Recordings(database, clock, jobs, agents),
        webhooks, Deliveries(database, clock, webhooks, Sender(settings.webhook_allow)),
        Traces(database, clock, Collector(settings.otlp_endpoint) if settings.otlp_endpoint else None),
        Conditions(database, clock, settings.state_dir, hub.publish_conditions), [],
    )  # fmt: skip
    _wire(runtime, live)
    return runtime


def _sweeper(
    settings: Settings, clock: Clock, database: Database, recorder: Recorder, counts: Counts, meters: Instruments
) -> Sweeper:
    days = Retention(
        telemetry_days=settings.retain_telemetry_days,
        telemetry_bytes=settings.telemetry_quota_bytes,
        logs_days=settings.retain_logs_days,
        metrics_days=settings.retain_metrics_days,
        events_days=settings.retain_events_days,
        snapshots_days=settings.retain_snapshots_days,
        audit_days=settings.retain_audit_days,
    )
    return Sweeper(database, clock, recorder, counts, settings.state_dir, days, meters)


def _wake_requests(runtime: Runtime, effects: Effects) -> None:
    runtime.changes.note(effects.jobs)
    runtime.log_changes.note(effects.jobs)


def _forget_ended(runtime: Runtime, effects: Effects) -> None:
    for event in effects.events:
        if event.kind == "job" and event.to_state in TERMINAL_JOB:
            runtime.hub.drop(event.subject)
            runtime.ingest.forget_streams(event.subject)
            runtime.recorder.release(event.subject)
            runtime.hangs.forget(event.subject)


def _wire(runtime: Runtime, live: Live) -> None:
    """Connect commits to the pipelines that follow from them."""
    publisher = Loop("publisher", runtime.publisher.step, every_s=PUBLISH_EVERY_S, rest_s=PUBLISH_REST_S)
    figures = Loop("figures", runtime.publisher.step_figures, every_s=PUBLISH_EVERY_S, rest_s=FIGURES_REST_S)
    listed = Loop("list", runtime.publisher.step_list, every_s=PUBLISH_EVERY_S, rest_s=LIST_REST_S)
    traces = Loop("traces", runtime.traces.step, every_s=PUBLISH_EVERY_S, rest_s=TRACE_REST_S)
    scheduler = Loop("scheduler", runtime.scheduling.run, every_s=SCHEDULE_EVERY_S, rest_s=SCHEDULE_REST_S)

    def on_stored(job_ids: set[str]) -> None:
        runtime.publisher.mark_jobs(job_ids)
        figures.wake()

    async def watch() -> None:
        await runtime.leases.step()
        await runtime.attach.step()
        await runtime.held.step()
        await runtime.tokens.step()
        await runtime.hangs.step(runtime.diagnoses.unfinished)
        await runtime.drains.step()
        if runtime.publisher.look_at_clock():
            publisher.wake()
        if runtime.scheduling.look_at_clock():
            runtime.scheduling.wake()

    def on_commit(effects: Effects) -> None:
        _forget_ended(runtime, effects)
        runtime.ingest.forget_jobs(effects.jobs)
        _wake_requests(runtime, effects)
        runtime.publisher.mark(effects)
        publisher.wake()
        if effects.jobs:
            listed.wake()
        if effects.nodes:
            figures.wake()
        if effects.schedule:
            runtime.scheduling.wake()
        runtime.deliveries.mark(effects.webhooks)
        if runtime.traces.mark(effects):
            traces.wake()

    runtime.database.outbox = runtime.webhooks.record
    refused = Loop("refused", runtime.audit.step, every_s=REFUSED_EVERY_S, rest_s=REFUSED_REST_S)
    runtime.audit.on_refused = refused.wake
    runtime.database.on_commit = on_commit
    runtime.scheduling.on_wake = scheduler.wake
    runtime.metrics.on_stored = on_stored
    runtime.publisher.on_nodes = figures.wake
    runtime.loops = [
        publisher,
        listed,
        figures,
        scheduler,
        refused,
        traces,
        Loop("leases", watch, every_s=runtime.settings.tick_s),
        runtime.deliveries,
        *_by_clock(runtime),
    ]


def _by_clock(runtime: Runtime) -> list[Loop]:
    """Return the loops that nothing wakes."""
    return [
        Loop("metrics", runtime.metrics.flush, every_s=runtime.settings.metrics_flush_s),
        Loop("conditions", runtime.conditions.step, every_s=runtime.settings.tick_s),
        Loop("retention", runtime.sweeper.step, every_s=SWEEP_EVERY_S),
        Loop("ownership", runtime.database.keep, every_s=KEEP_EVERY_S),
        Loop("checkpoint", runtime.database.checkpoint, every_s=CHECKPOINT_EVERY_S),
    ]
