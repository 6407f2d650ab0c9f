"""What a Job and its pods say of the pilots: phase and reason of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.cluster.kubernetes.manifests import CANCELLED, GANG, INDEX, QUEUE_NAME
from penstock.cluster.provisioner import Phase, Pilot

Object = dict[str, Any]
_TERMINAL = ("Succeeded", "Failed")


def pilots(job: Object, pods: Iterable[Object]) -> tuple[Pilot, ...]:
    """Return every pilot of a Job, given the pods that belong to it."""
    newest: dict[int, Object] = {}
    for pod in sorted(pods, key=_age):
        newest[index_of(pod)] = pod
    return tuple(_pilot(job, index, newest.get(index)) for index in range(job["spec"]["completions"]))


def is_over(job: Object) -> bool:
    """Whether nothing of a Job will run again."""
    kinds = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    return any(one["type"] in kinds and one["status"] == "True" for one in job.get("status", {}).get("conditions", ()))


def index_of(pod: Object) -> int:
    """Return which of the pilots a pod is."""
    return int(pod["metadata"].get("annotations", {})[INDEX])


def cancelled(job: Object) -> frozenset[int]:
    """Return the pilots that were cancelled one by one."""
    return indices(job["metadata"].get("annotations", {}).get(CANCELLED, ""))


def indices(text: str) -> frozenset[int]:
    """Return the numbers of a list such as `0,2-4`, as Kubernetes writes them."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def is_lost(pod: Object) -> bool:
    """Whether the node of a pod is gone: it was deleted for that, and whether it still runs is unknown."""
    gone = any(reason == "DeletionByTaintManager" for reason, _ in _disruptions(pod))
    return "deletionTimestamp" in pod["metadata"] and _phase(pod) not in _TERMINAL and gone


def must_go(job: Object, pod: Object) -> bool:
    """Whether a pod is of a pilot that is over, and must not be replaced when it ends."""
    is_marked = any(one["type"] == CANCELLED for one in pod.get("status", {}).get("conditions", ()))
    return not is_marked and _phase(pod) not in _TERMINAL and (index_of(pod) in cancelled(job) or is_lost(pod))


def _pilot(job: Object, index: int, pod: Object | None) -> Pilot:
    name = f"{job['metadata']['labels'][GANG]}-{index}"
    status = job.get("status", {})
    if index in indices(status.get("completedIndexes", "")):
        return Pilot(name, Phase.ENDED, f"completed{_where(pod)}")
    if index in indices(status.get("failedIndexes", "")) or is_over(job):
        return Pilot(name, Phase.ENDED, _ending(pod) if pod else "failed")
    if pod is None or _phase(pod) in _TERMINAL:
        return Pilot(name, *_between(job, index, pod))
    if is_lost(pod):
        return Pilot(name, Phase.ENDED, f"lost with its node{_where(pod)}")
    if _phase(pod) == "Pending":
        is_gone = index in cancelled(job)
        return Pilot(name, Phase.ENDED if is_gone else Phase.PENDING, "cancelled" if is_gone else _waits_for(pod))
    is_ending = "deletionTimestamp" in pod["metadata"]
    return Pilot(name, Phase.RUNNING, f"{'ends' if is_ending else 'runs'}{_where(pod)}{_disruption(pod)}")


def _between(job: Object, index: int, pod: Object | None) -> tuple[Phase, str]:
    """Return what becomes of a pilot that has no pod now, given its last one."""
    if index in cancelled(job) or "deletionTimestamp" in job["metadata"]:
        return Phase.ENDED, "cancelled"
    if pod is not None and _phase(pod) == "Succeeded":
        return Phase.ENDED, f"completed{_where(pod)}"
    queue = job["metadata"]["labels"].get(QUEUE_NAME)
    if job["spec"].get("suspend"):
        return Phase.PENDING, f"suspended until Kueue admits it to the queue {queue!r}" if queue else "suspended"
    return Phase.PENDING, f"its pod will be replaced: {_ending(pod)}" if pod else "its pod is not created yet"


def _waits_for(pod: Object) -> str:
    """Return why a pod is pending: what a container waits for, else what the scheduler says."""
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason"):
            return _sentence(waiting["reason"], waiting.get("message", "")) + _where(pod)
    for one in pod.get("status", {}).get("conditions", ()):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return _sentence(one.get("reason", "not scheduled"), one.get("message", ""))
    return f"starts{_where(pod)}" if _where(pod) else "not scheduled yet"


def _ending(pod: Object) -> str:
    """Return why a pod ended."""
    status = pod.get("status", {})
    for reason, message in _disruptions(pod):
        return _sentence(reason, message) + _where(pod)
    if status.get("reason"):
        return _sentence(status["reason"], status.get("message", "")) + _where(pod)
    for container in _containers(pod):
        ended = container.get("state", {}).get("terminated")
        if ended:
            said = ended.get("message", "").strip().splitlines()[-1:] or [""]
            return _sentence(f"{ended.get('reason', 'ended')} with status {ended['exitCode']}", said[0]) + _where(pod)
    return f"{_phase(pod).lower()}{_where(pod)}"


def _disruption(pod: Object) -> str:
    return "".join(f": {_sentence(reason, message)}" for reason, message in _disruptions(pod))


def _disruptions(pod: Object) -> Iterator[tuple[str, str]]:
    """Yield why a pod was evicted, preempted or deleted with its node."""
    for one in pod.get("status", {}).get("conditions", ()):
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            yield one.get("reason", "disrupted"), one.get("message", "")


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _sentence(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason


def _where(pod: Object | None) -> str:
    node = pod["spec"].get("nodeName") if pod else None
    return f" on {node}" if node else ""


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _age(pod: Object) -> tuple[bool, str]:
    """Order pods of an index: the one that has not ended last, then by their creation."""
    return _phase(pod) not in _TERMINAL, pod["metadata"].get("creationTimestamp", "")
