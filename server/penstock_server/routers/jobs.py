"""Jobs: submit, look at, cancel; their events, logs, metrics, graphs and frames."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header, Query, Request, Response

from penstock.identity import Role
from penstock.protocol.frames import Kind
from penstock.protocol.media import MediaContent
from penstock.protocol.recording import MAX_S
from penstock.protocol.states import TERMINAL_REPLICA, JobState, ReplicaState
from penstock_server.auth.principal import READ, by_project, scoped
from penstock_server.description import problems
from penstock_server.guard import require_project
from penstock_server.problems import NotFound, Problem
from penstock_server.routers.compression import compressed
from penstock_server.routers.deps import (
    TAGGED,
    Asker,
    Id,
    IfMatch,
    PageSize,
    PageToken,
    PlacedToken,
    Server,
    version_of,
)
from penstock_server.routers.guarded import guarded_router
from penstock_server.schemas import api
from penstock_server.schemas.completeness import TelemetryCompleteness
from penstock_server.schemas.jobcounts import JobCounts
from penstock_server.schemas.media import MediaSeries
from penstock_server.schemas.operators import OperatorTimes
from penstock_server.schemas.recordings import FullRecording
from penstock_server.schemas.stacks import PythonStacks
from penstock_server.schemas.tables import SparseTables
from penstock_server.services.jobsearch import WORDS, JobOrder, JobQuery, words_of
from penstock_server.services.pages import DEFAULT_SIZE
from penstock_server.services.views import for_reader

router = guarded_router("/api/v1", tag="jobs")

_KIND = "|".join(str(kind.value) for kind in Kind)
KINDS = f"^({_KIND})(,({_KIND}))*$"
_STATE = "|".join(JobState)
STATES = f"^({_STATE})(,({_STATE}))*$"
Words = Annotated[
    str,
    Query(
        max_length=200,
        pattern=WORDS,
        description="at most eight words, each of them in the name, id, state, kind or reason, in any case",
    ),
]
NAME_START = "^[a-z0-9._-]{1,63}$"
MAX_WAIT_S = 60.0
SUBMIT = frozenset({"submit"})
MAX_VERSION = (1 << 31) - 1
MAX_LOG_BYTES = 1 << 20
MAX_FRAMES_BYTES = 16 << 20
MAX_ATTEMPT = (1 << 31) - 1
ATTEMPT = "of this attempt alone; default: of each attempt the steps before those that later ones repeated"
LOG_WAIT = "seconds to wait for more, or for a change of the job or of another of its logs"
FRAMES = "application/vnd.penstock.frames"


@router.post("/jobs", status_code=201, operation_id="submitJob", responses=problems(409))
@scoped("submit")
@by_project
async def submit_job(
    server: Server,
    asker: Asker,
    response: Response,
    body: api.Submission,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    traceparent: Annotated[str | None, Header(description="the caller's span (W3C)")] = None,
) -> api.Job:
    """Queue a job."""
    require_project(asker, body.spec.project, SUBMIT)
    since = server.clock.now()
    job = await server.jobs.submit(body.spec, asker, idempotency_key)
    server.traces.submitted(job.id, traceparent, since)
    return _tagged(response, job)


def _tagged(response: Response, job: api.Job) -> api.Job:
    response.headers["ETag"] = f'"{job.version}"'
    return job


@router.get("/jobs", operation_id="listJobs", responses=problems(409))
@scoped("read")
@by_project
async def list_jobs(
    server: Server,
    asker: Asker,
    state: Annotated[str | None, Query(pattern=STATES, description="one state, or several with commas")] = None,
    name: str | None = None,
    search: Annotated[str | None, Query(pattern=NAME_START, description="beginning of the name")] = None,
    words: Words = "",
    order: JobOrder = JobOrder.NEWEST,
    page_size: PageSize = DEFAULT_SIZE,
    page_token: PlacedToken = None,
) -> api.Page[api.Job]:
    """List jobs, newest first or in another order, of equals the newest first."""
    query = JobQuery(_states(state), name, search or "", words_of(words), asker.projects_with(READ))
    page = await server.jobs.page(query, order=order, size=page_size, token=page_token)
    return api.Page(items=[for_reader(job, asker) for job in page.items], next_page_token=page.next_page_token)


def _states(text: str | None) -> tuple[JobState, ...]:
    return tuple(map(JobState, text.split(","))) if text else ()


@router.get("/job-counts", operation_id="countJobs")
@scoped("read")
@by_project
async def count_jobs(server: Server, asker: Asker, words: Words = "") -> JobCounts:
    """Return how many jobs there are in each state."""
    states = await server.jobs.counts(JobQuery(words=words_of(words), projects=asker.projects_with(READ)))
    return JobCounts(states=states, total=sum(states.values()))


@router.get("/jobs/{job_id:id}", operation_id="getJob", responses=TAGGED)
@scoped("read")
async def get_job(
    server: Server,
    asker: Asker,
    response: Response,
    job_id: Id,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="seconds to wait for its end, or a change")] = 0.0,
    since: Annotated[int | None, Query(ge=0, le=MAX_VERSION, description="version that the caller has seen")] = None,
) -> api.Job:
    """Return one job; with `wait`, once it has ended, or its version is not `since` any more, or the time is up.

    Values of `env` that look like secrets are masked; all of them without the scope `submit`.
    """
    job = await (server.jobs.changed(job_id, since=since, within_s=wait) if wait else server.jobs.get(job_id))
    return for_reader(_tagged(response, job), asker)


@router.post("/jobs/{job_id:id}:cancel", status_code=202, operation_id="cancelJob", responses=problems(409, 412))
@scoped("submit")
async def cancel_job(server: Server, asker: Asker, response: Response, job_id: Id, if_match: IfMatch = None) -> api.Job:
    """Stop a job; one that has ended stays as it is. With If-Match, only if it is still as the caller saw it."""
    return _tagged(response, await server.jobs.cancel(job_id, asker, version=version_of(if_match)))


@router.get("/jobs/{job_id:id}/events", operation_id="listJobEvents")
@scoped("read")
async def list_job_events(
    server: Server, job_id: Id, page_size: PageSize = DEFAULT_SIZE, page_token: PageToken = None
) -> api.Page[api.Event]:
    """List a job's changes of state, oldest first."""
    return await server.jobs.events(job_id, size=page_size, token=page_token)


