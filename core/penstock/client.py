"""A typed client of the REST API (docs/protocol.md): what the command line and the agent use. No torch.

Every failure is one of ours: `AuthError`, `NotFound`, `Conflict`, `SpecError` (with the server's JSON pointers),
`Unavailable` (no server, or it is overloaded) and `PeerError` (it answers what the protocol does not allow).
Only `submit` with a key is retried, a few times within two seconds. Of several servers (docs/server.md: standbys), one
that was not handled, or that only reads, goes to the next, for some five seconds. Calls block; a `Client` may not be
shared between threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from io import IOBase
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, cast

import httpx

from penstock.backoff import Backoff
from penstock.connections import TIMEOUT_S, is_loopback, options
from penstock.errors import PeerError, Unavailable
from penstock.failover import ServerAddresses
from penstock.problems import AuthError, Conflict, NotFound, may_be_repeated, problem, unreachable
from penstock.protocol.exchange import Cell, cell_of
from penstock.protocol.rest import (
    Advice,
    AuditEntry,
    Diagnosis,
    FullRecording,
    GraphUse,
    Job,
    MediaSeries,
    Node,
    NodeFinding,
    NodeJoin,
    Pilot,
    PilotReport,
    Plan,
    Progress,
    Project,
    PythonStacks,
    Replica,
    Series,
    Snapshot,
    SparseTables,
    TelemetryCompleteness,
    Token,
    TokenMade,
    Webhook,
    WebhookDelivery,
    WebhookMade,
)
from penstock.protocol.rest import LogChunk as LogPiece
from penstock.protocol.rest import NodeJoined as NodeGrant
from penstock.protocol.rest import OneTimeToken as JoinToken
from penstock.tls import ClientCertificate

__all__ = [
    "AuditEntry", "AuthError", "Client", "Conflict", "Event", "Exchange", "GraphUse", "Job", "JoinToken", "LogPiece",
    "Node", "NodeFinding", "NodeGrant", "NotFound", "Progress", "Replica", "Series", "Snapshot", "Token", "is_loopback",
    "problem",
]  # fmt: skip
VERSION_TIMEOUT_S, UPLOAD_TIMEOUT_S = 3.0, 120.0
SUBMIT_RETRIES, SUBMIT_PAUSE_S, SUBMIT_LONGEST_S = 3, 0.1, 1.0
FAILOVER_S, FAILOVER_PAUSE_S, FAILOVER_LONGEST_S = 5.0, 0.1, 1.0  # while a standby takes over


Event = TypedDict(
    "Event",
    {"id": str, "at": str, "kind": str, "subject": str, "from": str | None, "to": str, "reason": str, "detail": str},
)
"""A change of state of a job or of a replica, whose id is `subject`."""


class Exchange(TypedDict):
    """The exchange with the parameter servers of a job's newest attempt. `pservers`: endpoints, by index."""

    job_id: str
    attempt: int
    pservers: list[str]
    steps: dict[str, int]
    cells: list[Cell]


