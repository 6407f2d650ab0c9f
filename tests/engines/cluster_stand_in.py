"""What the Job controller, the scheduler and the kubelets of a cluster would do, on the objects of `api_server`.

Every change is followed to its end at once (`settle`), so a test waits for nothing but watches. After the
documentation of Kubernetes on Indexed Jobs, pod failure policies, disruptions and pod deletion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engines.api_server import CREATED, ApiServer, Object, Store

INDEX = "batch.kubernetes.io/job-completion-index"
Condition = dict[str, str]


class StandIn:
    """Nodes with so many CPUs each. `unpullable`: images; `on_start`, `on_stop`: called for pods, if they are set."""

    def __init__(self, server: ApiServer, nodes: dict[str, int]) -> None:
        self.store: Store = server.store
        self.nodes = dict(nodes)
        self.unpullable: set[str] = set()
        self.on_start: Callable[[Object], None] = lambda pod: None
        self.on_stop: Callable[[Object], None] = lambda pod: None
        self._failures: dict[tuple[str, int], int] = {}
        self._created = 0
        self.store.settle = self.settle

    def settle(self) -> None:
        """Do what is to be done, until nothing is. Holds the lock of the store."""
        while any([*map(self._job, self.store.of("jobs")), *map(self._pod, self.store.of("pods")), self._garbage()]):
            pass

    def pod(self, name: str) -> Object:
        """Return the newest pod of a pilot."""
        gang, _, index = name.rpartition("-")
        mine = [
            one for one in self.store.of("pods")
            if one["metadata"]["labels"]["penstock.dev/gang"] == gang and one["metadata"]["annotations"][INDEX] == index
        ]  # fmt: skip
        return mine[-1]

    def lose(self, node: str) -> None:
        """Take a node away: its pods are deleted, and nobody there acts on it."""
        with self.store.lock:
            self.nodes.pop(node)
            for pod in self.store.of("pods"):
                if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running":
                    pod["metadata"]["deletionTimestamp"] = CREATED.format(0)
                    _mark(pod, "DisruptionTarget", "True", "DeletionByTaintManager", "Taint manager: deleting due to…")
                    self.on_stop(pod)
                    self.store.changed("pods", pod)
            self.settle()

    def end(self, name: str, status: int = 0, *, evicted: str = "") -> None:
        """End the container of a pilot; `evicted`: by whom."""
        with self.store.lock:
            self._end(self.pod(name), status, evicted)
            self.settle()

    def exited(self, pod: Object, status: int) -> None:
        """Take the end of a container that ended by itself. Holds the lock of the store."""
        self._end(pod, status)
        self.settle()

    def admit(self, job: str) -> None:
        """Do what Kueue does when there is quota."""
        with self.store.lock:
            found = self.store.get("jobs", job)
            found["spec"]["suspend"] = False
            self.store.changed("jobs", found)
            self.settle()

    def _end(self, pod: Object, status: int, evicted: str = "") -> None:
        self.on_stop(pod)
        pod["status"]["phase"] = "Succeeded" if status == 0 else "Failed"
        ended = {"exitCode": status, "reason": "Completed" if status == 0 else "Error"}
        pod["status"]["containerStatuses"] = [{"name": "agent", "state": {"terminated": ended}}]
        if evicted:
            _mark(pod, "DisruptionTarget", "True", evicted, "the node had to be drained")
        self.store.changed("pods", pod)

    def _job(self, job: Object) -> bool:
        """Count ended pods, and create those that are missing."""
        name, spec, status = job["metadata"]["name"], job["spec"], job.setdefault("status", {})
        mine = [one for one in self.store.of("pods") if one["metadata"]["labels"][_JOB] == name]
        if "deletionTimestamp" in job["metadata"]:
            return self._delete(job, mine)
        if status.get("conditions") or spec.get("suspend"):
            return False
        has_acted = [pod for pod in mine if self._count(job, pod)] != []
        done, failed = _numbers(status, "completedIndexes"), _numbers(status, "failedIndexes")
        for index in sorted(set(range(spec["completions"])) - done - failed):
            live = [one for one in mine if _index(one) == index and one["status"]["phase"] in ("Pending", "Running")]
            if not live:
                self._create(job, index)
                has_acted = True
        if len(done | failed) == spec["completions"]:
            status["conditions"] = [{"type": "Failed" if failed else "Complete", "status": "True"}]
            self.store.changed("jobs", job)
            return True
        return has_acted

    def _delete(self, job: Object, mine: list[Object]) -> bool:
        for pod in mine:
            if "deletionTimestamp" not in pod["metadata"]:
                pod["metadata"]["deletionTimestamp"] = CREATED.format(0)
                self.store.changed("pods", pod)
                return True
        if not mine or not job["metadata"].get("finalizers"):
            self.store.remove("jobs", job)
            return True
        return False

    def _count(self, job: Object, pod: Object) -> bool:
        """Take an ended pod into the status of its Job, as the podFailurePolicy says; once."""
        status, index = job["status"], _index(pod)
        phase, finalizers = pod["status"]["phase"], pod["metadata"].get("finalizers")
        if phase not in ("Succeeded", "Failed") or not finalizers:
            return False
        pod["metadata"]["finalizers"] = []
        kind = ""
        if phase == "Succeeded":
            kind = "completedIndexes"
        else:
            action = next(
                (rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"] if _meets(pod, rule)), ""
            )
            key = (job["metadata"]["uid"], index)
            self._failures[key] = self._failures.get(key, 0) + (action != "Ignore")
            if action == "FailIndex" or self._failures[key] > job["spec"]["backoffLimitPerIndex"]:
                kind = "failedIndexes"
        if kind:
            status[kind] = ",".join(map(str, sorted(_numbers(status, kind) | {index})))
            self.store.changed("jobs", job)
        return True

    def _create(self, job: Object, index: int) -> None:
        self._created += 1
        template = job["spec"]["template"]
        name = job["metadata"]["name"]
        metadata = {
            "name": f"{name}-{index}-{self._created:05}", "annotations": {INDEX: str(index)}, "finalizers": [_TRACKING],
            "labels": {**template["metadata"]["labels"], _JOB: name}, "ownerReferences": _owner(job),
        }  # fmt: skip
        spec = {**template["spec"]}
        self.store.add("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "conditions": []}})

    def _pod(self, pod: Object) -> bool:
        """Delete, bind or start a pod."""
        status, is_deleted = pod["status"], "deletionTimestamp" in pod["metadata"]
        if is_deleted and status["phase"] == "Pending":
            status["phase"] = "Failed"
            self.store.changed("pods", pod)
            return True
        if is_deleted and status["phase"] == "Running":
            if pod["spec"]["nodeName"] in self.nodes:
                self._end(pod, 0)
                return True
            return False
        if is_deleted and (not pod["metadata"]["finalizers"] or not self._has_job(pod)):
            self.store.remove("pods", pod)
            return True
        return not is_deleted and status["phase"] == "Pending" and self._schedule(pod)

    def _has_job(self, pod: Object) -> bool:
        job = self.store.objects.get(("jobs", pod["metadata"]["labels"][_JOB]))
        return job is not None and "deletionTimestamp" not in job["metadata"]

    def _schedule(self, pod: Object) -> bool:
        wanted = int(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        node = pod["spec"].get("nodeName") or next((one for one in self.nodes if self._free(one) >= wanted), None)
        if node is None:
            said = f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient cpu."
            return self._set(pod, "Unschedulable", said)
        pod["spec"]["nodeName"] = node
        if ("secrets", pod["metadata"]["labels"][_JOB]) not in self.store.objects:
            return self._wait(pod, "CreateContainerConfigError", "its secret was not found")
        image = pod["spec"]["containers"][0]["image"]
        if image in self.unpullable:
            return self._wait(pod, "ImagePullBackOff", f'Back-off pulling image "{image}"')
        pod["status"]["phase"] = "Running"
        pod["status"]["containerStatuses"] = [{"name": "agent", "state": {"running": {}}}]
        self.on_start(pod)
        self.store.changed("pods", pod)
        return True

    def _wait(self, pod: Object, reason: str, message: str) -> bool:
        found = [{"name": "agent", "state": {"waiting": {"reason": reason, "message": message}}}]
        if pod["status"].get("containerStatuses") == found:
            return False
        pod["status"]["containerStatuses"] = found
        self.store.changed("pods", pod)
        return True

    def _free(self, node: str) -> int:
        used = [
            int(one["spec"]["containers"][0]["resources"]["requests"]["cpu"])
            for one in self.store.of("pods")
            if one["spec"].get("nodeName") == node and one["status"]["phase"] in ("Pending", "Running")
        ]
        return self.nodes[node] - sum(used)

    def _set(self, pod: Object, reason: str, said: str) -> bool:
        if any(one.get("message") == said for one in pod["status"]["conditions"]):
            return False
        _mark(pod, "PodScheduled", "False", reason, said)
        self.store.changed("pods", pod)
        return True

    def _garbage(self) -> bool:
        """Remove Secrets and ConfigMaps whose Job is gone."""
        owners = {one["metadata"]["uid"] for one in self.store.of("jobs")}
        for kind in ("secrets", "configmaps"):
            for one in self.store.of(kind):
                if not {ref["uid"] for ref in one["metadata"].get("ownerReferences", [])} & owners:
                    self.store.remove(kind, one)
                    return True
        return False


_JOB, _TRACKING = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-tracking"


def _owner(job: Object) -> list[Any]:
    return [{"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}]


def _mark(pod: Object, kind: str, status: str, reason: str, message: str) -> None:
    kept: list[Condition] = [one for one in pod["status"]["conditions"] if one["type"] != kind]
    pod["status"]["conditions"] = [*kept, {"type": kind, "status": status, "reason": reason, "message": message}]


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _numbers(status: Object, key: str) -> set[int]:
    return {int(one) for one in status.get(key, "").split(",") if one}


def _meets(pod: Object, rule: Object) -> bool:
    held = {(one["type"], one["status"]) for one in pod["status"]["conditions"]}
    if "onPodConditions" in rule:
        return any((one["type"], one["status"]) in held for one in rule["onPodConditions"])
    codes = [one["state"].get("terminated", {}).get("exitCode") for one in pod["status"].get("containerStatuses", [])]
    return any(code in rule["onExitCodes"]["values"] for code in codes)
