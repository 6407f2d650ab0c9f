"""The provisioner of Kubernetes: a gang is an Indexed Job; its handle is the Job's name."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress

from penstock.cluster.kubernetes import manifests, pods
from penstock.cluster.kubernetes.api import STRATEGIC, Api, Exists, Missing, Object
from penstock.cluster.kubernetes.manifests import CANCELLED, CLUSTER, GANG, MANAGED_BY, PodOptions
from penstock.cluster.kubernetes.watching import Watched
from penstock.cluster.provisioner import Pilot, Request

WATCH_S = 240.0
_JOB_NAME = "batch.kubernetes.io/job-name"


class Kubernetes:
    """`watch_s`: after how many seconds a watch is renewed."""

    engine = "Kubernetes"

    def __init__(self, api: Api, options: PodOptions, *, watch_s: float = WATCH_S) -> None:
        self._api, self._options = api, options
        space = options.namespace
        self._jobs_path = f"/apis/batch/v1/namespaces/{space}/jobs"
        self._core = f"/api/v1/namespaces/{space}"
        self._selector = f"{MANAGED_BY}=penstock,{CLUSTER}={options.cluster}"
        self._jobs = Watched(api, self._jobs_path, self._selector, watch_s=watch_s)
        self._pods = Watched(api, f"{self._core}/pods", self._selector, watch_s=watch_s)

    def close(self) -> None:
        """End the watches."""
        self._jobs.close()
        self._pods.close()
        self._api.close()

    def plan(self, request: Request) -> str:
        """Return the manifests."""
        return rendered(request, self._options)

    def launch(self, request: Request) -> str:
        """Create the Job, unless there is one of this gang that has not ended, and what its pods read.

        The Job comes first, because the others belong to it: until they are there its pods wait for them.
        """
        found = self._unfinished(request.name)
        if found is None:
            name = f"{request.name}-{secrets.token_hex(3)}"
            found = self._api.create(self._jobs_path, manifests.job(request, name, self._options))
        name = found["metadata"]["name"]
        with suppress(Exists):
            self._api.create(f"{self._core}/secrets", manifests.secret(request, name, self._options, found))
        with suppress(Exists):
            self._api.create(f"{self._core}/configmaps", manifests.config_map(request, name, self._options, found))
        return str(name)

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        """Look at the copy; at the API server itself only for a Job that the copy does not have (yet)."""
        known = {one["metadata"]["name"]: one for one in self._jobs.objects()}
        try:
            job = known.get(handle) or self._api.get(f"{self._jobs_path}/{handle}")
        except Missing:
            return ()
        mine = [one for one in self._pods.objects() if one["metadata"]["labels"].get(_JOB_NAME) == handle]
        for pod in mine:
            if pods.must_go(job, pod):
                self._end(pod)
        return pods.pilots(job, mine)

    def cancel(self, handle: str, names: Collection[str] = ()) -> None:
        """Delete the Job, or some of its pods for good.

        A Job replaces pods that are deleted. One with our condition is not: a rule of the Job's podFailurePolicy.
        """
        try:
            job = self._api.get(f"{self._jobs_path}/{handle}")
        except Missing:
            return
        wanted = pods.cancelled(job) | {int(name.rpartition("-")[2]) for name in names}
        if not names or len(wanted) == job["spec"]["completions"]:
            # the Job is there until its pods are gone: a poll shows that they end
            self._api.delete(f"{self._jobs_path}/{handle}", "Foreground")
            return
        text = ",".join(str(index) for index in sorted(wanted))
        with suppress(Missing):
            job = self._api.patch(f"{self._jobs_path}/{handle}", {"metadata": {"annotations": {CANCELLED: text}}})
        listed = self._api.get(f"{self._core}/pods", labelSelector=f"{_JOB_NAME}={handle}")
        for pod in listed["items"]:
            if pods.must_go(job, pod):
                self._end(pod)

    def _unfinished(self, gang: str) -> Object | None:
        listed = self._api.get(self._jobs_path, labelSelector=f"{self._selector},{GANG}={gang}")
        for one in listed["items"]:
            if not pods.is_over(one) and "deletionTimestamp" not in one["metadata"]:
                return dict(one)
        return None

    def _end(self, pod: Object) -> None:
        """Mark a pod as one that is not to be replaced, and delete it."""
        path = f"{self._core}/pods/{pod['metadata']['name']}"
        condition = {"type": CANCELLED, "status": "True", "reason": "CancelledByPenstock"}
        with suppress(Missing):
            self._api.patch(f"{path}/status", {"status": {"conditions": [condition]}}, STRATEGIC)
            self._api.delete(path)


def rendered(request: Request, options: PodOptions) -> str:
    """Return what `launch` would create, as YAML, without the token and other secrets."""
    name = f"{request.name}-0"
    secret = manifests.secret(request, name, options)
    secret["stringData"] = {key: f"<the value of {key}>" for key in secret["stringData"]}
    return manifests.as_yaml(
        [manifests.job(request, name, options), secret, manifests.config_map(request, name, options)]
    )
