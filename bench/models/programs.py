"""The workloads as Penstock runs them: click-through ones and din as Fluid programs, the others captured from torch.

`trainer(workload)` gives an executor with the workload's initial values in a scope of its own, and the batches as it is
fed; `make` of `bench.peers.penstock_executor` times it, other benchmarks may take it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import penstock as fluid
from bench.models import modules
from bench.workloads.workload import Array, Workload
from penstock.program.optimizers.adam import TorchAdamOptimizer
from penstock.scope import Scope


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload's programs; `loss` is a name. `feeds` are all its batches under the names of its data layers."""

    main: Any
    startup: Any
    loss: str
    feeds: Sequence[Mapping[str, Any]]


def record_ctr(
    workload: Workload, *, padded: bool = False, after: Callable[[Any], Any] = lambda hidden: hidden
) -> Recorded:
    """Record CTR-DNN in Fluid's own words: a lookup for each slot, in one shared table or a table each.

    Slots of several ids are ragged, or with `padded` batches of one length. `after`: of each layer of the tower.
    """
    several = "lengths" in workload.feeds
    shared = "table" in workload.weights
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        parts = []
        for slot, (ids, lengths) in enumerate(_slots(workload, padded=padded)):
            name = "table" if shared else f"table{slot}"
            size = list(workload.weights[name].shape)
            rows = fluid.layers.embedding(ids, size, is_sparse=True, param_attr=fluid.ParamAttr(name=name))
            parts.append(fluid.layers.sequence_pool(rows, "sum", lengths=lengths) if several else rows)
        parts.append(fluid.layers.data(name="dense", shape=[workload.feeds["dense"].shape[2]], dtype="float32"))
        hidden = fluid.layers.concat(parts, axis=1)
        hidden = _tower(workload, hidden, "", 1, after)
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(hidden, label))
        _optimizer(workload).minimize(loss)
    feed = slot_feed if not several else padded_feed if padded else ragged_feed
    return Recorded(main, startup, loss.name, [feed(workload, step) for step in range(workload.num_batches)])


def _slots(workload: Workload, *, padded: bool) -> Iterator[tuple[Any, Any]]:
    """Declare the ids of each slot; padded ones are parts of one input, with lengths."""
    slots, several = workload.feeds["ids"].shape[2], "lengths" in workload.feeds
    if padded:
        ids = fluid.layers.data(name="ids", shape=[-1, slots, -1], dtype="int64")
        lengths = fluid.layers.data(name="lengths", shape=[slots], dtype="int64")
        for slot in range(slots):
            yield ids[:, slot], lengths[:, slot]
        return
    for slot in range(slots):
        yield fluid.layers.data(name=f"C{slot + 1}", shape=[1], dtype="int64", lod_level=int(several)), None


def record_din(workload: Workload) -> Recorded:
    """Record the Deep Interest Network: histories of any length, which a batch shares."""
    weights = workload.weights

    def rows(ids: Any, column: int) -> Any:
        attribute, size = fluid.ParamAttr(name=f"table{column}"), list(weights[f"table{column}"].shape)
        return fluid.layers.embedding(ids, size, is_sparse=True, param_attr=attribute)

    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        target = fluid.layers.data(name="target", shape=[2], dtype="int64")
        history = fluid.layers.data(name="history", shape=[-1, -1, 2], dtype="int64")
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        targets = fluid.layers.concat([rows(target[:, k : k + 1], k) for k in range(2)], axis=1)
        clicks = fluid.layers.concat([rows(history[:, :, k : k + 1], k) for k in range(2)], axis=2)
        beside = targets.unsqueeze(1).expand_as(clicks)
        pairs = fluid.layers.concat([beside, clicks, beside - clicks, beside * clicks], axis=2)
        scores = _tower(workload, pairs, "a.", 2).squeeze(2).masked_fill(history[:, :, 0] == 0, -1e9)
        interest = torch.bmm(torch.softmax(scores, dim=1).unsqueeze(1), clicks).squeeze(1)
        logits = _tower(workload, fluid.layers.concat([interest, targets, interest * targets], axis=1), "", 1)
        loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(logits, label))
        _optimizer(workload).minimize(loss)
    feeds = [
        {name: np.ascontiguousarray(values) for name, values in workload.batch(step).items()}
        for step in range(workload.num_batches)
    ]
    return Recorded(main, startup, loss.name, feeds)


