"""The rule about links: a step waits while bytes are on their way between a trainer and a parameter server.

A parameter server records how long each request took to arrive, from its first byte, and how long it sent each
answer. So a slow link is distinguished from a slow server, which takes long between the two, and from a slow trainer,
which sends late but not slowly. A link is slow if that time is at least a third of the trainer's wait for the server
and more than the server's own work, and if others carry at least twice as many bytes a second; where all links are
alike, if it is twice what the servers need in between. The kernel buffers a part of an answer, which is on the way
unseen: so of the wait for a slow link all counts that the server did not need between request and answer. In a
synchronous step all trainers wait for what comes over the slow link, so the wait for that server is the link's as far
as it explains it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.diagnosis.case import Case, percent
from penstock.diagnosis.sums import Finding, Link, Trainer

ON_THE_WAY = 1 / 3
"""Share of a trainer's wait for a server in which bytes are seen on the way, from which it waits for the link."""
SLOWER = 2.0
"""Times a link's rate that others carry, from which it is slow."""
LEAST_BYTES = 64 << 10
"""Of a step: below that the time on the way is delay, not rate."""
_EVIDENCE = {"metric": "wait"}


def links(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """The links that steps wait for, in one finding."""
    slow = slow_links(case)
    if not slow:
        return
    waited: dict[int, float] = defaultdict(float)
    for link in slow:
        waited[link.trainer] += _waited_ns(case, link)
    ns = max(waited.values())
    which, verb = _named(slow), "carries" if len(slow) == 1 else "carry"
    sentence = (
        f"{which} {verb} {_rate([link.bytes_per_s for link in slow])}{' each' if len(slow) > 1 else ''}; "
        f"exchanges wait {percent(case.share(ns))} of the step for {'it' if len(slow) == 1 else 'them'}"
    )
    others = [link.bytes_per_s for link in _measured(case) if link not in slow and math.isfinite(link.bytes_per_s)]
    if others:
        sentence += f"; {'the others carry' if len(others) > 1 else 'the other carries'} {_rate(others)}"
    yield Finding(cause="link", sentence=sentence, share=case.share(ns), ms=ns / 1e6, place=_place(slow), tab="sync",
                  query=_EVIDENCE)  # fmt: skip


def slow_links(case: Case) -> list[Link]:
    """Return the links that are what steps wait for."""
    measured = _measured(case)
    waited_for = [link for link in measured if _is_waited_for(case, link)]
    fastest = max((link.bytes_per_s for link in measured), default=0.0)
    slow = [link for link in waited_for if link.bytes_per_s * SLOWER <= fastest]
    if slow:
        return slow
    alike = [link for link in waited_for if link.ns >= SLOWER * link.served_ns]
    return alike if len(alike) == len(measured) else []


def explained_ns(case: Case) -> dict[int, float]:
    """Return what of each server's wait is the links', in nanoseconds of a step."""
    found: dict[int, float] = {}
    for link in slow_links(case):
        found[link.pserver] = max(found.get(link.pserver, 0.0), _waited_ns(case, link))
    return found


def _measured(case: Case) -> list[Link]:
    return [link for link in case.sums.links if max(link.sent_bytes, link.received_bytes) >= LEAST_BYTES]


def _waited_ns(case: Case, link: Link) -> float:
    """Return what of a trainer's wait for a server is a slow link's."""
    waited = case.by_server.get((link.trainer, link.pserver), 0.0)
    return max(min(link.ns, waited), waited - link.served_ns)


def _is_waited_for(case: Case, link: Link) -> bool:
    waited = case.by_server.get((link.trainer, link.pserver), 0.0)
    return waited > 0 and link.ns >= ON_THE_WAY * waited and link.ns > link.work_ns


def _named(slow: Sequence[Link]) -> str:
    """Return which links these are, by the end that they share."""
    trainers, servers = {link.trainer for link in slow}, {link.pserver for link in slow}
    if len(slow) == 1:
        return f"the link from {_end(slow[0])} to pserver-{slow[0].pserver}"
    if len(trainers) == 1:
        return f"the links from {_end(slow[0])} to {len(servers)} servers"
    if len(servers) == 1:
        return f"the links from {len(trainers)} trainers to pserver-{slow[0].pserver}"
    return f"{len(slow)} links between trainers and servers"


def _place(slow: Sequence[Link]) -> str:
    trainers, servers = {link.trainer for link in slow}, {link.pserver for link in slow}
    if len(slow) == 1:
        return f"trainer {slow[0].trainer} to pserver-{slow[0].pserver}"
    if len(trainers) == 1:
        return f"trainer {slow[0].trainer}"
    return f"pserver-{slow[0].pserver}" if len(servers) == 1 else "links"


def _end(link: Link) -> str:
    return f"trainer {link.trainer}" + (f" on {link.node}" if link.node else "")


def _rate(bytes_per_s: Sequence[float]) -> str:
    mb = statistics.median(bytes_per_s) / 1e6
    return f"{mb:,.0f} MB/s" if mb >= 10 else f"{mb:.1f} MB/s"
