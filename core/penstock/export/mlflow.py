"""A job as a run of an MLflow tracking server: parameters of its specification, metrics, how it ended.

Spoken over MLflow's REST API 2.0, which every version of its server has; MLflow's own client would add twenty packages
for five calls. Each export makes a new run, tagged with the job's id, which ends as FAILED if the export does. The
job's environment is not sent. No message has the user and password of the URI.
Source: the REST API reference of MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from penstock.errors import PeerError, SpecError, Unavailable
from penstock.export.recording import Recording, unix_ns

BATCH = 1000
MAX_PARAMS = 100
MAX_PARAM_CHARACTERS = 500
TIMEOUT_S = 60.0
FAIL_TIMEOUT_S = 5.0
"""For the last call of a failed export, so that Ctrl-C does not wait for a server that hangs."""
_STATUS = {"SUCCEEDED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}
_MISSING = "RESOURCE_DOES_NOT_EXIST"
Body = dict[str, Any]


def write_mlflow(recording: Recording, uri: str, experiment: str) -> dict[str, Any]:
    """Log a job as a run of an experiment, which is made if need be. Returns the run's id and what it holds.

    `uri`: the tracking server, http or https; a user and password in it are sent. Raises SpecError if the server
    refuses a call, PeerError if it is no MLflow server, Unavailable if it does not answer; a run that was made is then
    ended as FAILED, if the server takes that.
    """
    with _connect(uri) as http:
        api = _Api(http, without_user(uri))
        tags = {"penstock.job_id": recording.job["id"]}
        run_id = api.start(api.experiment(experiment), recording.job["name"], started_ms(recording), tags)
        try:
            counts = _fill(api, run_id, recording)
        except BaseException:
            api.fail(run_id)
            raise
    return {"run_id": run_id, "experiment": experiment, **counts}


def _connect(uri: str) -> httpx.Client:
    """Return a client whose URLs, which httpx logs, have no user and password."""
    if not uri.startswith(("http://", "https://")):
        raise SpecError(
            f"the tracking URI is {without_user(uri)!r}; expected http://… or https://…: start one with 'mlflow server'"
        )
    try:
        url = httpx.URL(uri.rstrip("/"))
    except httpx.InvalidURL:
        raise SpecError(
            f"the tracking URI {without_user(uri)!r} is no URL; expected http://USER:PASSWORD@HOST:PORT, where "
            "characters such as '/', '#' and '?' of user and password are percent-encoded, '/' as %2F"
        ) from None  # its text may hold a part of the password
    auth = (url.username, url.password) if url.userinfo else None
    return httpx.Client(base_url=url.copy_with(userinfo=b""), auth=auth, timeout=TIMEOUT_S)


def without_user(uri: str) -> str:
    """Return a URI without all that stands before its last '@', which a password that is not encoded may hold."""
    return re.sub(r"^(\w+://)?.*@", r"\1", uri, flags=re.DOTALL)


def _fill(api: _Api, run_id: str, recording: Recording) -> dict[str, int]:
    """Log parameters, metrics and the end of a job to its run; return how many."""
    job, series = recording.job, recording.series()
    params = params_of(job["spec"])
    api.call("POST", "runs/log-batch", {"run_id": run_id, "params": params})
    points = 0
    for batch in batches(series):
        api.call("POST", "runs/log-batch", {"run_id": run_id, "metrics": batch})
        points += len(batch)
    ended = {} if job["finished_at"] is None else {"end_time": unix_ns(job["finished_at"]) // 1_000_000}
    api.call("POST", "runs/update", {"run_id": run_id, "status": _STATUS.get(job["state"], "RUNNING"), **ended})
    return {"params": len(params), "series": len(series), "points": points}


def started_ms(recording: Recording) -> int:
    """Return when the job started, or was submitted, in milliseconds."""
    return unix_ns(recording.job["started_at"] or recording.job["created_at"]) // 1_000_000


def params_of(spec: Mapping[str, Any]) -> list[Body]:
    """Return the fields of a specification as parameters, nested ones as 'trainers.count'; at most `MAX_PARAMS`."""
    flat = [(name, text) for name, text in _flat(spec) if name != "env" and not name.startswith("env.")]
    return [{"key": key_of(name), "value": text[:MAX_PARAM_CHARACTERS]} for name, text in flat[:MAX_PARAMS]]


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            yield prefix + name, " ".join(map(str, value)) if isinstance(value, list) else str(value)


def key_of(name: str) -> str:
    """Return a name with '_' for each character that MLflow refuses in one."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)


def batches(series: Mapping[str, Any]) -> Iterator[list[Body]]:
    """Yield the points of all series, at most `BATCH` at a time."""
    batch: list[Body] = []
    for name, points in series.items():
        key = key_of(name)
        for step, time_ns, value in zip(points["step"], points["time_ns"], points["value"], strict=True):
            batch.append({"key": key, "value": value, "timestamp": time_ns // 1_000_000, "step": step})
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


class _Api:
    """The calls that are needed of a tracking server. `shown_uri`: its URI in messages."""

    def __init__(self, http: httpx.Client, shown_uri: str) -> None:
        self._http, self._shown_uri = http, shown_uri

    def experiment(self, name: str) -> str:
        """Return the id of an experiment."""
        found = self._answer("GET", "experiments/get-by-name", params={"experiment_name": name})
        if found.status_code == 404 and self._object(found).get("error_code") == _MISSING:
            return str(self.call("POST", "experiments/create", {"name": name})["experiment_id"])
        return str(self._body(found, "experiments/get-by-name")["experiment"]["experiment_id"])

    def start(self, experiment_id: str, name: str, start_ms: int, tags: Mapping[str, str]) -> str:
        """Begin a run; return its id."""
        given = [{"key": key, "value": value} for key, value in tags.items()]
        body = {"experiment_id": experiment_id, "run_name": name, "start_time": start_ms, "tags": given}
        return str(self.call("POST", "runs/create", body)["run"]["info"]["run_id"])

    def fail(self, run_id: str) -> None:
        """End a run as FAILED, unless the server does not answer."""
        with suppress(Unavailable):  # the error that made the export fail says more
            self._answer("POST", "runs/update", json={"run_id": run_id, "status": "FAILED"}, timeout=FAIL_TIMEOUT_S)

    def call(self, method: str, name: str, body: Body) -> Body:
        """Make a call; return the answer's object."""
        return self._body(self._answer(method, name, json=body), name)

    def _answer(self, method: str, name: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, f"/api/2.0/mlflow/{name}", **options)
        except httpx.TransportError as error:
            raise Unavailable(
                f"no MLflow server answers at {self._shown_uri} ({error}); is --tracking-uri right?"
            ) from error

    def _body(self, answer: httpx.Response, name: str) -> Body:
        if answer.status_code >= 500:
            raise Unavailable(
                f"MLflow at {self._shown_uri} answers {name} with {answer.status_code}: {answer.text[:200]}"
            )
        if answer.is_error:
            raise SpecError(
                f"MLflow at {self._shown_uri} refuses {name} with {answer.status_code}: {answer.text[:300]}"
            )
        return self._object(answer)

    def _object(self, answer: httpx.Response) -> Body:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise PeerError(
                f"{answer.request.url} answers {answer.status_code} without a JSON object; is {self._shown_uri} "
                "an MLflow server? Give --tracking-uri the address under which its /api/2.0/mlflow is"
            )
        return body
