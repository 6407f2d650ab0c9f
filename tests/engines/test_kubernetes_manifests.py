"""What is submitted to Kubernetes: valid for the two newest releases, restricted, and what the command prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kubernetes_validate.utils import all_versions
from tests.engines.api_server import Object, Refused, validate
from tests.engines.contract import request
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cluster.kubernetes import manifests
from penstock.cluster.kubernetes.manifests import PodOptions
from penstock.cluster.provisioner import Shape
from penstock.errors import SpecError

RELEASES = sorted({tuple(map(int, one.split(".")[:2])) for one in all_versions()})[-2:]
PLAIN = PodOptions("registry.example/penstock:1", "pilots", "kubernetes")
FULL = PodOptions(
    "registry.example/penstock:1", "pilots", "kubernetes", "team", {"pool": "gpu"}, ("nvidia.com/gpu=a:NoSchedule",),
    {"PENSTOCK_LOG": "1"}, "PEM", "pull", "low",
)  # fmt: skip


def submitted(folder: Path, options: PodOptions) -> list[Object]:
    """Return what a gang of two with GPUs is."""
    asked = replace(request(folder, "gang", 2), shape=Shape(4, 8 << 30, 2))
    owner = {"metadata": {"uid": "1"}}
    return [
        manifests.job(asked, "gang-0", options),
        manifests.secret(asked, "gang-0", options, owner),
        manifests.config_map(asked, "gang-0", options, owner),
    ]


@pytest.mark.parametrize("release", RELEASES, ids=lambda one: ".".join(map(str, one)))
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_manifests_are_valid_for_the_newest_releases(
    release: tuple[int, int], options: PodOptions, tmp_path: Path
) -> None:
    for one in submitted(tmp_path, options):
        validate(one, ".".join(map(str, release)))


def test_schema_refuses_a_field_that_is_misspelt(tmp_path: Path) -> None:
    wrong = submitted(tmp_path, PLAIN)[0]
    wrong["spec"]["podReplacmentPolicy"] = wrong["spec"].pop("podReplacementPolicy")
    with pytest.raises(Refused, match="podReplacmentPolicy"):
        validate(wrong)


def test_pods_keep_the_restricted_security_standard(tmp_path: Path) -> None:
    pod = submitted(tmp_path, FULL)[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    writable = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
    assert {one["name"] for one in container["volumeMounts"] if not one.get("readOnly")} == writable
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_pod_has_what_its_jobs_get_and_some_for_the_agent(tmp_path: Path) -> None:
    (container,) = submitted(tmp_path, PLAIN)[0]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8448Mi", "nvidia.com/gpu": "2"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    offered = container["args"][container["args"].index("--memory") + 1]
    assert int(offered) == 8 << 30


def test_pod_outlives_the_end_of_its_pilot(tmp_path: Path) -> None:
    pod = submitted(tmp_path, PLAIN)[0]["spec"]["template"]["spec"]
    assert pod["activeDeadlineSeconds"] > 600 + 20 and pod["terminationGracePeriodSeconds"] > 20


def test_queue_of_kueue_suspends_the_job(tmp_path: Path) -> None:
    job = submitted(tmp_path, FULL)[0]
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "suspend" not in submitted(tmp_path, PLAIN)[0]["spec"]


@pytest.mark.parametrize("text", ["gpu", ":NoSchedule", "gpu:Never"])
def test_toleration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="KEY"):
        manifests.job(request(tmp_path, "gang", 1), "gang-0", replace(PLAIN, tolerations=(text,)))


def test_dry_run_prints_what_would_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "kubeconfig"
    context = {"name": "here", "context": {"cluster": "c", "namespace": "pilots"}}
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}
    config.write_text(yaml.safe_dump({"current-context": "here", "contexts": [context], "clusters": [cluster]}))
    monkeypatch.setenv("KUBECONFIG", str(config))
    argv = ["cluster", "kubernetes", "--dry-run", "--url", "http://127.0.0.1:9", "--token", "psk_mine"]
    options = ["--image", "example/penstock", "--node-selector", "pool=gpu", "--queue", "team"]
    done = CliRunner().invoke(app, [*argv, *options, "--state-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = list(yaml.safe_load_all(done.stdout))
    assert [one["kind"] for one in found] == ["Job", "Secret", "ConfigMap"]
    for one in found:
        validate(one)
    assert found[0]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert found[0]["metadata"]["namespace"] == "pilots"
    assert "psk_mine" not in done.stdout