@router.get("/jobs/{job_id:id}/logs", operation_id="readJobLog")
@scoped("read")
async def read_job_log(
    server: Server,
    job_id: Id,
    replica_id: str | None = None,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=4, le=MAX_LOG_BYTES)] = 64 << 10,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description=LOG_WAIT)] = 0.0,
) -> api.LogChunk:
    """Return a piece of a replica's log; without `replica_id`, of trainer 0 of the newest attempt.

    With `wait`, once there is more than `offset`, the job or another of its logs has changed, or the time is up.
    """
    replica = await server.jobs.replica_of(job_id, replica_id)
    if wait:
        deadline = server.clock.monotonic() + wait
        with server.log_changes.of(job_id) as change:  # before the look, so that nothing is missed
            replica = await server.jobs.replica_of(job_id, replica.id)
            has_ended = ReplicaState(replica.state) in TERMINAL_REPLICA
            left_s = 0.0 if has_ended else deadline - server.clock.monotonic()
            if left_s > 0 and server.logs.size(job_id, replica.id) <= offset and await change.wait(left_s):
                replica = await server.jobs.replica_of(job_id, replica.id)
    ended = ReplicaState(replica.state) in TERMINAL_REPLICA
    piece = server.logs.read(job_id, replica.id, offset, limit, final=ended)
    return api.LogChunk(
        replica_id=replica.id,
        offset=offset,
        next_offset=piece.next_offset,
        text=piece.text,
        eof=ended and piece.next_offset >= server.logs.size(job_id, replica.id),
    )


