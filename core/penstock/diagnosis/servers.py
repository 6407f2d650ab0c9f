"""Rules about waits for parameter servers: one straggler among them, one table, one trainer's way to one, or all.

In a synchronous step all trainers wait for the straggler, so a wait counts as the servers' only as far as the trainer
that waits least has it too. What a slow link explains (`penstock.diagnosis.links`) is not the servers'.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.diagnosis.case import NOTICED, Case, ms, percent
from penstock.diagnosis.links import explained_ns, slow_links
from penstock.diagnosis.sums import Finding, TableLoad, Trainer

WAITS = {"metric": "wait"}
"""What the matrix of the tab shows."""
SKEWED = 1.5
"""A server's ids of a table, in means of all servers, from which the table is what makes it slow."""
HOT = 0.2
"""Share of a table's pushes from which an id is named."""


def servers(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Waits that every trainer has: for one server, for one table of it, or for all servers alike."""
    on_the_way = explained_ns(case)
    per_server = {
        server: max(0.0, min(case.by_server[one.index, server] for one in stepping) - on_the_way.get(server, 0.0))
        for server in {server for _, server in case.by_server}
    }
    total = sum(per_server.values())
    if not per_server or total <= 0:
        return
    slowest = max(per_server, key=lambda server: per_server[server])
    rest = [ns for server, ns in per_server.items() if server != slowest]
    alone = not rest or per_server[slowest] > 1.7 * statistics.mean(rest)
    block, block_ns = _largest_block(case, [slowest] if alone else list(per_server), len(stepping))
    waited = per_server[slowest] if alone else total
    whom = f"pserver-{slowest}" if alone else f"the {len(per_server)} parameter servers"
    skewed = _skewed(case, slowest) if alone and rest else None
    sentence = f"{percent(case.share(waited))} of each step waits for {whom}"
    if skewed is not None:
        sentence += f", which has {_load(skewed, slowest)}"
    if block and block_ns > 0.3 * waited:
        sentence += f"; `{block}` is {ms(min(block_ns, waited))} of it"
    if alone and rest:
        sentence += f"; the other servers take {ms(statistics.mean(rest))}"
    cause = "server" if alone and rest else "table" if block_ns > 0.6 * waited else "servers"
    place, query = (block if cause == "table" else whom), WAITS
    if skewed is not None:
        cause, place, query = "hot_table", skewed.name, WAITS | {"table": skewed.name}
    yield Finding(cause=cause, sentence=sentence, share=case.share(waited), ms=waited / 1e6, place=place, tab="sync",
                  query=query)  # fmt: skip


def _skewed(case: Case, server: int) -> TableLoad | None:
    """The table of which a server has more ids than the others have in the mean, if there is one."""
    found = [one for one in case.sums.tables if len(one.ids) > 1 and _part(one, server) * len(one.ids) > SKEWED]
    return max(found, key=lambda one: one.ids.get(server, 0), default=None)


def _part(table: TableLoad, server: int) -> float:
    return table.ids.get(server, 0) / max(1, sum(table.ids.values()))


def _load(table: TableLoad, server: int) -> str:
    text = f"{percent(_part(table, server))} of the ids of `{table.name}`"
    return text + (f", id {table.hot_id} alone {percent(table.hot_share)}" if table.hot_share > HOT else "")


def _largest_block(case: Case, servers: Sequence[int], num_trainers: int) -> tuple[str, float]:
    of: dict[str, float] = defaultdict(float)
    for wait in case.sums.waits:
        if wait.block and wait.pserver in servers:
            of[_parameter(wait.block)] += wait.wait_ns / num_trainers
    block = max(of, key=lambda name: of[name], default="")
    return block, of.get(block, 0.0)


def _parameter(block: str) -> str:
    """The parameter of a block: `fc_0.w_0.block3` is a part of `fc_0.w_0`."""
    head, _, tail = block.rpartition(".block")
    return head if head and tail.isdecimal() else block


def ways(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """One trainer waits longer for one server than the others do, and is not early."""
    if len(stepping) < 2:
        return
    slow = {(link.trainer, link.pserver) for link in slow_links(case)}
    for (trainer, server), ns in case.by_server.items():
        if (trainer, server) in slow:
            continue
        others = [case.by_server[one.index, server] for one in stepping if one.index != trainer]
        more = ns - statistics.median(others)
        if case.late is not None and case.late.index != trainer and case.share(case.late_ns) >= NOTICED:
            continue  # it waits for the trainer that is late
        if case.share(more) < NOTICED / 2 or ns < 2 * statistics.median(others):
            continue
        name = f"trainer {trainer}"
        sentence = (
            f"{name} waits {ms(ns)} of each step for pserver-{server}, the others {ms(statistics.median(others))}"
        )
        yield Finding(cause="way", sentence=sentence, share=case.share(more), ms=more / 1e6,
                      place=f"{name} to pserver-{server}", tab="sync", query=WAITS)  # fmt: skip
