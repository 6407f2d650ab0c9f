"""Metrics as TensorBoard's event files and as runs of MLflow, whose server is a stand-in on the loopback."""

from __future__ import annotations

import json
import os
import resource
import struct
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tensorboardX.proto import event_pb2
from tests.export.recorded import T0_NS, RecordedJob

from penstock.errors import PeerError, PenstockError, SpecError, Unavailable
from penstock.export.curves import write_tensorboard
from penstock.export.mlflow import BATCH, params_of, without_user, write_mlflow
from penstock.export.recording import Recording


class _Interrupted(dict[str, Any]):
    """What is being written when the user presses Ctrl-C."""

    def items(self) -> Any:
        raise KeyboardInterrupt

    def __getitem__(self, _: str) -> Any:
        raise KeyboardInterrupt


def recording(points: int = 3) -> Recording:
    """A job with a metric of two trainers, one of which has a name of its own."""
    job = RecordedJob()
    times = [T0_NS + i * 1_000_000_000 for i in range(points)]
    values = [0.5 / (i + 1) for i in range(points)]
    one = {"step": list(range(10, 10 + points)), "time_ns": times, "value": values}
    job.metrics_of = {"loss": one, "loss.trainer1": one, "auc@5": {"step": [4], "time_ns": [T0_NS], "value": [0.75]}}  # type: ignore[dict-item]
    found = job.recording()
    found.job["started_at"], found.job["finished_at"] = None, "2026-09-21T15:00:00.500000Z"
    found.job["spec"] = {
        "mode": "pserver", "entrypoint": ["python", "train.py"], "trainers": {"count": 2, "cpus": 1},
        "env": {"SECRET": "x"}, "workdir": None,
    }  # fmt: skip
    return found


def scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    """Return (tag, step, wall time, value) of the event files in a folder: records of length, crc, event, crc."""
    found = []
    for path in folder.iterdir():
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            found += [(one.tag, event.step, event.wall_time, one.simple_value) for one in event.summary.value]
            at += 16 + size
    return found


def test_tensorboard_has_a_run_for_each_process(tmp_path: Path) -> None:
    said = write_tensorboard(recording(), tmp_path / "runs")
    assert said == {"runs": 2, "series": 3, "points": 7}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"trainer0", "trainer1"}
    losses = [("loss", 10, T0_NS / 1e9, 0.5), ("loss", 11, T0_NS / 1e9 + 1, 0.25)]
    assert scalars(tmp_path / "runs" / "trainer1")[:2] == losses
    assert ("auc_5", 4, T0_NS / 1e9, 0.75) in scalars(tmp_path / "runs" / "trainer0")
    with pytest.raises(SpecError, match="not empty"):
        write_tensorboard(recording(), tmp_path / "runs")