@router.get("/jobs/{job_id:id}/metrics", operation_id="readJobMetrics")
@scoped("read")
async def read_job_metrics(
    server: Server,
    job_id: Id,
    names: Annotated[str | None, Query(description="comma-separated; default: all series")] = None,
    max_points: Annotated[int, Query(ge=4, le=100_000)] = 2000,
    attempt: Annotated[int | None, Query(ge=0, le=MAX_ATTEMPT, description=ATTEMPT)] = None,
) -> api.Metrics:
    """Return a job's series, thinned so that extremes stay."""
    wanted = None if names is None else [name for name in names.split(",") if name]
    return api.Metrics(series=await server.series.read(job_id, wanted, max_points, attempt=attempt))


@router.get("/jobs/{job_id:id}/media", operation_id="listJobMedia")
@scoped("read")
async def list_job_media(server: Server, job_id: Id) -> api.Items[MediaSeries]:
    """List the tables and histograms that a job has logged, by name, each with its newest steps."""
    return api.Items(items=await server.media.of(job_id))


@router.get(
    "/jobs/{job_id:id}/media/{media_id:id}",
    operation_id="readJobMedia",
    response_class=Response,
    responses={200: {"model": MediaContent, "description": "a table or a histogram"}},
)
@scoped("read")
async def read_job_media(server: Server, request: Request, job_id: Id, media_id: Id) -> Response:
    """Return one table or histogram. It never changes."""
    content = await server.media.content(job_id, media_id)
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return await compressed(request, content, media_type="application/json", headers=headers)


@router.get("/jobs/{job_id:id}/exchange", operation_id="readJobExchange")
@scoped("read")
async def read_job_exchange(server: Server, job_id: Id) -> api.Exchange:
    """Return what each trainer and pserver of the newest attempt exchanged, by block: sums since its start."""
    return await server.exchanges.of(job_id)


@router.get("/jobs/{job_id:id}/tables", operation_id="readJobTables")
@scoped("read")
async def read_job_tables(server: Server, job_id: Id) -> SparseTables:
    """Return the sparse tables of the newest attempt: rows, bytes, ids that are updated often, parts of the servers."""
    return await server.exchanges.tables_of(job_id)


@router.get("/jobs/{job_id:id}/completeness", operation_id="readJobCompleteness")
@scoped("read")
async def read_job_completeness(server: Server, job_id: Id) -> TelemetryCompleteness:
    """Return what became of the telemetry that the job produced, over all of its attempts, processes and restarts."""
    return await server.completeness.of(job_id)


@router.get("/jobs/{job_id:id}/operators", operation_id="readJobOperators")
@scoped("read")
async def read_job_operators(server: Server, job_id: Id) -> OperatorTimes:
    """Return how long each operator of a trainer ran, summed over the newest part of the recording."""
    return await server.diagnoses.operators_of(job_id)


@router.get("/jobs/{job_id:id}/why", operation_id="diagnoseJob")
@scoped("read")
async def diagnose_job(server: Server, job_id: Id) -> api.Diagnosis:
    """Return why the job's steps take as long as they do: ranked sentences with measurements."""
    return await server.diagnoses.of(job_id)


@router.post("/jobs/{job_id:id}:stack", operation_id="takeJobStacks", responses=problems(409))
@scoped("read")
async def take_job_stacks(
    server: Server,
    job_id: Id,
    replica_id: Annotated[str | None, Query(max_length=64)] = None,
    skip: Annotated[int, Query(ge=0, le=1 << 20, description="Python processes to pass over")] = 0,
) -> PythonStacks:
    """Take the Python stacks of a replica, without stopping it; without `replica_id`, of trainer 0.

    Of 8 of its processes, the entrypoint first; `skip` asks for those behind.
    """
    return await server.stacks.of(job_id, replica_id, skip)


