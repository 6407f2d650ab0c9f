"""What a gang is on Kubernetes: an Indexed Job, the Secret of its join token, and the ConfigMap of its settings.

Pure. The pods meet the "restricted" Pod Security Standard: no root, no privilege escalation, no capabilities, a
read-only root file system. Secret and ConfigMap belong to the Job, and go with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from penstock.cluster.provisioner import Request
from penstock.errors import SpecError
from penstock.protocol.environment import is_secret
from penstock.settings import JOIN_TOKEN, NODE_ADDRESS

Manifest = dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
GANG, CLUSTER = "penstock.dev/gang", "penstock.dev/cluster"
CANCELLED = "penstock.dev/cancelled"
"""Annotation of a Job: the indices of its cancelled pilots. As a condition of a pod: it is not to be replaced."""
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
INDEX = "batch.kubernetes.io/job-completion-index"
USER = 10001
AGENT_MEMORY = 256 << 20
"""For the agent itself, beside what it offers to jobs."""
GRACE_S = 40
"""From SIGTERM to SIGKILL: a pilot ends what it runs within 20 s, and reports it."""
LEEWAY_S = 1800
"""How much longer than its pilot a pod may run: its image is pulled first, and what it runs ends last."""
KEPT_S = 600
"""How long an ended Job is retained, with the reasons why its pods ended."""
ATTEMPTS = 3
"""How often a pilot that failed is started again; evicted and preempted ones are not counted."""
_NEVER_AGAIN = [2, 4]
"""Exit status of agents that the next one would have, too: usage, refused by the server."""
_STATE = "/var/lib/penstock"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodOptions:
    """How pods of a cluster are made. `queue`: a LocalQueue of Kueue. `ca`: PEM of the server's authority.

    `environ`: variables of the agents. `tolerations`: as `KEY[=VALUE]:EFFECT`.
    """

    image: str
    namespace: str
    cluster: str
    queue: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    ca: str = ""
    pull_secret: str = ""
    priority_class: str = ""
    gpu_resource: str = "nvidia.com/gpu"


def job(request: Request, name: str, options: PodOptions) -> Manifest:
    """Return the Job of a gang, called `name`. Raises SpecError if the gang's name is none for Kubernetes."""
    if not _LABEL.fullmatch(request.name):
        raise SpecError(
            f"{request.name!r} cannot name pods: give --name of at most 36 lower-case letters, digits and '-'"
        )
    labels = {**_labels(request, options), **({QUEUE_NAME: options.queue} if options.queue else {})}
    spec = {
        "completionMode": "Indexed",
        "completions": request.count,
        "parallelism": request.count,
        "backoffLimitPerIndex": ATTEMPTS,
        "podReplacementPolicy": "Failed",  # two agents of one name would take the node from each other
        "podFailurePolicy": {"rules": _failure_rules()},
        "ttlSecondsAfterFinished": KEPT_S,
        **({"suspend": True} if options.queue else {}),
        "template": {"metadata": {"labels": _labels(request, options)}, "spec": _pod(request, name, options)},
    }
    metadata = {"name": name, "namespace": options.namespace, "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def secret(request: Request, name: str, options: PodOptions, owner: Manifest | None = None) -> Manifest:
    """Return the Secret of the join token. `owner`: the Job as the API server returned it."""
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True,
        "metadata": _metadata(request, name, options, owner),
        "stringData": {**_parted(options.environ)[1], "join-token": request.token},
    }  # fmt: skip


def config_map(request: Request, name: str, options: PodOptions, owner: Manifest | None = None) -> Manifest:
    """Return the ConfigMap of the variables of agents, and of the authority by which they know the server."""
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "immutable": True,
        "metadata": _metadata(request, name, options, owner),
        "data": {**_parted(options.environ)[0], **({"ca.crt": options.ca} if options.ca else {})},
    }  # fmt: skip