def test_an_empty_folder_is_filled_and_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "runs").mkdir()
    before = (tmp_path / "runs").stat()
    write_tensorboard(recording(), tmp_path / "link")
    assert os.path.samestat((tmp_path / "runs").stat(), before)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"trainer0", "trainer1"}
    assert len(scalars(tmp_path / "link" / "trainer0")) == 4


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, *, exists: bool) -> None:
    folder = tmp_path / "runs"
    if exists:
        folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # the kernel refuses more, as on a full disk
    try:
        with pytest.raises(SpecError, match="cannot write"):
            write_tensorboard(recording(points=1000), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    write_tensorboard(recording(points=1000), folder)
    assert len(scalars(folder / "trainer0")) == 1001


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    interrupted = recording()
    interrupted.client.metrics("job-1", max_points=1)["loss.trainer1"] = _Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        write_tensorboard(interrupted, tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


class Tracking:
    """What an MLflow server has taken."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.logins: set[str | None] = set()
        self.refuses: str | None = None

    def answer(self, name: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append((name, given))
        if name == self.refuses:
            return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "a key is refused"}
        match name:
            case "experiments/get-by-name":
                found = self.experiments.get(given["experiment_name"])
                if found is None:
                    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
                return 200, {"experiment": {"experiment_id": found}}
            case "experiments/create":
                self.experiments[given["name"]] = "7"
                return 200, {"experiment_id": "7"}
            case "runs/create":
                return 200, {"run": {"info": {"run_id": f"run-{given['experiment_id']}"}}}
            case "runs/log-batch" if len(given.get("metrics", ())) > 1000 or len(given.get("params", ())) > 100:
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "too many"}
            case "runs/log-batch" | "runs/update":
                return 200, {}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": name}

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def tracking() -> Iterator[tuple[str, Tracking]]:
    """The URI of a stand-in, and what it has taken."""
    taken = Tracking()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            self.send({key: values[0] for key, values in parse_qs(address.query).items()})

        def do_POST(self) -> None:
            self.send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def send(self, given: dict[str, Any]) -> None:
            taken.logins.add(self.headers["Authorization"])
            prefix, _, name = urlsplit(self.path).path.partition("/api/2.0/mlflow/")
            status, body = taken.answer(name, given) if prefix == "/base" else (404, {"error_code": "NOT_FOUND"})
            content = b"<html>not here</html>" if prefix == "/pages" else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/base", taken
        server.shutdown()
        thread.join()


def test_mlflow_gets_a_run_with_parameters_metrics_and_end(tracking: tuple[str, Tracking]) -> None:
    uri, taken = tracking
    said = write_mlflow(recording(points=BATCH), uri, "ctr")
    assert said == {"run_id": "run-7", "experiment": "ctr", "params": 4, "series": 3, "points": 2 * BATCH + 1}
    [run] = taken.of("runs/create")
    assert (run["run_name"], run["start_time"]) == ("ctr", 1_790_000_000_000)
    assert run["tags"] == [{"key": "penstock.job_id", "value": "job-1"}]
    params, *metrics = taken.of("runs/log-batch")
    assert {one["key"]: one["value"] for one in params["params"]} == {
        "mode": "pserver", "entrypoint": "python train.py", "trainers.count": "2", "trainers.cpus": "1"
    }  # fmt: skip
    assert [len(batch["metrics"]) for batch in metrics] == [BATCH, BATCH, 1]
    assert metrics[0]["metrics"][1] == {"key": "loss", "value": 0.25, "timestamp": 1_790_000_001_000, "step": 11}
    assert metrics[2]["metrics"][0]["key"] == "auc_5"
    [end] = taken.of("runs/update")
    assert (end["status"], end["end_time"]) == ("FINISHED", 1_790_002_800_500)


def test_an_experiment_that_exists_gets_another_run(tracking: tuple[str, Tracking]) -> None:
    uri, taken = tracking
    taken.experiments["ctr"] = "3"
    assert write_mlflow(recording(), uri, "ctr")["run_id"] == "run-3"
    assert not taken.of("experiments/create")


def test_a_tracking_server_that_is_none_is_reported(tracking: tuple[str, Tracking]) -> None:
    uri, _ = tracking
    with pytest.raises(SpecError, match="mlflow server"):
        write_mlflow(recording(), "file:///runs", "ctr")
    with pytest.raises(SpecError, match="refuses experiments/get-by-name with 404"):
        write_mlflow(recording(), uri + "/other", "ctr")
    with pytest.raises(Unavailable, match="--tracking-uri"):
        write_mlflow(recording(), "http://127.0.0.1:1", "ctr")


@pytest.mark.parametrize("scheme", ["", "ftp://", "http://", "http://127.0.0.1:1/"])
def test_no_message_has_the_password(tracking: tuple[str, Tracking], scheme: str) -> None:
    uri, taken = tracking
    for login in ("login:se/cret@", "login:secret@"):
        for address in ("127.0.0.1:1", *(uri[len("http://") :].replace("/base", at) for at in ("/no", "/pages"))):
            with pytest.raises(PenstockError) as raised:
                write_mlflow(recording(), f"{scheme}{login}{address}", "ctr")
            assert "cret" not in str(raised.value)
            assert "login" not in str(raised.value)
            assert "127.0.0.1" in str(raised.value)
    assert taken.calls == []


def test_the_user_and_password_are_sent(tracking: tuple[str, Tracking]) -> None:
    uri, taken = tracking
    write_mlflow(recording(), uri.replace("http://", "http://us%40r:p%2Fw@"), "ctr")
    assert taken.logins == {"Basic " + b64encode(b"us@r:p/w").decode()}
    assert without_user("https://host:5/a") == "https://host:5/a"


def test_a_failed_export_leaves_no_running_run(tracking: tuple[str, Tracking]) -> None:
    uri, taken = tracking
    interrupted = recording()
    interrupted.job["spec"] = _Interrupted()
    with pytest.raises(KeyboardInterrupt):
        write_mlflow(interrupted, uri, "ctr")
    assert taken.of("runs/update") == [{"run_id": "run-7", "status": "FAILED"}]
    taken.refuses = "runs/log-batch"
    with pytest.raises(SpecError, match="refuses runs/log-batch with 400"):
        write_mlflow(recording(), uri, "ctr")
    assert taken.of("runs/update")[1:] == [{"run_id": "run-7", "status": "FAILED"}]


def test_a_page_that_is_no_mlflow_server_is_reported(tracking: tuple[str, Tracking]) -> None:
    uri, _ = tracking
    with pytest.raises(PeerError, match=r"answers 404 without a JSON object.*--tracking-uri"):
        write_mlflow(recording(), uri.replace("/base", "/pages"), "ctr")


def test_parameters_are_bounded() -> None:
    many = {f"field{i:03d}": "x" * 1000 for i in range(200)}
    found = params_of(many)
    assert len(found) == 100
    assert {len(one["value"]) for one in found} == {500}