@router.post("/jobs/{job_id:id}:record", status_code=202, operation_id="recordJob", responses=problems(409))
@scoped("submit")
async def record_job(server: Server, job_id: Id, seconds: Annotated[int, Query(ge=1, le=MAX_S)] = 5) -> FullRecording:
    """Have every step of a running job sent whole for some seconds, not a sample of them."""
    return await server.recordings.ask(job_id, seconds)


@router.get("/jobs/{job_id:id}/advice", operation_id="adviseJob", responses=problems(409))
@scoped("read")
async def advise_job(server: Server, job_id: Id) -> api.Advice:
    """Return settings ranked by the step time that a simulation of the job's recorded steps predicts for them."""
    return await server.advices.of(job_id)


@router.get("/jobs/{job_id:id}/graphs", operation_id="listJobGraphs")
@scoped("read")
async def list_job_graphs(server: Server, job_id: Id) -> api.Items[api.GraphUse]:
    """List the graphs that a job used."""
    return api.Items(items=await server.storage.graphs(job_id))


@router.get(
    "/jobs/{job_id:id}/frames",
    operation_id="readJobFrames",
    response_class=Response,
    responses={200: {"content": {FRAMES: {"schema": {"type": "string", "format": "binary"}}}}},
)
@scoped("read")
async def read_job_frames(
    server: Server,
    request: Request,
    job_id: Id,
    stream: Annotated[int | None, Query(ge=0)] = None,
    kinds: Annotated[
        str, Query(json_schema_extra={"pattern": KINDS}, description="comma-separated numbers of frame kinds")
    ] = "3,4,6,7",
    after_seq: Annotated[int | None, Query(ge=0)] = None,
    limit_bytes: Annotated[int, Query(ge=1, le=MAX_FRAMES_BYTES)] = 4 << 20,
) -> Response:
    """Return recorded telemetry frames, oldest kept first, each preceded by its length (u32, little-endian)."""
    await server.jobs.get(job_id)
    content = await server.recorder.read(
        job_id, stream=stream, kinds=_kinds(kinds), after_seq=after_seq, limit_bytes=limit_bytes
    )
    return await compressed(request, content, media_type=FRAMES, headers={})


def _kinds(text: str) -> frozenset[Kind]:
    if re.fullmatch(KINDS, text) is None:
        known = ", ".join(f"{kind.value} {kind.name}" for kind in Kind)
        raise Problem(422, "invalid_request", f"kinds is {text[:80]!r}; expected some of: {known}")
    return frozenset(Kind(int(part)) for part in text.split(","))


replicas = guarded_router("/api/v1", tag="replicas")


@replicas.get("/replicas", operation_id="listReplicas")
@scoped("read")
@by_project
async def list_replicas(
    server: Server,
    asker: Asker,
    role: Role | None = None,
    job_id: str | None = None,
    attempt: Annotated[int | None, Query(ge=0, le=MAX_ATTEMPT)] = None,
    page_size: PageSize = DEFAULT_SIZE,
    page_token: PageToken = None,
) -> api.Page[api.Replica]:
    """List registered trainers and pservers of all attempts, newest first."""
    return await server.jobs.replicas(
        role=role, job_id=job_id, attempt=attempt, size=page_size, token=page_token, projects=asker.projects_with(READ)
    )


@replicas.get(
    "/graphs/{graph_hash:id}",
    operation_id="getGraph",
    tags=["graphs"],
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
@scoped("read")
@by_project
async def get_graph(server: Server, asker: Asker, request: Request, graph_hash: Id) -> Response:
    """Return a graph document. It never changes."""
    if len(graph_hash) != 64:
        raise NotFound("graph", graph_hash[:80])
    text = await server.storage.graph(graph_hash, asker.projects_with(READ))
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return await compressed(request, text.encode(), media_type="application/json", headers=headers)
