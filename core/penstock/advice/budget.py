"""Which settings a server simulates: those of which the derived graph is small enough. Pure.

Work counts the edges of a derived graph, and for each of its tasks `OWN_WORK` and one for each worker: about 1 us each
on one core of an AMD EPYC (Zen 4), less with many workers.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.advice.plan import LARGE_BYTES, PART_BYTES, Template, template_of
from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting, candidates

OWN_WORK = 16
MOST_WORK = 2_000_000
"""Of one setting: one that needs more is left out."""
MOST_WORK_OF_ALL = 6_000_000
"""Of all settings of an answer: the cheapest ones that fit together are simulated."""


def affordable(run: Recorded) -> tuple[list[Setting], list[Setting]]:
    """Return the candidates to simulate, the current one first, and those left out: all if the current one is."""
    sends = any(op.kind == "rpc" for op in run.graph.ops)
    wanted = candidates(run.setting.canonical(), cores=run.cores, rows=run.rows, reduce_only=sends)
    template = template_of(run.graph)
    work = {setting: work_of(template, setting, run.cores) for setting in wanted}
    current, *others = wanted
    left = MOST_WORK_OF_ALL - work[current]
    if work[current] > MOST_WORK:
        return [], wanted
    fitting = {current}
    for setting in sorted(others, key=work.__getitem__):
        if work[setting] > min(left, MOST_WORK):
            break
        left -= work[setting]
        fitting.add(setting)
    return [one for one in wanted if one in fitting], [one for one in wanted if one not in fitting]


def work_of(template: Template, setting: Setting, cores: int) -> int:
    """Return what planning and simulating a setting costs at most, without planning it."""
    workers = setting.workers(cores)
    tasks, edges = map(sum, zip(*_sizes(template, setting, workers), strict=True))
    return edges + tasks * (OWN_WORK + workers)


def _sizes(template: Template, setting: Setting, workers: int) -> Iterator[tuple[int, int]]:
    """Yield the tasks of each part and gradient, and the edges that end or begin at them."""
    replicas = setting.cpu_num
    updates = replicas if setting.exchange == "all_reduce" else 1
    yield 0, 0
    for part in template.parts.values():
        is_sparse = part.where == "update" and part.reads_every_replica
        tasks = replicas if part.where == "replica" or is_sparse else updates if part.where == "update" else 1
        reads = 1 if part.where == "replica" or (tasks == updates > 1 and not is_sparse) else replicas
        yield tasks, tasks * reads * len(part.before)
    for gradient in template.gradients if replicas > 1 else ():
        parts = max(1, min(workers, gradient.num_bytes // PART_BYTES)) if gradient.num_bytes > LARGE_BYTES else 1
        yield parts, parts * (len(gradient.makers) * replicas + len(gradient.readers) * updates)
