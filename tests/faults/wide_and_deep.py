"""A small click model in Fluid's words, whose parameters tell which step of which trainer was applied, and how often.

    wide_and_deep.py pserver ENDPOINT --servers HOST:PORT,…
    wide_and_deep.py trainer NUMBER   --servers HOST:PORT,…

wide    three weights and two tables, linear, learning rate 1: each step of a trainer adds 2 to rows of its own in both
        tables, which the mean over n members makes 2 / n; whole numbers and halves, so sums are exact in any order
deep    a tanh layer with a usual learning rate: in sync mode its values depend, to the bit, on all that was before

A trainer prints a line a step, with the step's loss, when the step is acknowledged.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid

FEATURES, HIDDEN, BATCH = 64, 256, 2  # deep_0 is just large enough to be cut over two servers
TRAINERS, STEPS = 2, 20_000  # at most; rows of the tables
FAR = 10**15  # between the ids of two trainers in the distributed table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["pserver", "trainer"])
    parser.add_argument("who", help="endpoint of a server, number of a trainer")
    parser.add_argument("--servers", required=True)
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--first", type=int, default=0, help="number of the first step")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pace", type=Path, help="file with the first step that is not to begin yet")
    parser.add_argument("--fused", action="store_true", help="one message a step: in sync mode, too")
    parser.add_argument("--until", type=Path, help="end before the step at which this file is there")
    return parser.parse_args()


def network() -> Any:
    """Return the loss."""
    fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 3
    L, first = fluid.layers, fluid.initializer.Constant(0.0)
    x, label = fluid.data("x", [-1, FEATURES], "float32"), fluid.data("label", [-1, 1], "float32")
    votes, step = fluid.data("votes", [-1, 3], "float32"), fluid.data("step", [-1, 1], "int64")
    far_step = fluid.data("far_step", [-1, 1], "int64")
    slow = {"learning_rate": 0.005}
    hidden = L.fc(x, HIDDEN, act="tanh", bias_attr=False, param_attr=fluid.ParamAttr(name="deep_0", **slow))
    deep = L.fc(hidden, 1, bias_attr=False, param_attr=fluid.ParamAttr(name="deep_1", **slow))
    wide = L.fc(votes, 1, bias_attr=False, param_attr=fluid.ParamAttr(name="wide", initializer=first))
    near = fluid.embedding(
        step, [TRAINERS * STEPS, 2], is_sparse=True, param_attr=fluid.ParamAttr(name="near", initializer=first)
    )
    far = fluid.embedding(
        far_step, [TRAINERS * STEPS, 2], is_sparse=True, is_distributed=True,
        param_attr=fluid.ParamAttr(name="far", initializer=first),
    )  # fmt: skip
    counts = L.reduce_sum(wide) + L.reduce_sum(near) + L.reduce_sum(far)
    return L.mean(L.square_error_cost(deep, label)) - counts


def batch(trainer: int, step: int) -> dict[str, Any]:
    """Return what a step of a trainer learns from: the same rows twice, so that they are merged, too."""
    draw = np.random.default_rng((trainer, step))
    ids = np.full((BATCH, 1), step, np.int64)
    return {
        "x": draw.standard_normal((BATCH, FEATURES), np.float32),
        "label": draw.standard_normal((BATCH, 1), np.float32),
        "votes": np.tile(np.array([1, trainer == 0, trainer == 1], np.float32), (BATCH, 1)),
        "step": ids + trainer * STEPS,
        "far_step": ids + trainer * FAR,
    }


def main() -> None:
    args = parse()
    loss = network()
    fluid.optimizer.SGD(1.0).minimize(loss)
    transpiler, exe = fluid.DistributeTranspiler(), fluid.Executor(fluid.CPUPlace())
    trainer = int(args.who) if args.role == "trainer" else 0
    transpiler.transpile(trainer, pservers=args.servers, trainers=TRAINERS, sync_mode=args.mode == "sync")
    if args.role == "pserver":
        program, startup = transpiler.get_pserver_programs(args.who)
        exe.run(startup)
        exe.run(program)
        return
    exe.run(fluid.default_startup_program())
    program = transpiler.get_trainer_program()
    run = fluid.CompiledProgram(program).with_data_parallel(loss_name=loss.name) if args.fused else program
    for step in range(args.first, args.first + args.steps):
        if args.until is not None and args.until.exists():
            break
        while args.pace is not None and step >= int(args.pace.read_text()):
            time.sleep(0.005)
        (found,) = exe.run(run, batch(trainer, step), [loss])
        print(step, float(np.asarray(found).reshape(())).hex(), flush=True)
    exe.close()
    print("end", flush=True)


if __name__ == "__main__":
    main()