def _parted(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that everyone may read, and those whose name or value is a secret's."""
    secrets = {name: value for name, value in environ.items() if is_secret(name, value)}
    return {name: value for name, value in environ.items() if name not in secrets}, secrets


def as_yaml(manifests: list[Manifest]) -> str:
    """Return documents that `kubectl apply -f -` takes."""
    return "".join(f"---\n{yaml.safe_dump(one, sort_keys=False, width=120)}" for one in manifests)


def _labels(request: Request, options: PodOptions) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "penstock-pilot", MANAGED_BY: "penstock", CLUSTER: options.cluster,
        GANG: request.name,
    }  # fmt: skip


def _metadata(request: Request, name: str, options: PodOptions, owner: Manifest | None) -> Manifest:
    found: Manifest = {"name": name, "namespace": options.namespace, "labels": _labels(request, options)}
    if owner is not None:
        found["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner["metadata"]["uid"]}
        ]
    return found


def _failure_rules() -> list[Manifest]:
    return [
        {"action": "FailIndex", "onPodConditions": [{"type": CANCELLED, "status": "True"}]},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailIndex",
            "onExitCodes": {"containerName": "agent", "operator": "In", "values": _NEVER_AGAIN},
        },
    ]


def _pod(request: Request, name: str, options: PodOptions) -> Manifest:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "activeDeadlineSeconds": int(request.ttl_s) + LEEWAY_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        **({"tolerations": [_toleration(text) for text in options.tolerations]} if options.tolerations else {}),
        **({"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}),
        **({"priorityClassName": options.priority_class} if options.priority_class else {}),
        "containers": [_container(request, name, options)],
        "volumes": _volumes(name, options),
    }  # fmt: skip


def _container(request: Request, name: str, options: PodOptions) -> Manifest:
    amounts = _amounts(request, options)
    mounts = [
        {"name": "state", "mountPath": _STATE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *([{"name": "settings", "mountPath": "/etc/penstock", "readOnly": True}] if options.ca else []),
    ]
    return {
        "name": "agent",
        "image": options.image,
        "command": ["python", "-m", "penstock_worker"],
        # $(…) is replaced by the kubelet
        "args": [
            *request.agent_arguments(), "--name", f"{request.name}-$(PILOT_INDEX)",
            "--state-dir", f"{_STATE}/agent",
        ],
        "env": _environ(name, options),
        "resources": {"requests": amounts, "limits": {**amounts}},  # two, so that YAML has no alias
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }  # fmt: skip


def _environ(name: str, options: PodOptions) -> list[Manifest]:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    return [
        {"name": "PILOT_INDEX", "valueFrom": index},
        {"name": JOIN_TOKEN.name, "valueFrom": {"secretKeyRef": {"name": name, "key": "join-token"}}},
        {"name": NODE_ADDRESS.name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": _STATE},
        *([{"name": "SSL_CERT_FILE", "value": "/etc/penstock/ca.crt"}] if options.ca else []),
        *(
            {"name": one, "valueFrom": {kind: {"name": name, "key": one}}}
            for kind, part in zip(("configMapKeyRef", "secretKeyRef"), _parted(options.environ), strict=True)
            for one in sorted(part)
        ),
    ]


def _volumes(name: str, options: PodOptions) -> list[Manifest]:
    settings = {"name": name, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    return [
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container's own has 64 MiB
        *([{"name": "settings", "configMap": settings}] if options.ca else []),
    ]


def _amounts(request: Request, options: PodOptions) -> dict[str, str]:
    shape = request.shape
    memory = -(-(shape.memory_bytes + AGENT_MEMORY) // (1 << 20))
    gpus = {options.gpu_resource: str(shape.gpus)} if shape.gpus else {}
    return {"cpu": str(shape.cpus), "memory": f"{memory}Mi", **gpus}


def _toleration(text: str) -> Manifest:
    """Return a toleration, of `KEY[=VALUE]:EFFECT`. Raises SpecError."""
    both, has_effect, effect = text.rpartition(":")
    key, has_value, value = both.partition("=")
    if not key or not has_effect or effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise SpecError(f"a toleration is {text!r}; expected KEY[=VALUE]:NoSchedule, PreferNoSchedule or NoExecute")
    rest = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
    return {"key": key, **rest, "effect": effect}
