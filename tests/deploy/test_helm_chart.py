"""The Helm chart: rendered by Helm's library, valid for the two newest releases, true to the programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import errors
from helm_python.chart import Chart, lint
from kubernetes_validate.utils import all_versions
from tests.engines.api_server import Object, Refused, validate
from typer.testing import CliRunner

from penstock.cli import app
from penstock_server.settings import Settings

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "penstock"
RELEASES = sorted({tuple(map(int, one.split(".")[:2])) for one in all_versions()})[-2:]
PLAIN: Object = {"image": {"repository": "registry.example/penstock"}}
PILOTS: Object = {
    "enabled": True, "tokenSecret": "api-token", "queue": "team", "nodeSelector": {"pool": "cpu"}, "max": 7,
    "memory": "8GiB",
}  # fmt: skip
SERVER: Object = {
    "tlsSecret": "tls", "databaseSecret": "database", "storage": {"className": "fast"}, "allowedHosts": ["p.example"],
}  # fmt: skip
FULL: Object = {"image": {**PLAIN["image"], "pullSecret": "pull"}, "server": SERVER, "pilots": PILOTS}


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as made:
        yield made


def rendered(chart: Chart, values: Object) -> dict[tuple[str, str], Object]:
    """Return what Helm makes of the chart, by kind and name."""
    texts = chart.render(values, name="train", namespace="training").values()
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def pod_of(found: dict[tuple[str, str], Object], name: str) -> Any:
    return found["StatefulSet", name]["spec"]["template"]["spec"]


def test_lint_of_helm_has_no_warning() -> None:
    report = lint(CHART, FULL, strict=True)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda one: ".".join(map(str, one)))
@pytest.mark.parametrize("values", [PLAIN, FULL], ids=["plain", "full"])
def test_chart_is_valid_for_the_newest_releases(chart: Chart, values: Object, release: tuple[int, int]) -> None:
    found = rendered(chart, values)
    assert ("StatefulSet", "train-penstock") in found
    for one in found.values():
        validate(one, ".".join(map(str, release)))


def test_schema_refuses_a_field_that_is_misspelt(chart: Chart) -> None:
    wrong = rendered(chart, PLAIN)["StatefulSet", "train-penstock"]
    wrong["spec"]["serviceNane"] = wrong["spec"].pop("serviceName")
    with pytest.raises(Refused, match="serviceNane"):
        validate(wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, "repository"), ({**PLAIN, "pilots": {"enabled": True}}, "tokenSecret"), ({**PLAIN, "sever": {}}, "sever")],
)
def test_values_that_are_missing_or_unknown_are_refused(chart: Chart, values: Object, said: str) -> None:
    with pytest.raises((errors.HelmValuesError, errors.HelmRenderError), match=said):
        rendered(chart, values)


@pytest.mark.parametrize("name", ["train-penstock", "train-penstock-pilots"])
def test_pods_keep_the_restricted_security_standard(chart: Chart, name: str) -> None:
    pod = pod_of(rendered(chart, FULL), name)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_variables_of_the_server_are_settings(chart: Chart) -> None:
    (container,) = pod_of(rendered(chart, FULL), "train-penstock")["containers"]
    names = {one["name"].removeprefix("PENSTOCK_SERVER_").lower() for one in container["env"]} - {"home"}
    assert names <= set(Settings.model_fields)
    assert {"tls_cert", "database_url", "allowed_hosts"} <= names
    assert "insecure" not in names


def test_arguments_of_pilots_are_those_of_the_command(
    chart: Chart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = pod_of(rendered(chart, {**PLAIN, "pilots": PILOTS}), "train-penstock-pilots")["containers"]
    config = {
        "current-context": "here", "contexts": [{"name": "here", "context": {"cluster": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    argv = [*container["command"][1:], *container["args"], "--dry-run", "--url", "http://127.0.0.1:9", "--token", "t"]
    done = CliRunner().invoke(app, [*argv, "--state-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (job, *_) = yaml.safe_load_all(done.stdout)
    assert job["metadata"]["namespace"] == "training"
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}


def test_pilots_may_do_what_the_command_does_and_no_more(chart: Chart) -> None:
    found = rendered(chart, FULL)
    rules = {
        resource: set(rule["verbs"])
        for rule in found["Role", "train-penstock-pilots"]["rules"]
        for resource in rule["resources"]
    }
    assert rules == {
        "jobs": {"create", "get", "list", "watch", "patch", "delete"},
        "pods": {"get", "list", "watch", "delete"},
        "pods/status": {"patch"},
        "secrets": {"create"},
        "configmaps": {"create"},
    }
    assert pod_of(found, "train-penstock")["automountServiceAccountToken"] is False
