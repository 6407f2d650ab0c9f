"""The browser's websocket: subscriptions in, snapshots and deltas out."""

from __future__ import annotations

from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from penstock.errors import PeerError
from penstock.protocol.frames import Kind
from penstock.protocol.states import TERMINAL_JOB
from penstock.protocol.stream import (
    FROM_BROWSER,
    ConditionsChanged,
    Credit,
    JobSnapshot,
    Points,
    SubscribeJob,
    SubscribeJobs,
    SubscribeServer,
    SubscriptionFailed,
    Unsubscribe,
)
from penstock.protocol.wire import parse
from penstock_server.auth.principal import by_project, scoped
from penstock_server.db import DatabaseAway
from penstock_server.guard import principal_of
from penstock_server.problems import NotFound
from penstock_server.routers.deps import runtime_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.runtime import Runtime
from penstock_server.schemas import api
from penstock_server.secrecy import Sight
from penstock_server.streams.browser import MAX_REPLAY_BYTES, Browser, SlowBrowser, replay
from penstock_server.streams.hub import SERVER, SHOWN, Subscription
from penstock_server.streams.queue import SLOW, LogWish
from penstock_server.streams.socket import close, converse, receive

router = guarded_router("/api/v1")

SNAPSHOT_POINTS = 2000


@router.websocket("/stream")
@scoped("read")
@by_project
async def stream(socket: WebSocket) -> None:
    """Serve one browser until it leaves or is too slow."""
    runtime = runtime_of(socket)
    await socket.accept()
    sight = Sight.of(principal_of(socket))
    browser = Browser(socket, runtime.settings, runtime.clock, hub=runtime.hub, logs=runtime.logs, sight=sight)
    runtime.meters.browsers.inc()
    try:
        with runtime.held.by(principal_of(socket).token_id) as void:
            await converse(socket, _read(socket, runtime, browser), _send(socket, runtime, browser), void)
    finally:
        browser.close()
        runtime.meters.browsers.dec()
        await close(socket, 1000, "")


async def _send(socket: WebSocket, runtime: Runtime, browser: Browser) -> None:
    try:
        await browser.run(runtime.meters)
    except* SlowBrowser:
        await close(socket, SLOW, "this browser is too slow; subscribe again to go on from storage")
    except* (WebSocketDisconnect, OSError):
        await close(socket, 1001, "the browser takes no messages")


async def _read(socket: WebSocket, runtime: Runtime, browser: Browser) -> None:
    while (text := await receive(socket)) is not None:
        if isinstance(text, bytes):
            raise PeerError("a browser sends text messages only")
        match message := parse(FROM_BROWSER, text):
            case SubscribeJobs() | SubscribeJob():
                await _follow(runtime, browser, message)
            case SubscribeServer():
                _follow_server(runtime, browser, message.id)
            case Unsubscribe():
                browser.unsubscribe(message.id)
            case Credit():
                continue


async def _follow(runtime: Runtime, browser: Browser, message: SubscribeJobs | SubscribeJob) -> None:
    """Begin a subscription. While the database cannot be read it ends again, and the connection stays."""
    try:
        if isinstance(message, SubscribeJob):
            await _follow_job(runtime, browser, message)
        else:
            await _follow_jobs(runtime, browser, message.id)
    except DatabaseAway as error:
        browser.unsubscribe(message.id)
        failed = SubscriptionFailed(type="unavailable", id=message.id, detail=str(error))
        browser.queue.put_state(f"unavailable:{message.id}", failed)


def _follow_server(runtime: Runtime, browser: Browser, number: int) -> None:
    subscription = browser.subscribe(number, None, frozenset({SERVER}), {})
    subscription.begin(ConditionsChanged(type="conditions", id=number, conditions=runtime.conditions.views()))


async def _follow_jobs(runtime: Runtime, browser: Browser, number: int) -> None:
    subscription = browser.subscribe(number, None, frozenset({"state"}), {})
    if browser.sight.projects is None:
        listed = await runtime.listing.read()
        subscription.begin(listed.message(number, browser.sight))
    else:
        snapshot, ids = await runtime.listing.read_of(number, browser.sight)
        subscription.shown |= ids
        subscription.begin(snapshot)


async def _follow_job(runtime: Runtime, browser: Browser, message: SubscribeJob) -> None:
    project = await runtime.jobs.project_of(message.job_id)  # raises NotFound before anything is subscribed
    if not browser.sight.sees(project):
        raise NotFound("job", message.job_id)
    # Points that are published from here on wait for the snapshot: no heartbeat waits for a page to be read.
    subscription = browser.subscribe(message.id, message.job_id, frozenset(message.parts), message.log_offsets)
    series = await runtime.series.read(message.job_id, None, SNAPSHOT_POINTS)
    job = await runtime.jobs.get(message.job_id)
    nodes = await runtime.nodes.page()
    snapshot: JobSnapshot = {
        "type": "snapshot",
        "id": message.id,
        "job": _shown(browser, job),
        "metrics": {name: Points(step=one.step, time_ns=one.time_ns, value=one.value) for name, one in series.items()},
        "graphs": await runtime.storage.current_graphs(message.job_id),
        "nodes": [node.model_dump(mode="json") for node in nodes],
    }
    subscription.begin(snapshot)
    subscription.begin_metrics(snapshot["metrics"])
    await _catch_up(runtime, subscription, over=job.state in TERMINAL_JOB)


def _shown(browser: Browser, job: api.Job) -> dict[str, Any]:
    return dict(browser.sight.of_view(job.model_dump(mode="json")))


async def _catch_up(runtime: Runtime, subscription: Subscription, *, over: bool) -> None:
    """Queue what happened before: the rest of the logs, and the newest frames (of a job that is over: its last)."""
    assert subscription.job_id is not None  # only jobs have a past
    replicas = await runtime.jobs.streams(subscription.job_id)
    frames: list[bytes] = []
    if over and {"ops", "sync"} & subscription.parts:
        frames = await runtime.recorder.last(subscription.job_id, _wanted(subscription), MAX_REPLAY_BYTES)
    # From here on nothing waits, so that no live frame overtakes an older one.
    replay(subscription, frames, {row.stream: row.id for row in replicas})
    if not over:
        runtime.hub.replay_recent(subscription)
    runtime.hub.make_ready(subscription)
    if "logs" in subscription.parts:
        for row in replicas:
            offset = subscription.log_offsets.get(row.id, 0)
            subscription.queue.put_log(LogWish(subscription.id, subscription.job_id, row.id, offset))


def _wanted(subscription: Subscription) -> frozenset[Kind]:
    sync = frozenset({Kind.SYNC, Kind.EXCHANGE})
    return (SHOWN - sync if "ops" in subscription.parts else frozenset()) | (
        sync if "sync" in subscription.parts else frozenset()
    )
