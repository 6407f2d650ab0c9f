"""A training program with at most one cause built in that makes it slow. It trains until it is ended.

In a job with parameter servers it is a fleet program; else it trains on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.slow_link import slow_link
from torch import Tensor, nn

import penstock as fluid
import penstock.incubate.fleet.base.role_maker as role_maker
from penstock.incubate.fleet.parameter_server.distribute_transpiler import fleet
from penstock.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy_factory import (
    DistributedStrategyFactory,
)

LENGTH = 16
"""Symbols of a row, of the transformer."""
IDS = 8
"""Ids that a row looks up in the sparse table."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("mlp", "lenet", "transformer"), default="mlp")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="num_threads; 0: none is set")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="of the exchange with servers")
    parser.add_argument("--odd-layer", type=int, default=-1, help="layer of a transformer that multiplies in float64")
    parser.add_argument("--words", type=int, default=0, help="rows of a sparse table")
    parser.add_argument("--one-shard", action="store_true", help="look up ids of one server alone")
    parser.add_argument("--read-ms", type=float, default=0.0, help="that the reader needs for a batch")
    parser.add_argument("--read-bytes", type=int, default=0, help="that the reader parses for a batch, in Python")
    parser.add_argument("--fill-after", type=int, default=-1, help="steps after which it fills the disk of its node")
    parser.add_argument("--slow-link", type=int, action="append", default=[], help="a server; may be repeated")
    parser.add_argument("--slow-link-of", type=int, default=0, help="the trainer whose link that is")
    parser.add_argument("--link-mbs", type=float, default=11.0, help="megabytes a second over it, each way")
    parser.add_argument("--slow-reader-of", type=int, default=-1, help="the only trainer whose reader needs that")
    return parser.parse_args()


class Layer(nn.Module):
    """float32[rows, LENGTH, width] to the same; `odd`: its inner matmul is in float64, as after a forgotten cast."""

    def __init__(self, width: int, *, odd: bool) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.odd = nn.LayerNorm(width), odd

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)
        if self.odd:
            up = nn.functional.linear(x.double(), self.up.weight.double(), self.up.bias.double()).relu()
            inner: Tensor = nn.functional.linear(up, self.down.weight.double(), self.down.bias.double()).float()
        else:
            inner = self.down(self.up(x).relu())
        return x + inner


class Encoder(nn.Module):
    """Layers one after another, then the mean over the symbols."""

    def __init__(self, width: int, count: int, odd: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, odd=at == odd) for at in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


def network(args: argparse.Namespace) -> Any:
    x = fluid.layers.data(name="x", shape=shape_of(args), dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    hidden = x
    if args.words:
        word = fluid.layers.data(name="word", shape=[IDS], dtype="int64")
        table = fluid.layers.embedding(input=word, size=[args.words, 64], is_sparse=True, param_attr="table")
        hidden = fluid.layers.concat([x, fluid.layers.reshape(table, [-1, IDS * 64])], axis=1)
    if args.model == "lenet":
        for channels in (20, 50):
            hidden = fluid.nets.simple_img_conv_pool(
                hidden, filter_size=5, num_filters=channels, pool_size=2, pool_stride=2, act="relu"
            )
    if args.model == "transformer":
        hidden = Encoder(args.width, args.layers, args.odd_layer)(hidden)
    for _ in range(args.layers if args.model == "mlp" else 1):
        hidden = fluid.layers.fc(hidden, size=args.width, act="relu")
    return fluid.layers.mean(fluid.layers.square_error_cost(input=fluid.layers.fc(hidden, size=1), label=y))


def shape_of(args: argparse.Namespace) -> list[int]:
    return {"lenet": [1, 28, 28], "transformer": [LENGTH, args.width]}.get(args.model, [args.width])


def batches(args: argparse.Namespace, trainer: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(trainer)
    fed = {"x": rng.standard_normal((args.rows, *shape_of(args))).astype("float32"),
           "y": rng.standard_normal((args.rows, 1)).astype("float32")}  # fmt: skip
    if args.words:
        ids = rng.integers(0, args.words, (args.rows, IDS))
        fed["word"] = ids // 2 * 2 if args.one_shard else ids
    line = " ".join("1" for _ in range(args.read_bytes // 2))
    for step in itertools.count():
        if step == args.fill_after:
            fill_the_disk()
        if args.slow_reader_of in (-1, trainer):
            time.sleep(args.read_ms / 1e3)
            sum(float(word) for word in line.split())
        yield fed


def fill_the_disk() -> None:
    """Write until there is no room, as a script does that saves too often."""
    with contextlib.suppress(OSError), Path("saved").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()


def threads(args: argparse.Namespace) -> fluid.ExecutionStrategy:
    strategy = fluid.ExecutionStrategy()
    if args.threads:
        strategy.num_threads = args.threads
    return strategy


def run_here(args: argparse.Namespace) -> None:
    loss = network(args)
    fluid.optimizer.SGD(1e-4).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    program = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(
        loss_name=loss.name, exec_strategy=threads(args)
    )
    for fed in batches(args, 0):
        exe.run(program, feed=fed, fetch_list=[loss])


def run_with_servers(args: argparse.Namespace) -> None:
    loss = network(args)
    make = DistributedStrategyFactory
    strategy = make.create_sync_strategy() if args.mode == "sync" else make.create_async_strategy()
    fleet.init(role_maker.PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.SGD(1e-4), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    with contextlib.ExitStack() as links:  # channels are opened by init_worker, and after a failure
        for server in args.slow_link if fleet.worker_index() == args.slow_link_of else ():
            links.enter_context(slow_link(fleet.server_endpoints()[server], args.link_mbs * 1e6))
        train_with_servers(args, loss, strategy)


def train_with_servers(args: argparse.Namespace, loss: Any, strategy: Any) -> None:
    exe = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    program = fluid.CompiledProgram(fleet.main_program).with_data_parallel(
        loss_name=loss.name, build_strategy=strategy.get_build_strategy(), exec_strategy=threads(args)
    )
    for fed in batches(args, fleet.worker_index()):
        exe.run(program, feed=fed, fetch_list=[loss])


if __name__ == "__main__":
    given = parse()
    if os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST"):
        run_with_servers(given)
    else:
        run_here(given)