class Client:
    """`url`: the server's base URL, without /api/v1, or those of several, with commas between. `token`: a bearer token.

    None for the calls that need none. `certificate`: what is shown to a server that asks for one; default: that of
    PENSTOCK_TLS_CERT, if it is set. The attribute `url` is the address in use, `urls` has all.
    """

    def __init__(self, url: str, *, token: str | None, certificate: ClientCertificate | None = None) -> None:
        self._addresses = ServerAddresses(url)
        self.url, self.urls = self._addresses.current, str(self._addresses)
        self._token, self._certificate = token, certificate or ClientCertificate.from_environ()
        self._http = httpx.Client(**options(self.url, self._token, self._certificate))
        self._opened = {self.url: self._http}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for http in self._opened.values():
            http.close()

    # Jobs

    def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> Job:
        """Submit a job. `key`: an Idempotency-Key; with one, an answer that was lost on its way costs no second job."""
        headers = {} if key is None else {"Idempotency-Key": key}
        backoff = Backoff(SUBMIT_PAUSE_S, SUBMIT_LONGEST_S)
        while True:
            try:
                return cast(Job, self._json("POST", "/jobs", json={"spec": spec}, headers=headers))
            except Unavailable:
                if key is None or backoff.attempts == SUBMIT_RETRIES:
                    raise
            time.sleep(backoff.wait_s())

    def jobs(self, *, state: str | None = None, name: str | None = None) -> Iterator[Job]:
        """Yield the jobs, newest first; pages are fetched as they are needed."""
        for item in self._pages("/jobs", {"state": state, "name": name}):
            yield cast(Job, item)

    def job(self, job_id: str, *, wait_s: float = 0.0, since: int | None = None) -> Job:
        """Return one job. `wait_s`: once it has ended or its version is not `since` any more, or after so long."""
        params = {} if not wait_s else {"wait": wait_s} if since is None else {"wait": wait_s, "since": since}
        path = f"/jobs/{_segment(job_id)}"
        return cast(Job, self._json("GET", path, params=params, timeout=TIMEOUT_S + wait_s))

    def cancel(self, job_id: str, *, version: int | None = None) -> Job:
        """Ask for the end of a job; a job that has ended stays as it is.

        `version`: raises Conflict if the job is not as it was when it had this one (`If-Match`).
        """
        headers = _if_match(None if version is None else str(version))
        return cast(Job, self._json("POST", f"/jobs/{_segment(job_id)}:cancel", headers=headers))

    def logs(
        self, job_id: str, replica_id: str, *, offset: int = 0, limit: int = 1 << 20, wait_s: float = 0.0
    ) -> LogPiece:
        """Return a piece of a replica's log from a byte offset. `wait_s`: once there is one, or the job changes."""
        params = {"replica_id": replica_id, "offset": offset, "limit": limit, **({"wait": wait_s} if wait_s else {})}
        path = f"/jobs/{_segment(job_id)}/logs"
        return cast(LogPiece, self._json("GET", path, params=params, timeout=TIMEOUT_S + wait_s))

    def replicas(self, job_id: str, *, attempt: int | None = None) -> list[Replica]:
        """Return the replicas of one attempt of a job, or of all, oldest first."""
        found = self._pages("/replicas", {"job_id": job_id, "attempt": None if attempt is None else str(attempt)})
        return [cast(Replica, one) for one in found][::-1]

    def metrics(self, job_id: str, *names: str, max_points: int = 2000) -> dict[str, Series]:
        """Return metric series: all, or those named as far as the job has them. `max_points`: of each, at most."""
        params = {"max_points": max_points, **({"names": ",".join(names)} if names else {})}
        answer = self._json("GET", f"/jobs/{_segment(job_id)}/metrics", params=params)
        return cast(dict[str, Series], answer["series"])

    def events(self, job_id: str) -> Iterator[Event]:
        """Yield the changes of state of a job and its replicas, oldest first."""
        for item in self._pages(f"/jobs/{_segment(job_id)}/events", {}):
            yield cast(Event, item)

    def graphs(self, job_id: str) -> list[GraphUse]:
        """Return which replica of a job used which graph."""
        return [cast(GraphUse, item) for item in self._json("GET", f"/jobs/{_segment(job_id)}/graphs")["items"]]

    def graph(self, graph_hash: str) -> dict[str, Any]:
        """Return a graph document (`penstock.protocol.graphdoc.GraphDocument`)."""
        return self._json("GET", f"/graphs/{_segment(graph_hash)}", timeout=UPLOAD_TIMEOUT_S)

    def frames(
        self,
        job_id: str,
        *,
        stream: int,
        kinds: Sequence[int],
        after_seq: int | None = None,
        limit_bytes: int = 4 << 20,
    ) -> bytes:
        """Return the oldest recorded frames of a process that are newer than `after_seq`, each behind its length.

        `kinds`: numbers of `penstock.protocol.frames.Kind`. Nothing is returned when there are no more.
        """
        params = {"stream": stream, "kinds": ",".join(map(str, kinds)), "limit_bytes": limit_bytes}
        after = {} if after_seq is None else {"after_seq": after_seq}
        path = f"/jobs/{_segment(job_id)}/frames"
        return self._request("GET", path, params={**params, **after}, timeout=UPLOAD_TIMEOUT_S).content

    def exchange(self, job_id: str) -> Exchange:
        """Return what the trainers and pservers of a job have exchanged."""
        answer = self._json("GET", f"/jobs/{_segment(job_id)}/exchange")
        return cast(Exchange, {**answer, "cells": [cell_of(cell) for cell in answer["cells"]]})

    def media(self, job_id: str) -> list[MediaSeries]:
        """Return which tables and histograms a job has logged, each with its newest steps."""
        return [cast(MediaSeries, item) for item in self._json("GET", f"/jobs/{_segment(job_id)}/media")["items"]]

    def media_content(self, job_id: str, media_id: str) -> dict[str, Any]:
        """Return one table or histogram (`penstock.protocol.media`)."""
        return self._json("GET", f"/jobs/{_segment(job_id)}/media/{_segment(media_id)}")

    def tables(self, job_id: str) -> SparseTables:
        """Return the sparse tables of a job's newest attempt."""
        return cast(SparseTables, self._json("GET", f"/jobs/{_segment(job_id)}/tables"))

    def completeness(self, job_id: str) -> TelemetryCompleteness:
        """Return what became of the telemetry that a job produced, and whether all of it is accounted for."""
        return cast(TelemetryCompleteness, self._json("GET", f"/jobs/{_segment(job_id)}/completeness"))

    def why(self, job_id: str) -> Diagnosis:
        """Return why the steps of a job take as long as they do."""
        return cast(Diagnosis, self._json("GET", f"/jobs/{_segment(job_id)}/why"))

    def stacks(self, job_id: str, replica_id: str, skip: int = 0) -> PythonStacks:
        """Have the stacks of a running replica's Python processes taken, behind the first `skip`. Raises Conflict."""
        params = {"replica_id": replica_id} | ({"skip": str(skip)} if skip else {})
        return cast(PythonStacks, self._json("POST", f"/jobs/{_segment(job_id)}:stack", params=params))

    def record(self, job_id: str, seconds: int) -> FullRecording:
        """Have every step of a running job sent whole for some seconds. Raises Conflict if none of it can be."""
        params = {"seconds": str(seconds)}
        return cast(FullRecording, self._json("POST", f"/jobs/{_segment(job_id)}:record", params=params))

    def advice(self, job_id: str) -> Advice:
        """Return settings ranked by predicted step time. Raises Conflict if no step has been recorded."""
        return cast(Advice, self._json("GET", f"/jobs/{_segment(job_id)}/advice"))

    def plan(self, spec: Mapping[str, Any]) -> Plan:
        """Return where a job would be placed now, or why it would wait."""
        return cast(Plan, self._json("POST", "/jobs:plan", json={"spec": spec}))

    # Projects

    def projects(self) -> list[Project]:
        """Return the projects that have terms of their own, or jobs that run or wait."""
        return [cast(Project, item) for item in self._json("GET", "/projects")["items"]]

    def set_project(
        self,
        name: str,
        *,
        share: float,
        max_cpus: int | None,
        max_gpus: int | None,
        max_jobs: int | None,
        etag: str | None = None,
    ) -> Project:
        """Give a project these terms in place of those that it has. `max_…`: None without a limit.

        `etag`: raises Conflict if they have changed since (`If-Match`).
        """
        body = {"share": share, "max_cpus": max_cpus, "max_gpus": max_gpus, "max_jobs": max_jobs}
        path = f"/projects/{_segment(name)}"
        return cast(Project, self._json("PUT", path, json=body, headers=_if_match(etag)))

    # Webhooks

    def add_webhook(self, url: str, **fields: Any) -> WebhookMade:
        """Post changes of jobs' states to `url`. `fields`: `events`, `project`, `secret`, as the API takes them."""
        return cast(WebhookMade, self._json("POST", "/webhooks", json={"url": url, **fields}))

    def webhooks(self) -> list[Webhook]:
        """Return the webhooks, oldest first, without secrets."""
        return [cast(Webhook, item) for item in self._json("GET", "/webhooks")["items"]]

    def remove_webhook(self, webhook_id: str) -> None:
        """Remove a webhook, and what it has not received yet."""
        self._request("DELETE", f"/webhooks/{_segment(webhook_id)}")

    def test_webhook(self, webhook_id: str) -> WebhookDelivery:
        """Queue a delivery of the type `test`."""
        return cast(WebhookDelivery, self._json("POST", f"/webhooks/{_segment(webhook_id)}:test"))

    def enable_webhook(self, webhook_id: str) -> Webhook:
        """Resume a disabled or paused webhook at once, starting with the oldest pending delivery."""
        return cast(Webhook, self._json("POST", f"/webhooks/{_segment(webhook_id)}:enable"))

    def webhook_deliveries(self, webhook_id: str) -> Iterator[WebhookDelivery]:
        """Yield what a webhook has received or is to receive, newest first."""
        for item in self._pages(f"/webhooks/{_segment(webhook_id)}/deliveries", {}):
            yield cast(WebhookDelivery, item)

    # Snapshots

    def upload_snapshot(self, path: Path) -> Snapshot:
        """Upload a tar.gz; the same bytes are stored once."""
        with path.open("rb") as file:
            headers = {"Content-Type": "application/gzip"}
            return cast(
                Snapshot, self._json("POST", "/snapshots", content=file, headers=headers, timeout=UPLOAD_TIMEOUT_S)
            )

    def download_snapshot(self, sha256: str, path: Path) -> None:
        """Write a snapshot to `path` (through a neighbouring temporary file); the caller checks its hash."""
        part = path.with_name(f"{path.name}.{id(self):x}.part")
        try:
            self._request("GET", f"/snapshots/{_segment(sha256)}", into=part, timeout=UPLOAD_TIMEOUT_S)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    # Nodes, tokens, login

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes."""
        for item in self._pages("/nodes", {}):
            yield cast(Node, item)

    def register_node(self, node: NodeJoin) -> NodeGrant:
        """Register a node with its join token."""
        return cast(NodeGrant, self._json("POST", "/nodes", json=node))

    def join_token(self, *, expires_in_s: int = 300, reusable: bool = False) -> JoinToken:
        """Make a token for a node, once; a `reusable` one is for any number of them."""
        body = {"expires_in_s": expires_in_s, **({"reusable": True} if reusable else {})}
        return cast(JoinToken, self._json("POST", "/join-tokens", json=body))

    def node(self, node_id: str) -> Node:
        """Return one node."""
        return cast(Node, self._json("GET", f"/nodes/{_segment(node_id)}"))

    def want_node(
        self,
        node_id: str,
        what: Literal["cordon", "uncordon", "drain"],
        *,
        deadline_s: float | None = None,
        etag: str | None = None,
    ) -> Node:
        """Cordon, uncordon or drain a node. `etag`: raises Conflict if it has changed since (`If-Match`).

        `deadline_s`: of a drain, after which what still runs there is preempted; None: it is waited for. Raises
        PeerError if the server is of a version without deadlines: it drains the node, and waits for what runs there.
        """
        body = {} if deadline_s is None else {"json": {"deadline_s": deadline_s}}
        answer = self._json("POST", f"/nodes/{_segment(node_id)}:{what}", headers=_if_match(etag), **body)
        if deadline_s is not None and "drain_by" not in answer:
            raise PeerError(
                f"node {node_id} drains without the deadline of {deadline_s:g} s: the server at {self.url} is older "
                "and waits for what runs there; upgrade it, or drain without a deadline and cancel the jobs"
            )
        return cast(Node, answer)

    def pilots(self) -> list[Pilot]:
        """Return the pilots of all clusters; none of a server that does not know them."""
        try:
            return [cast(Pilot, item) for item in self._json("GET", "/pilots")["items"]]
        except NotFound:  # an older server
            return []

    def report_pilots(self, cluster: str, pilots: Sequence[PilotReport]) -> None:
        """Replace what the server shows of the pilots of a cluster."""
        self._request("PUT", f"/clusters/{_segment(cluster)}/pilots", json={"pilots": list(pilots)})

    def create_token(
        self,
        name: str,
        scopes: list[str] | None = None,
        *,
        role: str | None = None,
        projects: Mapping[str, str] | None = None,
        expires_in_s: int | None = None,
    ) -> TokenMade:
        """Make an API token; the answer is the only place where its secret stands.

        One of these is given: `scopes`, or `role` ('viewer', 'runner', 'admin'), in all projects, or `projects`, the
        role in each of those that the token is for.
        """
        given = {"scopes": scopes, "role": role, "projects": projects, "expires_in_s": expires_in_s}
        body = {"name": name, **{field: value for field, value in given.items() if value is not None}}
        return cast(TokenMade, self._json("POST", "/tokens", json=body))

    def tokens(self) -> Iterator[Token]:
        """Yield the API tokens, without secrets."""
        for item in self._pages("/tokens", {}):
            yield cast(Token, item)

    def revoke_token(self, token_id: str, *, etag: str | None = None) -> None:
        """Make a token worthless. `etag`: raises Conflict if it has changed since (`If-Match`)."""
        self._request("DELETE", f"/tokens/{_segment(token_id)}", headers=_if_match(etag))

    def audit(
        self, *, token: str | None = None, subject: str | None = None, since_s: float | None = None
    ) -> Iterator[AuditEntry]:
        """Yield the entries of the audit log, newest first. `token`: its id or name; `since_s`: seconds since 1970."""
        since = None if since_s is None else repr(since_s)
        for item in self._pages("/audit", {"token": token, "subject": subject, "since_s": since, "page_size": "200"}):
            yield cast(AuditEntry, item)

    def login_code(self) -> str:
        """Return a one-time code with which a browser logs in."""
        return str(self._json("POST", "/login-codes")["code"])

    def is_ready(self) -> bool:
        """True if the server answers and is ready; False if it is not there or not ready yet."""
        for _ in range(len(self._addresses)):
            url = self.url
            try:
                return self._http.get("/readyz", timeout=2.0).status_code == 200
            except httpx.TransportError:
                self._fail_over(url)
        return False

    def server_version(self) -> str:
        """Return the version of the server. Raises Unavailable within a few seconds."""
        described = self._json("GET", "/openapi.json", below="", timeout=VERSION_TIMEOUT_S)
        return str(described.get("info", {}).get("version", ""))

    # Transport

    def _pages(self, path: str, params: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
        given: dict[str, Any] = {name: value for name, value in params.items() if value is not None}
        token: str | None = None
        while True:
            page = self._json("GET", path, params=given if token is None else {**given, "page_token": token})
            yield from page["items"]
            token = page.get("next_page_token")
            if token is None:
                return

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._request(method, path, **options)
        try:
            body = answer.json()
        except ValueError as error:
            raise PeerError(f"{answer.request.url} answers no JSON; is {self.url} a Penstock server?") from error
        if not isinstance(body, dict):
            raise PeerError(f"{answer.request.url} answers a JSON {type(body).__name__}; expected an object")
        return body

    def _request(self, method: str, path: str, *, below: str = "/api/v1", **options: Any) -> httpx.Response:
        backoff, begin = Backoff(FAILOVER_PAUSE_S, FAILOVER_LONGEST_S, limit_s=FAILOVER_S), time.monotonic()
        while True:
            url, wait_s = self.url, 0.0
            try:
                answer = self._attempt(method, below + path, **options)
                self._addresses.succeeded()
                return answer
            except Unavailable as error:
                if len(self._addresses) == 1 or not may_be_repeated(error, method):
                    raise
                if self._fail_over(url):
                    left_s = backoff.wait_within_s(time.monotonic() - begin)
                    if left_s is None:
                        raise
                    wait_s = left_s
            time.sleep(wait_s)

    def _attempt(self, method: str, path: str, *, into: Path | None = None, **options: Any) -> httpx.Response:
        file = options.get("content")
        if isinstance(file, IOBase):
            file.seek(0)  # another server may have read of it
        try:
            if into is None:
                answer = self._http.request(method, path, **options)
            else:
                answer = self._download(method, path, into, **options)
        except httpx.TransportError as error:
            raise unreachable(self.urls, error, self._certificate) from error
        if answer.is_error:
            raise problem(answer)
        return answer

    def _download(self, method: str, path: str, into: Path, **options: Any) -> httpx.Response:
        """Write the body of an answer without an error to a file."""
        with self._http.stream(method, path, **options) as answer:
            if answer.is_error:
                answer.read()
                return answer
            with into.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            return answer

    def _fail_over(self, url: str) -> bool:
        """Use the server after the one at `url`; return whether none of them has answered."""
        have_all_failed = self._addresses.failed(url)
        self.url = self._addresses.current
        if self.url not in self._opened:
            self._opened[self.url] = httpx.Client(**options(self.url, self._token, self._certificate))
        self._http = self._opened[self.url]
        return have_all_failed


def _if_match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": f'"{etag}"'}


def _segment(text: str) -> str:
    """Return `text` if it can stand in a path: ids have no reserved characters. Raises NotFound otherwise."""
    if not text or not all(c.isalnum() or c in "-_" for c in text):
        raise NotFound(f"{text!r} is not an id")
    return text
