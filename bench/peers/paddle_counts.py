"""The numbers of paddlepaddle 2.6.2 for `fluid_counts`: its operators, its paddle.metric, or formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import static

from bench.peers import fluid_counts
from bench.peers.fluid_counts import COUNTS, Batch, CountCase, ObjectCase
from bench.peers.paddle_losses import Numbers, appended, fed, listed, started


def count(case: CountCase) -> Numbers:
    """What the layer returns for each batch."""
    return {f"batch {n}": [v for one in found for v in listed(one)] for n, found in enumerate(_results(case))}


def _results(case: CountCase) -> list[list[Any]]:
    if case.formula:
        formula = getattr(fluid_counts, case.formula)
        return [formula(case, case.batches[: n + 1]) for n in range(len(case.batches))]
    given = _data({**case.batches[0], **case.parameters}, case)
    attributes = case.arguments if case.attributes is None else case.attributes
    slots = {slot: given[name] for slot, name in case.slots.items()}
    made = appended(case.operator, slots, {**case.outputs, **case.beside}, attributes)
    fetched = [made[slot] for slot in case.outputs]
    executor = started()
    feeds = [fed({**batch, **case.parameters}, case.lengths) for batch in case.batches]
    return [executor.run(feed=feed, fetch_list=fetched, return_numpy=False) for feed in feeds]


def _data(batch: Batch, case: CountCase) -> dict[str, Any]:
    return {
        name: static.data(
            name, [-1, *v.shape[1:]] if name in case.lengths else list(v.shape), str(v.dtype), int(name in case.lengths)
        )
        for name, v in batch.items()
    }


def answered(case: ObjectCase) -> Numbers:
    """What the metric says after each update."""
    seen = [case.updates[: n + 1] for n in range(len(case.updates))]
    if case.formula:
        return {f"update {n}": listed(getattr(fluid_counts, case.formula)(some)) for n, some in enumerate(seen)}
    metric = getattr(paddle.metric, case.peer)(**case.arguments)
    found = {}
    for n, update in enumerate(case.updates):
        metric.update(*update)
        found[f"update {n}"] = listed(metric.accumulate())
    return found


def evaluated(name: str) -> Numbers:
    """What an evaluator of the name says after all batches."""
    if name == "ChunkEvaluator":
        counts = [[int(np.asarray(v).item()) for v in found[3:]] for found in _results(COUNTS["chunk_eval, IOB"])]
        return {"all": listed(fluid_counts.chunks([tuple(one) for one in counts]))}
    if name == "EditDistance":
        found = _results(COUNTS["edit_distance"])
        return {"all": listed(fluid_counts.distances([(np.asarray(d), int(np.asarray(n).item())) for d, n in found]))}
    return _mean_average_precision(COUNTS["detection_map"])


def _mean_average_precision(case: CountCase) -> Numbers:
    """The mean average precision of each batch and of all so far, by the operator's own state."""
    batch, state = _of_batch_and_state(case, _data(case.batches[0], case))
    executor, totals = started(), []
    for n, arrays in enumerate(case.batches):
        feed = {**fed(arrays, case.lengths), "has_state": np.array([n > 0], dtype=np.int32)}
        totals.append(executor.run(feed=feed, fetch_list=[batch, state], return_numpy=False))
    return {f"batch {n}": [v for one in found for v in listed(one)] for n, found in enumerate(totals)}


def _of_batch_and_state(case: CountCase, given: dict[str, Any]) -> list[Any]:
    block, attributes = static.default_main_program().global_block(), dict(case.attributes or {})
    inputs = {slot: given[name] for slot, name in case.slots.items()}
    of_batch = appended(case.operator, inputs, {**case.outputs, **case.beside}, attributes)["MAP"]
    kinds = {"PosCount": "int32", "TruePos": "float32", "FalsePos": "float32"}
    states = {slot: block.create_var(name=slot, dtype=kind, persistable=True) for slot, kind in kinds.items()}
    for slot in kinds:
        tensor = static.global_scope().var(slot).get_tensor()
        tensor.set(np.zeros((0, 1 if slot == "PosCount" else 2), dtype=kinds[slot]), paddle.CPUPlace())
    total = block.create_var(dtype="float32")
    block.append_op(
        type=case.operator,
        inputs={
            **{slot: [v] for slot, v in (inputs | states).items()},
            "HasState": [static.data("has_state", [1], "int32")],
        },
        outputs={"MAP": [total], **{f"Accum{slot}": [v] for slot, v in states.items()}},
        attrs=attributes,
    )
    return [of_batch, total]
