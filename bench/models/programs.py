"""The workloads as Penstock runs them: the click-through ones as Fluid programs, the others captured from torch.

`trainer(workload)` gives an executor with the workload's initial values in a scope of its own, and the batches as it is
fed; `make` of `bench.peers.penstock_executor` times it, other benchmarks may take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import penstock as fluid
from bench.models import modules
from bench.workloads.workload import Array, Workload
from penstock.scope import Scope


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload's programs; `loss` is a name. `feeds` are all its batches under the names of its data layers."""

    main: Any
    startup: Any
    loss: str
    feeds: Sequence[Mapping[str, Any]]


def record_ctr(workload: Workload) -> Recorded:
    """Record CTR-DNN in Fluid's own words: a lookup for each slot, in one shared table or a table each."""
    slots = workload.feeds["ids"].shape[2]
    shared = "table" in workload.weights
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        parts = []
        for slot in range(slots):
            ids = fluid.layers.data(name=f"C{slot + 1}", shape=[1], dtype="int64")
            name = "table" if shared else f"table{slot}"
            size = list(workload.weights[name].shape)
            parts.append(fluid.layers.embedding(ids, size, is_sparse=True, param_attr=fluid.ParamAttr(name=name)))
        parts.append(fluid.layers.data(name="dense", shape=[workload.feeds["dense"].shape[2]], dtype="float32"))
        hidden = fluid.layers.concat(parts, axis=1)
        last = sum(key.startswith("w") for key in workload.weights) - 1
        for layer in range(last + 1):
            hidden = fluid.layers.fc(
                hidden,
                workload.weights[f"w{layer}"].shape[1],
                param_attr=fluid.ParamAttr(name=f"w{layer}"),
                bias_attr=fluid.ParamAttr(name=f"b{layer}"),
                act="relu" if layer < last else None,
            )
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(hidden, label))
        _optimizer(workload).minimize(loss)
    return Recorded(main, startup, loss.name, [slot_feed(workload, step) for step in range(workload.num_batches)])


def slot_feed(workload: Workload, step: int) -> dict[str, Any]:
    """Return a click-through batch as Fluid's data layers want it: int64[rows, 1] for each slot."""
    batch = workload.batch(step)
    slots = {f"C{slot + 1}": batch["ids"][:, slot : slot + 1].copy() for slot in range(batch["ids"].shape[1])}
    return {**slots, "dense": batch["dense"], "label": batch["label"]}


def trainer(
    workload: Workload, *, build: Any = None, execution: Any = None
) -> tuple[Any, str, Sequence[Mapping[str, Any]]]:
    """Return a ParallelExecutor on CPU_NUM replicas, the name of the loss, and all batches to feed."""
    build = build or strategy()
    if is_ctr(workload):
        recorded = record_ctr(workload)
        scope = Scope()
        fluid.Executor(fluid.CPUPlace()).run(recorded.startup, scope=scope)
        for name, value in workload.weights.items():
            scope.set(name, torch.tensor(value))
        executor = fluid.ParallelExecutor(
            False, recorded.loss, recorded.main, scope=scope, build_strategy=build, exec_strategy=execution
        )
        return executor, recorded.loss, recorded.feeds
    batches = modules.tensors(workload)
    captured = fluid.capture(
        modules.network(workload),
        modules.loss_of,
        _optimizer(workload),
        list(batches[0].values()),
        build_strategy=build,
        exec_strategy=execution,
    )
    feeds = [dict(zip(captured.feed_names, batch.values(), strict=True)) for batch in batches]
    return captured.executor, captured.loss.name, feeds


def trained(workload: Workload, scope: Scope) -> dict[str, Array]:
    """Return the workload's weights as a trainer's scope has them. Raises KeyError for one that is not there."""
    network = None if is_ctr(workload) else modules.network(workload)
    if network is None:
        return {name: np.asarray(_found(scope, name)) for name in workload.weights}
    return modules.trained(workload, {path: _found(scope, f"model.{path}") for path, _ in network.named_parameters()})


def is_ctr(workload: Workload) -> bool:
    """Whether a workload is a click-through one, which is recorded in Fluid's words."""
    return "ids" in workload.feeds and "dense" in workload.feeds


def _found(scope: Scope, name: str) -> torch.Tensor:
    tensor = scope.find(name)
    if tensor is None:
        raise KeyError(name)
    return tensor.detach()


def strategy(mode: str = "reduce") -> Any:
    """Return the BuildStrategy that the documents recommend. `mode`: "reduce" or "all_reduce"."""
    build = fluid.BuildStrategy()
    modes = fluid.BuildStrategy.ReduceStrategy
    build.reduce_strategy = modes.Reduce if mode == "reduce" else modes.AllReduce
    return build


def _optimizer(workload: Workload) -> Any:
    if workload.optimizer == "sgd":
        return fluid.optimizer.SGD(learning_rate=workload.learning_rate)
    return fluid.optimizer.Adam(learning_rate=workload.learning_rate)
