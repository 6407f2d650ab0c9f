"""Keeps a cluster's pilots as `scaling` decides: reads the queue and the scheduler, carries out, reports the reasons.

One process a cluster; it may end at any time, and pilots go on. A step that fails changes nothing that the next one
does not find: gangs are in a file, and every call of a provisioner may be repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.client import Client, Conflict, NotFound
from penstock.cluster import gangs as store
from penstock.cluster.gangs import Gang, Gangs
from penstock.cluster.pace import Pace
from penstock.cluster.provisioner import Phase, Pilot, Provisioner, Request
from penstock.cluster.scaling import Amounts, Answer, Limits, NodeFacts, PilotFacts, WaitingJob, decide
from penstock.process.private import write_private
from penstock.protocol.jobspec import JobSpec, memory_bytes
from penstock.protocol.rest import Job, Node, PilotReport

TOKEN_S = 29 * 86400
"""How long a join token is valid: longer than pilots wait in most queues, shorter than the server's limit."""
STATE_FILE, TOKEN_FILE = "gangs.json", "join.token"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one cluster. `url`: of the server, as pilots reach it. `ttl_s`: how long a pilot serves."""

    cluster: str
    url: str
    folder: Path
    limits: Limits
    ttl_s: float


@dataclass(slots=True)
class Keeper:
    """`clock`: monotonic seconds; `now`: seconds since 1970.

    `_retries`: gangs launched since one failed; only a pilot of these that joins shows that launches go well again.
    """

    client: Client
    provisioner: Provisioner
    settings: Settings
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    pace: Pace = field(default_factory=Pace)
    _idle_since: dict[str, float] = field(default_factory=dict)
    _retries: set[str] = field(default_factory=set)

    def step(self) -> Answer:
        """Look once, and act. Raises EngineAway or Unavailable; what was done by then stays done."""
        kept = store.load(self._path)
        for gang in kept.gangs:
            if not gang.handle:
                self._launch(kept, gang)
        seen = self._poll(kept)
        nodes = {node["name"]: node for node in self.client.nodes()}  # after the poll: also of those that have ended
        self._note_joined(kept, nodes)
        self._drop_ended(kept, seen)
        facts = [self._facts(gang, seen[name], nodes) for gang in kept.gangs for name in gang.pilots()]
        ours = {pilot.name for pilot in facts}
        others = [self._node(node) for name, node in nodes.items() if name not in ours]
        answer = self._paced(decide(self._waiting(), facts, others, self.settings.limits))
        self._carry_out(kept, answer, nodes)
        self._report(kept, seen, answer)
        return answer

    def down(self) -> None:
        """Cancel every pilot, and revoke their token."""
        kept = store.load(self._path)
        for gang in list(kept.gangs):
            if gang.handle:
                self.provisioner.cancel(gang.handle)
            kept.gangs.remove(gang)
            store.save(self._path, kept)
        if kept.token_id:
            with suppress(NotFound):
                self.client.revoke_token(kept.token_id)
            store.save(self._path, Gangs())
            (self.settings.folder / TOKEN_FILE).unlink(missing_ok=True)
        self.client.report_pilots(self.settings.cluster, [])

    def request(self, kept: Gangs, gang: Gang) -> Request:
        """Return what a gang asks for."""
        settings = self.settings
        return Request(
            gang.name, gang.count, settings.limits.shape, settings.ttl_s, settings.url, kept.token,
            settings.folder / TOKEN_FILE, once=settings.limits.once,
            labels=settings.limits.labels,
        )  # fmt: skip

    @property
    def _path(self) -> Path:
        return self.settings.folder / STATE_FILE

    def _waiting(self) -> list[WaitingJob]:
        found = [job for state in ("RECOVERING", "QUEUED") for job in self.client.jobs(state=state)]
        return [
            WaitingJob(job["name"], _needs(job), job["spec"].get("node_selector", {}))
            for job in sorted(found, key=lambda job: job["id"])
        ]

    def _poll(self, kept: Gangs) -> dict[str, Pilot]:
        """Return what the scheduler says of every pilot."""
        seen: dict[str, Pilot] = {}
        for gang in kept.gangs:
            answered = {pilot.name: pilot for pilot in self.provisioner.poll(gang.handle)}
            for name in gang.pilots():
                pilot = answered.get(name, Pilot(name, Phase.ENDED, f"{self.provisioner.engine} does not know it"))
                seen[name] = pilot
        return seen

    def _drop_ended(self, kept: Gangs, seen: dict[str, Pilot]) -> None:
        for gang in list(kept.gangs):
            for name in gang.pilots():
                if seen[name].phase is Phase.ENDED:
                    _log.info("pilot %s has ended: %s", name, seen[name].detail)
                    gang.ended.append(name)
            if not gang.pilots():
                kept.gangs.remove(gang)
                gone = [seen.pop(name) for name in gang.ended if name in seen]  # a gang of that name may come now
                self._note_end(gang, [pilot.detail for pilot in gone])
        store.save(self._path, kept)

    def _note_end(self, gang: Gang, details: list[str]) -> None:
        """A gang that ended by itself and of which no pilot ever joined makes the next launch wait."""
        self._retries.discard(gang.name)
        if not gang.has_joined and not gang.was_cancelled:
            self.pace.failed(next((text for text in details if text), ""), self.clock())
            self._retries.clear()

    def _note_joined(self, kept: Gangs, nodes: Mapping[str, Node]) -> None:
        """Note gangs of which a pilot has joined since the last step, in whatever state its node is by now."""
        for gang in kept.gangs:
            last = _last_seen(gang, nodes)
            if not gang.has_joined and any(gang.seen_before.get(name) != at for name, at in last.items()):
                gang.has_joined = True
                if gang.name in self._retries:
                    self.pace.joined()

    def _paced(self, answer: Answer) -> Answer:
        if not answer.launches or not self.pace.must_wait(self.clock()):
            return answer
        return replace(answer, launches=(), unmet=(*answer.unmet, self.pace.sentence()))

    def _facts(self, gang: Gang, pilot: Pilot, nodes: Mapping[str, Node]) -> PilotFacts:
        node = nodes.get(pilot.name)
        drained = pilot.name in gang.drained
        joined = None if node is None else self._node(node)
        return PilotFacts(pilot.name, pilot.phase, gang.why, pilot.detail, joined, is_drained_by_us=drained)

    def _node(self, node: Node) -> NodeFacts:
        is_busy = node["replicas"] > 0
        if is_busy or node["state"] != "READY":
            self._idle_since.pop(node["id"], None)
        since = self._idle_since.setdefault(node["id"], self.clock()) if not is_busy else self.clock()
        amounts: Amounts = (node["cpus"], node["gpus"], node["memory_bytes"])
        return NodeFacts(
            node["state"], amounts, node["cpus_used"], is_busy, self.clock() - since, node.get("labels", {})
        )

    def _carry_out(self, kept: Gangs, answer: Answer, nodes: Mapping[str, Node]) -> None:
        for gang in kept.gangs:
            mine = set(gang.pilots())
            cancelled = mine & set(answer.cancel)
            if cancelled:
                gang.was_cancelled = True
                store.save(self._path, kept)
                self.provisioner.cancel(gang.handle, cancelled)
            for name in mine & set(answer.drain):
                with suppress(Conflict):  # it drains already
                    self.client.want_node(nodes[name]["id"], "drain")
                gang.drained.append(name)
                store.save(self._path, kept)
        for launch in answer.launches:
            gang = Gang(kept.free_name(self.settings.cluster), launch.count, launch.why)
            gang.seen_before = _last_seen(gang, nodes)
            kept.gangs.append(gang)
            self._retries.add(gang.name)
            self._launch(kept, gang)

    def _launch(self, kept: Gangs, gang: Gang) -> None:
        self._renew_token(kept)
        store.save(self._path, kept)
        gang.handle = self.provisioner.launch(self.request(kept, gang))
        store.save(self._path, kept)
        _log.info("launched %d pilots as %s (%s): %s", gang.count, gang.name, gang.handle, gang.why)

    def _renew_token(self, kept: Gangs) -> None:
        """Have a join token that is valid for half of its time at least: pilots may wait long."""
        if kept.token and kept.token_until - self.now() > TOKEN_S / 2:
            return
        made = self.client.join_token(expires_in_s=TOKEN_S, reusable=True)
        kept.token, kept.token_id, kept.token_until = made["token"], made["id"], self.now() + TOKEN_S
        write_private(self.settings.folder / TOKEN_FILE, kept.token + "\n")

    def _report(self, kept: Gangs, seen: Mapping[str, Pilot], answer: Answer) -> None:
        reports: list[PilotReport] = []
        for gang in kept.gangs:
            for name in gang.pilots():
                state = seen[name].phase.value if name in seen else Phase.PENDING.value
                if name in answer.cancel or name in answer.drain or name in gang.drained:
                    state = "ENDING"
                reason = answer.reasons.get(name, f"{gang.why}: submitted to {self.provisioner.engine}")
                reports.append({"name": name, "state": state, "reason": reason[:1000]})
        self.client.report_pilots(self.settings.cluster, reports)


def _last_seen(gang: Gang, nodes: Mapping[str, Node]) -> dict[str, str]:
    """Return when the nodes of a gang's pilots were last seen, of those that ever were."""
    names = [f"{gang.name}-{index}" for index in range(gang.count)]
    return {name: at for name in names if name in nodes and (at := nodes[name]["last_seen_at"]) is not None}


def _needs(job: Job) -> tuple[Amounts, ...]:
    spec = JobSpec.model_validate(job["spec"])
    return tuple(
        (resources.cpus, resources.gpus, memory_bytes(resources.memory))
        for resources in (spec.trainers, spec.pservers)
        for _ in range(resources.count)
    )
