"""What a step takes with other parameter servers and trainers, in another mode, over another link. Pure.

The model has one recorded setting (`exchanged.Exchanged`), and assumes:

1. Each trainer keeps its batch, so more trainers are more rows a step: settings are ranked by samples/s.
2. Blocks are cut as evenly over another number of servers as they are now (`skew`).
3. A turn is a trainer's own time and its wait. Own time is the same in every setting; but where replicas share the
   cores of one host it grows by the cores that all of them ask for meanwhile, over those that are there.
4. A link carries both directions at once. The slowest counts: a trainer's, or that of the server with the most bytes.
   In rounds (sync) all trainers use it at once; without rounds each is slowed by the share that the others use.
5. Gradients that leave during the backward pass (`ahead_ns`) hide their time on the link, but at most half (`TAIL`) of
   it: rows and the last gradients are ready at the end, and values come back after them.
6. A step waits for `SERIAL` of the processor time that a server has for it, and in rounds for that of all trainers.
7. A round takes until the last trainer has pushed: the expected maximum of as many normal draws as there are trainers,
   with the deviation of the recorded turns. Without rounds nothing is waited for.
8. A byte over a network costs `TCP_NS` of processor time on each side; through shared memory it does not.
9. More replicas run where the present ones do: on one host, if all of them do; else on hosts of their own.
10. What the rates of 4 to 7 leave of the recorded wait, stays. The rate of a link is not recorded: what `SERIAL` and
    stragglers leave of the wait is the link's (`link_of`).

Not predicted: GEO from other modes or to them (its trainers update copies of their own, with operators that the
recorded graph lacks); several threads of half-async; a script that cuts its batches by the number of trainers; what
another global batch or staleness does to what is learned; delay; other processes on the same cores. Constants are of
one machine, two cores of an AMD EPYC (Zen 4): docs/performance.md says from which runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.advice.exchanged import Exchanged, Mode

LINKS_GBIT = (1.0, 10.0, 25.0)
SIZES = (1, 2, 4)
TAIL = 0.5
SERIAL = 0.25
TCP_NS = 1.3
"""Of a byte that is sent or received."""
FASTEST_GBIT = 100.0
"""A link that leaves no wait may be any faster one."""
LEAST_GAIN = 0.05
"""What promises less than this is no reason to change: the current setting stands before it."""


@dataclass(frozen=True, slots=True, order=True)
class Cluster:
    """`link_gbit`: of each host, 0 where all replicas are on one; `is_shared`: they share the cores of one machine."""

    num_pservers: int
    num_trainers: int
    mode: Mode
    link_gbit: float = 0.0
    is_shared: bool = True

    @property
    def has_rounds(self) -> bool:
        """Whether servers update with the gradients of all trainers."""
        return self.mode == "sync"

    @property
    def name(self) -> str:
        """The setting in words: "2 servers, 1 trainer, sync, 10 Gbit/s"."""
        counts = ((self.num_pservers, "server"), (self.num_trainers, "trainer"))
        parts = [f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts]
        link = f"{self.link_gbit:.2g} Gbit/s" if self.link_gbit else "one host"
        return ", ".join([*parts, self.mode.replace("_", "-"), link])


@dataclass(frozen=True, slots=True)
class Placed:
    """One setting. Of a trainer's turn, in ns: `own_ns` and waits for links, servers, other trainers.

    `can_run`: it differs from the current one in numbers of servers and trainers alone.
    """

    cluster: Cluster
    turn_ns: float
    rows: int
    own_ns: float
    link_ns: float
    server_ns: float
    straggler_ns: float
    is_current: bool
    can_run: bool = False
    reason: str = ""

    @property
    def samples_per_s(self) -> float:
        """Of all trainers."""
        return self.rows / self.turn_ns * 1e9

    @property
    def wait_ns(self) -> float:
        """The rest of the turn."""
        return self.turn_ns - self.own_ns


def current_of(run: Exchanged, *, link_gbit: float | None = None) -> Cluster:
    """Return the recorded setting. `link_gbit`: of its hosts, if it is known; else as `link_of` has it."""
    shares = run.num_hosts == 1
    link = 0.0 if shares else link_of(run) if link_gbit is None else link_gbit
    return Cluster(run.num_pservers, run.num_trainers, run.mode, link, shares)


def candidates(current: Cluster) -> list[Cluster]:
    """Return the settings worth a prediction, the current one first: sizes, then the other mode, then other links."""
    pservers, trainers = (sorted({*SIZES, now}) for now in (current.num_pservers, current.num_trainers))
    found = [replace(current, num_pservers=s, num_trainers=t) for s in pservers for t in trainers]
    if current.mode != "geo":
        other: Mode = "async" if current.has_rounds else "sync"
        found.append(replace(current, mode=other))
        found += [
            replace(current, link_gbit=rate, is_shared=False)
            for rate in LINKS_GBIT
            if abs(rate / current.link_gbit - 1 if current.link_gbit else 1.0) > 0.2
        ]
    return list(dict.fromkeys([current, *found]))


def advise(run: Exchanged, current: Cluster, clusters: Sequence[Cluster] | None = None) -> list[Placed]:
    """Return each setting with its prediction, most samples/s first; the current one is always among them."""
    model = _Model(run, current)
    wanted = candidates(current) if clusters is None else clusters
    made = [model.placed(one) for one in dict.fromkeys([current, *wanted])]
    found = [replace(one, reason=_reason(one, made[0])) for one in made]
    return sorted(found, key=lambda one: -one.samples_per_s * (1 + LEAST_GAIN if one.is_current else 1))


def link_of(run: Exchanged) -> float:
    """Return the rate of a link in Gbit/s that explains what servers and stragglers leave of the recorded wait."""
    now = Cluster(run.num_pservers, run.num_trainers, run.mode, FASTEST_GBIT, is_shared=False)
    model = _Model(run, now)
    exposed = run.wait_ns - model.server_ns(now) - model.straggler_ns(now)
    busy = exposed / TAIL if exposed / TAIL <= exposed + run.ahead_ns else exposed + run.ahead_ns
    at_fastest = model.busy_ns(now, run.turn_ns)
    return min(FASTEST_GBIT, FASTEST_GBIT * at_fastest / busy) if busy > at_fastest > 0 else FASTEST_GBIT


def late_by(trainers: int) -> float:
    """Return by how many deviations the last of several normal draws is expected to be late (Blom)."""
    return statistics.NormalDist().inv_cdf((trainers - 0.375) / (trainers + 0.25)) if trainers > 1 else 0.0


class _Model:
    def __init__(self, run: Exchanged, current: Cluster) -> None:
        self.run, self.current = run, current
        self._rest_ns = 0.0
        found = self.placed(current)
        self._rest_ns = run.wait_ns - found.link_ns - found.server_ns - found.straggler_ns

    def placed(self, to: Cluster) -> Placed:
        """Return what a setting takes. A turn and the share of a link that the others use depend on each other."""
        server, straggler = self.server_ns(to), self.straggler_ns(to)
        own = self.own_ns(to)
        turn, link = self.run.turn_ns, 0.0
        for _ in range(8):
            link = self.exposed_ns(self.busy_ns(to, turn), own)
            turn = max(own + max(0.0, link + server + straggler + self._rest_ns), self._least_ns(to))
        resized = replace(self.current, num_pservers=to.num_pservers, num_trainers=to.num_trainers)
        return Placed(
            to, turn, self.run.rows * to.num_trainers, own, link, server, straggler, is_current=to == self.current,
            can_run=to != self.current and to == resized,
        )  # fmt: skip

    def own_ns(self, to: Cluster) -> float:
        return max(1.0, self.run.own_ns + self._more_ns(to)) * self._stretch(to) / self._stretch(self.current)

    def _more_ns(self, to: Cluster) -> float:
        """Processor time that a trainer needs more than now, for packets."""
        return TCP_NS * self._bytes * (bool(to.link_gbit) - bool(self.current.link_gbit))

    def _stretch(self, to: Cluster) -> float:
        """Cores that all replicas ask for while trainers compute, over those that are there."""
        if not to.is_shared:
            return 1.0
        computing = min(float(self.run.cores), self.run.trainer_cpu_ns / max(1.0, self.run.own_ns))
        serving = self._served_ns(to) / max(1.0, self.run.turn_ns)
        return max(1.0, to.num_trainers * (computing + serving) / self.run.cores)

    def _served_ns(self, to: Cluster) -> float:
        """Processor time of all servers for one step of one trainer."""
        return max(0.0, self.run.server_cpu_ns + self._more_ns(to))

    def server_ns(self, to: Cluster) -> float:
        each = SERIAL * self._served_ns(to) / to.num_pservers
        if to.has_rounds:
            return each * to.num_trainers
        return each * (1 + (to.num_trainers - 1) * min(1.0, each / SERIAL / max(1.0, self.run.turn_ns)))

    def straggler_ns(self, to: Cluster) -> float:
        return late_by(to.num_trainers) * self.run.deviation_ns if to.has_rounds else 0.0

    def busy_ns(self, to: Cluster, turn_ns: float) -> float:
        """Return for how long the slowest link is busy with a step. `turn_ns`: of the trainers beside it."""
        if not to.link_gbit:
            return 0.0
        one = 8 * max(self.run.sent_bytes, self.run.received_bytes) / to.link_gbit
        at_server = one * self._share(to)
        if to.has_rounds:
            return max(one, at_server * to.num_trainers)
        return max(one, at_server * (1 + (to.num_trainers - 1) * min(1.0, at_server / max(1.0, turn_ns))))

    def exposed_ns(self, busy_ns: float, own_ns: float) -> float:
        """Return what the backward pass does not hide of the time on a link."""
        ahead = self.run.ahead_ns * own_ns / max(1.0, self.run.own_ns)
        return max(TAIL * busy_ns, busy_ns - ahead)

    def _least_ns(self, to: Cluster) -> float:
        """Return the turn in which the processors, or the link of the server with the most bytes, are never idle."""
        used = self.run.trainer_cpu_ns + self._more_ns(to) + self._served_ns(to)
        processors = to.num_trainers * used / self.run.cores if to.is_shared else 0.0
        link = 8 * max(self.run.sent_bytes, self.run.received_bytes) / to.link_gbit if to.link_gbit else 0.0
        return max(processors, link * self._share(to) * to.num_trainers)

    @property
    def _bytes(self) -> float:
        return self.run.sent_bytes + self.run.received_bytes

    def _share(self, to: Cluster) -> float:
        """Share of all bytes that the server with the most of them has."""
        return min(1.0, self.run.skew / to.num_pservers) if to.num_pservers > 1 else 1.0


def _reason(one: Placed, now: Placed) -> str:
    """Say what the turn consists of, or what differs from the current setting: the largest difference first."""
    if one.is_current:
        waits = [
            (one.server_ns, "servers"), (one.link_ns, "links"), (one.straggler_ns, "the last trainer"),
        ]  # fmt: skip
        of = ", ".join(f"{_ms(ns)} for {what}" for ns, what in sorted(waits, reverse=True) if ns > 0.01 * one.turn_ns)
        return f"as recorded: a trainer waits {_ms(one.wait_ns)} of {_ms(one.turn_ns)}" + (f": {of}" if of else "")
    parts = [
        (one.own_ns - now.own_ns, "{} of computing"), (one.link_ns - now.link_ns, "{} for links"),
        (one.server_ns - now.server_ns, "{} for servers"),
        (one.straggler_ns - now.straggler_ns, "{} for the last trainer"),
    ]  # fmt: skip
    said = [
        (abs(ns), text.format(f"{_ms(abs(ns))} {'more' if ns > 0 else 'less'}"))
        for ns, text in parts if abs(ns) > 0.01 * now.turn_ns
    ]  # fmt: skip
    found = "; ".join(text for _, text in sorted(said, reverse=True)) or "no part of a turn changes by more than 1 %"
    rows = f"{one.rows} rows a step, not {now.rows}: " if one.rows != now.rows and one.cluster.has_rounds else ""
    return rows + found + _on_whom(one, now)


def _on_whom(one: Placed, now: Placed) -> str:
    if one.cluster.mode != now.cluster.mode:
        return f"; the script sets the mode ({'sync_mode=True' if one.cluster.has_rounds else 'sync_mode=False'})"
    if one.cluster.link_gbit and not now.cluster.link_gbit:
        return "; each replica on a host of its own"
    return ""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"