def _tower(
    workload: Workload, hidden: Any, prefix: str, flatten_dims: int,
    after: Callable[[Any], Any] = lambda hidden: hidden,
) -> Any:  # fmt: skip
    """Record the workload's linear layers, with relu between them."""
    last = sum(key.startswith(f"{prefix}w") for key in workload.weights) - 1
    for layer in range(last + 1):
        hidden = fluid.layers.fc(
            hidden,
            workload.weights[f"{prefix}w{layer}"].shape[1],
            num_flatten_dims=flatten_dims,
            param_attr=fluid.ParamAttr(name=f"{prefix}w{layer}"),
            bias_attr=fluid.ParamAttr(name=f"{prefix}b{layer}") if f"{prefix}b{layer}" in workload.weights else False,
            act="relu" if layer < last else None,
        )
        hidden = after(hidden)
    return hidden


def slot_feed(workload: Workload, step: int) -> dict[str, Any]:
    """Return a click-through batch as Fluid's data layers want it: int64[rows, 1] for each slot."""
    batch = workload.batch(step)
    slots = {f"C{slot + 1}": batch["ids"][:, slot : slot + 1].copy() for slot in range(batch["ids"].shape[1])}
    return {**slots, "dense": batch["dense"], "label": batch["label"]}


def ragged_feed(workload: Workload, step: int) -> dict[str, Any]:
    """Return a batch of slots with several ids, each as rows int64[ids, 1] with their lengths."""
    batch, slots = workload.batch(step), workload.bags(step)
    made = {f"C{slot + 1}": ids[:, None] for slot, (ids, _) in enumerate(slots)}
    made |= {f"C{slot + 1}@LENGTHS": lengths[:, None] for slot, (_, lengths) in enumerate(slots)}
    return {**made, "dense": batch["dense"], "label": batch["label"]}


def padded_feed(workload: Workload, step: int) -> dict[str, Any]:
    """Return the same batch as int64[rows, slots, longest of the batch], zeros behind the lengths."""
    batch = workload.batch(step)
    return {**batch, "ids": batch["ids"][:, :, : int(batch["lengths"].max())].copy()}


def trainer(
    workload: Workload,
    *,
    build: Any = None,
    execution: Any = None,
    padded: bool = False,
    use_cuda: bool = False,
    fixed: bool = False,
) -> tuple[Any, str, Sequence[Mapping[str, Any]]]:
    """Return a ParallelExecutor on CPU_NUM replicas or every GPU, the name of the loss, and all batches to feed.

    `fixed`: what is captured from torch is recorded for batches of this size alone.
    """
    build = build or strategy()
    if is_recorded(workload):
        recorded = record_din(workload) if "history" in workload.feeds else record_ctr(workload, padded=padded)
        scope = Scope()
        fluid.Executor(fluid.CPUPlace()).run(recorded.startup, scope=scope)
        for name, value in workload.weights.items():
            scope.set(name, torch.tensor(value))
        executor = fluid.ParallelExecutor(
            use_cuda, recorded.loss, recorded.main, scope=scope, build_strategy=build, exec_strategy=execution
        )
        return executor, recorded.loss, recorded.feeds
    batches = modules.tensors(workload)
    captured = fluid.capture(
        modules.network(workload),
        modules.loss_of,
        _optimizer(workload),
        list(batches[0].values()),
        static_inputs=range(len(batches[0])) if fixed else (),
        build_strategy=build,
        exec_strategy=execution,
        use_cuda=use_cuda,
    )
    feeds = [dict(zip(captured.feed_names, batch.values(), strict=True)) for batch in batches]
    return captured.executor, captured.loss.name, feeds


def trained(workload: Workload, scope: Scope) -> dict[str, Array]:
    """Return the workload's weights as a trainer's scope has them. Raises KeyError for one that is not there."""
    network = None if is_recorded(workload) else modules.network(workload)
    if network is None:
        return {name: np.asarray(_found(scope, name)) for name in workload.weights}
    return modules.trained(workload, {path: _found(scope, f"model.{path}") for path, _ in network.named_parameters()})


def is_ctr(workload: Workload) -> bool:
    """Whether a workload is a click-through one, which is recorded in Fluid's words."""
    return "ids" in workload.feeds and "dense" in workload.feeds


def is_recorded(workload: Workload) -> bool:
    """Whether a workload is recorded in Fluid's words; the others are captured."""
    return is_ctr(workload) or "history" in workload.feeds


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
    # epsilon where torch and PaddlePaddle 2 have it: all contenders make the same update
    return TorchAdamOptimizer(workload.learning_rate)
